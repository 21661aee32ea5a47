"""Read long bodies as they arrive: their announced length, then pieces of about a MiB."""

from collections.abc import Callable

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from api.asgi.body_limits import MAX_LENGTH_DIGITS
from api.errors import ApiError

PIECE_BYTES = 1 << 20
"""A switch to a worker thread takes about 50 us: too much for every 64 KiB from the socket."""


def announced_length(request: Request) -> int:
    """Return the announced length of a body in bytes.

    Raises:
        ApiError: 411, no length is announced.
    """
    text = request.headers.get("content-length", "")
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_LENGTH_DIGITS):
        raise ApiError(411, "Content-Length is required: how many bytes the body has", code="length_required")
    return int(text)


async def read_pieces(request: Request, take: Callable[[bytes], object]) -> None:
    """Pass a body to `take` as it arrives, in a worker thread.

    Raises:
        Exception: raised by `take`.
    """
    pending = bytearray()
    async for chunk in request.stream():
        pending += chunk
        if len(pending) >= PIECE_BYTES:
            await run_in_threadpool(take, bytes(pending))
            pending.clear()
    await run_in_threadpool(take, bytes(pending))
