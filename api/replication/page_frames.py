"""Transfer format of pages between servers: a stream of frames, each with whole pages and the CRC-32 of their bytes.

TCP's checksum misses about one damaged segment in ten thousand. The pages of a damaged frame and of those after it are
computed instead.
"""

import zlib
from collections.abc import Iterator

from pydantic import BaseModel

FRAME_BYTES = 4 << 20
"""Most bytes of a frame, unless one page is larger; sender and reader each hold two frames."""
CHECK_BYTES = 4
LAYOUT = 1
"""Version of offers and frames."""


class PageOffer(BaseModel):
    """Answer a server that asks for pages."""

    # None: there are no pages.
    lease: str | None
    pages: int
    # Bytes of a page.
    page_bytes: int


def check_of(data: memoryview) -> bytes:
    """Return the CRC-32 that follows the pages in their frame."""
    return zlib.crc32(data).to_bytes(CHECK_BYTES, "little")


def frames(num_pages: int, page_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first page and the number of pages of each frame."""
    most = max(1, FRAME_BYTES // page_bytes)
    for first in range(0, num_pages, most):
        yield first, min(most, num_pages - first)


def stream_bytes(num_pages: int, page_bytes: int) -> int:
    """Return the length of the stream in bytes."""
    return num_pages * page_bytes + CHECK_BYTES * sum(1 for _ in frames(num_pages, page_bytes))
