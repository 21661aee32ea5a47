"""Parse and apply query and header conventions of lists and records: paging, search, ETag and If-Match.

Lists are complete by default. A change with If-Match applies only to the state that its caller has seen (RFC 9110
section 13.1.1).
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from fastapi.responses import Response

from adapter_store.registry.records import AdapterRecord
from api.errors import ApiError

MAX_PAGE = 100_000
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
Limit = Annotated[int | None, Query(ge=1, le=MAX_PAGE)]


def page(
    records: Sequence[AdapterRecord], search: str, limit: int | None, after: str | None
) -> tuple[list[AdapterRecord], bool]:
    """Return up to `limit` records whose id contains `search`, after the id `after`, and whether there are more.

    Args:
        records: sorted by id.
        after: an id, which may have been deleted: the next page is correct even if ids came and went meanwhile.
    """
    begin = bisect_right(records, after, key=lambda record: record.adapter_id) if after is not None else 0
    wanted = search.lower()
    found = (records[i] for i in range(begin, len(records)) if wanted in records[i].adapter_id)
    if limit is None:
        return list(found), False
    first = list(islice(found, limit + 1))
    return first[:limit], len(first) > limit


def listing(entries: Iterable[dict[str, Any]], has_more: bool) -> Response:
    """Build a list response in OpenAI's form; call in a thread.

    Entries are encoded one by one: a single call for 5,000 entries holds the GIL, and all streams, for some 30 ms.
    """
    data = ",".join(map(_encode, entries))
    body = f'{{"object":"list","data":[{data}],"has_more":{_encode(has_more)}}}'
    return Response(body, media_type="application/json")


def etag_header(record: AdapterRecord) -> dict[str, str]:
    """Return the ETag header of a record."""
    return {"etag": f'"{record.etag}"'}


def if_match(request: Request) -> frozenset[str] | None:
    """Return the ETags that the caller accepts, without quotes; None without the header.

    Weak tags match nothing, as in the RFC. Neither does the quoted tag `"*"`, which is not the wildcard. The digest of
    the current content is accepted as a tag, too.
    """
    values = request.headers.getlist("if-match")
    if not values:
        return None
    tags = (tag.strip() for tag in ",".join(values).split(","))
    return frozenset(tag.strip('"') for tag in tags if tag != '"*"')


def names_no_replica(request: Request) -> None:
    """Refuse `?replica=ID`, which only an edge understands: this server might not be the replica that is meant.

    Raises:
        ApiError: 404.
    """
    if "replica" in request.query_params:
        why = "this is one server, not the address of several; leave replica out (--replica)"
        raise ApiError(404, why, code="not_found", param="replica")


OF_ONE_SERVER = (Depends(names_no_replica),)
NO_POOL = (
    "has no pool: send this to a server that follows it; behind an edge, name one of /v1/replicas with ?replica=ID "
    "(--replica ID)"
)
"""What a registry answers to requests about a pool; an edge sends it those that name no replica."""
IfMatch = Annotated[frozenset[str] | None, Depends(if_match)]
