"""Bound request bodies by the bytes received, before any route sees them.

Starlette and FastAPI read bodies of any size; this middleware wraps `receive`, so that no route can forget the bound.
`api.asgi.protocol` drops the rest of a body after its response has been sent.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.principal import ANYBODY, caller_of
from api.errors import ApiError, describe_at
from lorasrv.worker.host_memory import release_freed

MAX_JSON_BYTES = 8 << 20
MAX_BARE_BYTES = 4 << 10
"""Bound for methods that need no body: GET, HEAD, DELETE, OPTIONS."""
MAX_HELD_BYTES = 256 << 20
"""Bound of all JSON bodies in memory at a time."""
MAX_LENGTH_DIGITS = 18
LARGE_BYTES = 256 << 10
"""Parsing and tokenizing a body of this size briefly takes tens of megabytes."""
RELEASE_AFTER_S = 1.0
PARSING = "parsing"
"""Key of the parsing semaphore in an ASGI scope's `state`."""
_BARE_METHODS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})
_CLOSE = {"connection": "close"}


class BodyLimitMiddleware:
    """Refuse compressed bodies (415), bodies too long for their route (413), and bodies that would exceed the total in
    memory (503).

    An uploaded file may be as long as its announced length, which its route bounds.
    """

    def __init__(
        self, app: ASGIApp, max_held_bytes: int = MAX_HELD_BYTES, release: Callable[[], None] = release_freed
    ) -> None:
        self._app = app
        self._release = release
        self._releasing: asyncio.TimerHandle | None = None
        self._max_held_bytes = max_held_bytes
        self._held_by: Counter[str] = Counter()
        self._parsing = asyncio.Semaphore(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_file = _is_file(scope["method"], scope["path"])
        most = _most(headers, scope["method"], is_file)
        if (refusal := _refusal(headers, most)) is not None:
            await describe_at(scope["path"], refusal).response()(scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), PARSING: self._parsing}
        received = held = 0
        caller = caller_of(scope)
        # One key gets at most half of the total, because a slow sender holds it for long.
        own_most = self._max_held_bytes if caller is ANYBODY else self._max_held_bytes // 2

        async def receive_bounded() -> Message:
            nonlocal received, held
            message = await receive()
            size = len(message.get("body", b"")) if message["type"] == "http.request" else 0
            received += size
            if received > most:
                raise _too_large(most)
            if size and not is_file:
                own, of_all = self._held_by[caller.principal], self._held_by.total()
                if own + size > own_most or of_all + size > self._max_held_bytes:
                    raise _too_many()
                self._held_by[caller.principal] += size
                held += size
            return message

        def let_go() -> None:
            nonlocal held
            self._held_by[caller.principal] -= held
            held = 0
            if not self._held_by[caller.principal]:
                del self._held_by[caller.principal]

        async def send_and_let_go(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The application has read the body, and a streamed response may last for long.
                let_go()
            await send(message)

        try:
            await self._app(scope, receive_bounded, send_and_let_go)
        finally:
            let_go()
            if received > LARGE_BYTES and not is_file and self._releasing is None:
                self._releasing = asyncio.get_running_loop().call_later(RELEASE_AFTER_S, self._release_memory)

    def _release_memory(self) -> None:
        """Return the memory of all large bodies of the last second to the system."""
        self._releasing = None
        asyncio.get_running_loop().run_in_executor(None, self._release)


def parsing_alone(scope: Scope) -> AbstractAsyncContextManager[None]:
    """Hold the parsing semaphore while a large body is parsed.

    The result may take 26 times the body's bytes, so many at a time could exceed the memory. Throughput does not
    suffer, because parsing holds the GIL anyway.
    """
    turn: asyncio.Semaphore | None = scope.get("state", {}).get(PARSING)
    return nullcontext() if turn is None else turn


def check_not_compressed(headers: Headers) -> None:
    """Refuse compressed bodies: a small one may expand to a very large one.

    Raises:
        ApiError: 415.
    """
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "compressed bodies are not accepted", code="unsupported_media_type", headers=_CLOSE)


def _is_file(method: str, path: str) -> bool:
    return (method == "PUT" and path.startswith("/v1/blobs/")) or (method == "POST" and path == "/v1/files")


def _most(headers: Headers, method: str, is_file: bool) -> int:
    """Return the most bytes that may arrive. For a file, this is its announced length; its route refuses a file without
    one.
    """
    if is_file:
        return _announced(headers) or 0
    return MAX_BARE_BYTES if method in _BARE_METHODS else MAX_JSON_BYTES


def _announced(headers: Headers) -> int | None:
    """Return Content-Length; None if missing or not a number. Digits beyond `MAX_LENGTH_DIGITS` are cut off."""
    text = headers.get("content-length", "")
    return int(text[:MAX_LENGTH_DIGITS]) if text.isascii() and text.isdigit() else None


def _refusal(headers: Headers, most: int) -> ApiError | None:
    """Return the error if the headers alone show that the body is refused; None if they do not."""
    try:
        check_not_compressed(headers)
    except ApiError as refusal:
        return refusal
    announced = _announced(headers)
    return _too_large(most) if announced is not None and announced > most else None


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes", code="body_too_large", headers=_CLOSE)


def _too_many() -> ApiError:
    return ApiError(
        503,
        "the bodies of other requests use all of their memory; retry this request",
        code="server_busy",
        headers={**_CLOSE, "retry-after": "1"},
    )
