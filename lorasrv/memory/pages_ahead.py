"""Pages ahead: which pages of the pool will be used soon, so that their memory is committed while there is nothing to
compute.

The operating system commits memory of a buffer at the first write, in pieces of 2 MiB if possible. In a virtual machine
a piece may take milliseconds, and a page of keys and values needs one in every slab.
"""

from typing import NamedTuple

from lorasrv.memory.page_pool import PagePool

AHEAD_BYTES = 256 << 20
"""Most bytes that are committed before they are used."""
AHEAD_SHARE = 8
"""At most one part in this many of a pool is committed before it is used."""
PIECE_BYTES = 2 << 20
"""Bytes that are committed at a time, which takes a few milliseconds."""


class PagePiece(NamedTuple):
    """Name neighbouring pages of one slab."""

    slab: int
    first_page: int
    num_pages: int


class PagesAhead:
    """Choose the pages from which single pages of a pool will be taken next.

    Args:
        page_bytes: bytes of a page in one slab.
        block_bytes: bytes of a page in all slabs.
    """

    def __init__(self, pool: PagePool, page_bytes: int, num_slabs: int, block_bytes: int) -> None:
        self._pool, self._num_slabs = pool, num_slabs
        self._ahead = min(AHEAD_BYTES // block_bytes, pool.num_pages // AHEAD_SHARE)
        self._piece = max(1, PIECE_BYTES // page_bytes)
        self._first, self._slab = pool.first, 0

    def take(self) -> PagePiece | None:
        """Return the next piece that was neither returned nor used before; None if there is none nearby."""
        pool, piece = self._pool, self._piece
        if self._slab == 0:
            self._first += max(0, pool.reach - self._first) // piece * piece
        if self._first + piece > min(pool.reach + self._ahead, pool.first + pool.num_pages):
            return None
        taken = PagePiece(self._slab, self._first, piece)
        self._slab += 1
        if self._slab == self._num_slabs:
            self._first, self._slab = self._first + piece, 0
        return taken
