"""ETag and If-Match: a change is done only to the state that its caller has seen (RFC 9110 section 13.1.1)."""

from typing import Annotated

from fastapi import Depends, Request

from adapter_store.records import AdapterRecord


def etag_header(record: AdapterRecord) -> dict[str, str]:
    """The header that tells an id's state."""
    return {"etag": f'"{record.etag}"'}


def if_match(request: Request) -> frozenset[str] | None:
    """The states that the caller accepts, without quotes; None if there is no such header.

    Weak tags match nothing, as the RFC has it, nor does `"*"`, which is a tag like any other. The digest of the current
    content stands for the state, too.
    """
    values = request.headers.getlist("if-match")
    if not values:
        return None
    tags = (tag.strip() for tag in ",".join(values).split(","))
    return frozenset(tag.strip('"') for tag in tags if tag != '"*"')


IfMatch = Annotated[frozenset[str] | None, Depends(if_match)]
