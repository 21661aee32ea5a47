"""Decide where a request goes, and which of its headers are forwarded.

The edge frames each message anew, so no header of a client can decide where a request ends (RFC 9112 section 11.2).
"""

import re
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any
from urllib.parse import parse_qsl, quote

from api.auth.scopes import GENERATING
from api.errors import ApiError
from api.schemas.adapters import MAX_TIMEOUT_S

RawHeaders = list[tuple[bytes, bytes]]
OURS = b"x-lorasrv-"
MIN_REVISION = b"x-lorasrv-min-revision"
"""The only header of ours that a client may send."""
READ_S, WRITE_S = 30.0, 300.0
"""Longest time until an answer begins: of a request that reads from a disk at most, and of one that writes to it."""
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_FRAMING = frozenset({b"content-length", b"expect"})
"""Headers that the edge answers itself, or writes anew for the replica."""
_ANEW = frozenset({b"date"})
"""Headers that the edge's own server writes."""
_OF_REPLICAS = frozenset(
    {
        *(("POST", path) for path in GENERATING),
        *(("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info")),
        *(("GET", "/info"), ("GET", "/v1/pool"), ("GET", "/openapi.json")),
        *((method, path) for method in ("GET", "POST") for path in ("/v1/embeddings", "/v1/messages")),
    }
)
_TIMEOUT_IN_BODY = re.compile(r"/v1/adapters/[^/]+:verify")
_SECONDS = re.compile(r"\d{1,4}(\.\d{1,9})?")
_OF_ONE_REPLICA = re.compile(r"/v1/adapters/[^/]+:warm")


class Destination(Enum):
    """Name the kind of server that answers a request."""

    REPLICA = auto()
    REGISTRY = auto()


def destination(method: str, path: str) -> Destination:
    """Return who answers: a replica if the request needs an engine, else the registry, which alone writes the store
    and lists its contents.
    """
    asked = "GET" if method == "HEAD" else method
    is_warm = asked == "POST" and _OF_ONE_REPLICA.fullmatch(path) is not None
    return Destination.REPLICA if is_warm or (asked, path) in _OF_REPLICAS else Destination.REGISTRY


def silent_s(method: str, path: str, query: bytes) -> float:
    """Return the seconds within which an answer must begin, including any wait that the request itself asks for."""
    most_s = READ_S if method in ("GET", "HEAD") else WRITE_S
    if _TIMEOUT_IN_BODY.fullmatch(path):
        return most_s + MAX_TIMEOUT_S
    named = (value for name, value in parse_qsl(query.decode("latin-1")) if name in ("wait", "wait_s"))
    return most_s + max((float(value) for value in named if _SECONDS.fullmatch(value)), default=0.0)


def check_framing(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a request whose length is ambiguous.

    Raises:
        ApiError: 400.
    """
    framing = [name for name, _ in headers if name in (b"content-length", b"transfer-encoding")]
    if len(framing) > 1:
        raise ApiError(
            400,
            "the body's length is given twice, by Content-Length and by Transfer-Encoding",
            code="invalid_http",
            headers={"connection": "close"},
        )


def forwarded(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> RawHeaders:
    """Return the client's headers that a replica sees, without those that give the body's length."""
    given = list(headers)
    dropped = (_HOP_BY_HOP | _FRAMING | _named_by_connection(given) | {b"x-request-id"}) - {b"host"}
    # Replicas are asked in HTTP/1.1, which requires a Host; a client's HTTP/1.0 request may have none.
    host = [] if any(name == b"host" for name, _ in given) else [(b"host", b"")]
    kept = [
        (name, value)
        for name, value in given
        if name not in dropped and (name == MIN_REVISION or not name.startswith(OURS))
    ]
    return [*host, *kept, (b"x-request-id", request_id.encode())]


def returned(headers: Iterable[tuple[bytes, bytes]], hidden: frozenset[bytes] = frozenset()) -> RawHeaders:
    """Return the headers of an answer that the client sees."""
    given = list(headers)
    dropped = _HOP_BY_HOP | _ANEW | _named_by_connection(given) | hidden
    return [(name, value) for name, value in given if name not in dropped]


def target_of(scope: Mapping[str, Any]) -> bytes:
    """Return path and query as the client wrote them."""
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the headers that are meant for the next hop alone."""
    named = (value for name, value in headers if name == b"connection")
    return frozenset(token.strip().lower() for value in named for token in value.split(b","))
