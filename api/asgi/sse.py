"""Event streams, and work that ends when the client goes away."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.asgi.json_lines import compact_line

T = TypeVar("T")
CHUNKS = "lorasrv.http.response.chunks"
"""ASGI extension: `scope["extensions"][CHUNKS]` is a `ChunkSender`. It sends parts of a streamed body directly, past
the `send` of every middleware and h11's bookkeeping, which would take a quarter of a streamed token's time."""
DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no", "content-type": "text/event-stream; charset=utf-8"}


class ChunkSender(Protocol):
    """Send parts of a body without an announced length, after the response's head."""

    @property
    def can_write(self) -> bool:
        """Return whether the client keeps up with reading."""

    def write(self, data: bytes) -> None:
        """Send a part at once; only while `can_write`."""

    async def send(self, data: bytes) -> None:
        """Send a part as soon as the client has read enough."""


class ClientDisconnected(Exception):
    """Signal that the client closed its connection."""


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it as soon as the client disconnects. Call it once the body has been read.

    Starlette watches only streaming responses, and only below ASGI 2.4. A plain handler would generate the whole answer
    for a client that is gone.

    Raises:
        ClientDisconnected: after `work` has ended.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        pending = [future for future in (task, watcher) if not future.done()]
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ByteStream(Response):
    """Send byte chunks as they arrive, and call `close` at the end, whether done, disconnected or cancelled.

    Args:
        push_to: called with the connection's `ChunkSender`, if it has one, once the head is sent. It may write there
            while the response waits for the next of `chunks`.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[Any, None],
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
        num_bytes: int | None = None,
        push_to: Callable[[ChunkSender], None] | None = None,
    ) -> None:
        super().__init__(status_code=200, headers=headers)
        del self.headers["content-length"]
        if num_bytes is not None:
            self.headers["content-length"] = str(num_bytes)
        self._chunks = chunks
        self._close = close
        self._push_to = push_to

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_all(scope, send))
        except (ClientDisconnected, OSError):
            return
        finally:
            await self._chunks.aclose()
            await self._close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async def send_body(chunk: bytes) -> None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        # A body with an announced length is not sent in HTTP chunks.
        is_framed = "content-length" in self.headers
        sender: ChunkSender | None = None if is_framed else scope.get("extensions", {}).get(CHUNKS)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if sender is not None and self._push_to is not None:
            self._push_to(sender)
        send_chunk = send_body if sender is None else sender.send
        async for chunk in self._chunks:
            await send_chunk(chunk)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(ByteStream):
    """Send events as they arrive; arguments as for `ByteStream`."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
        push_to: Callable[[ChunkSender], None] | None = None,
    ) -> None:
        super().__init__(events, close, {**headers, **HEADERS}, push_to=push_to)


def event(payload: Mapping[str, Any]) -> bytes:
    """Format one `data:` event."""
    return event_of(compact_line(payload))


def named_event(name: str, payload: Mapping[str, Any]) -> bytes:
    """Format one event that has a name."""
    return f"event: {name}\n".encode() + event(payload)


def event_of(line: str) -> bytes:
    """Format one `data:` event of a line of JSON."""
    return f"data: {line}\n\n".encode()
