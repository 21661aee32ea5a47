"""Bound the memory of responses that clients read slowly.

uvicorn hands each message of a body to the transport whole, and only then checks whether the client reads. For a client
that does not, a response in one message would be held twice. Large responses are therefore sent in pieces, and the
bytes of large responses being sent are bounded in total and per key.
"""

from collections import Counter

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.asgi.draining import PEER_PATHS
from api.auth.principal import ANYBODY, Caller, caller_of
from api.errors import ApiError, describe_at

PIECE_BYTES = 32 << 10
LARGE_BYTES = 64 << 10
"""Smaller responses are not counted: one per connection is harmless."""
MAX_UNSENT_BYTES = 256 << 20
"""Bound of all large responses being sent at a time."""


class ResponseLimitMiddleware:
    """Split bodies into pieces, and refuse with 503 a large response that would exceed the bound.

    A single response larger than the bound is sent if no other is being sent.
    """

    def __init__(self, app: ASGIApp, max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        self._app = app
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent_by: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not for pages: other servers of the cluster read them as fast as they can, and each frame is bounded.
        if scope["type"] != "http" or scope["path"].startswith(PEER_PATHS):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        unsent, caller = 0, caller_of(scope)

        async def send_bounded(message: Message) -> None:
            nonlocal start, unsent
            if message["type"] == "http.response.start" and _is_large(message):
                # The first message of the body shows whether all of it is in memory or it is read while being sent.
                start = message
                return
            if start is not None:
                begun, start = start, None
                if not message.get("more_body", False):
                    size = len(message.get("body", b""))
                    if self._is_too_much(size, caller):
                        await describe_at(scope["path"], _too_much()).response()(scope, receive, send)
                        return
                    self._unsent_by[caller.principal] += size
                    unsent = size
                await send(begun)
            await _send_pieces(message, send)

        try:
            await self._app(scope, receive, send_bounded)
        finally:
            self._unsent_by[caller.principal] -= unsent
            if not self._unsent_by[caller.principal]:
                del self._unsent_by[caller.principal]

    def _is_too_much(self, size: int, caller: Caller) -> bool:
        own, of_all = self._unsent_by[caller.principal], self._unsent_by.total()
        own_most = self._max_unsent_bytes if caller is ANYBODY else self._max_unsent_bytes // 2
        return bool(own and own + size > own_most) or bool(of_all and of_all + size > self._max_unsent_bytes)


async def _send_pieces(message: Message, send: Send) -> None:
    body = message.get("body", b"")
    if message["type"] != "http.response.body" or len(body) <= PIECE_BYTES:
        await send(message)
        return
    for begin in range(0, len(body), PIECE_BYTES):
        more = message.get("more_body", False) or begin + PIECE_BYTES < len(body)
        await send({**message, "body": body[begin : begin + PIECE_BYTES], "more_body": more})


def _is_large(start: Message) -> bool:
    length = Headers(raw=start.get("headers", [])).get("content-length", "")
    return length.isdigit() and int(length) > LARGE_BYTES


def _too_much() -> ApiError:
    return ApiError(
        503,
        "responses that are not read yet use all of their memory; read them, then retry this request",
        code="server_busy",
        headers={"retry-after": "1"},
    )
