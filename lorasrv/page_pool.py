"""Which page is free and who shares it: ids and counts, no memory. The one owner of page ids.

KV takes single pages from the low end, adapters take runs from the high end; nothing is reserved for either. Searches
run over a byte map (one byte a page), so that the interpreter's own memory search does the walking.
"""

from collections.abc import Iterable

from sgmv_kernels.layout import Run

_FREE = b"\x01"


class PagePool:
    """`num_pages` pages with reference counts. Mutated by the engine thread only."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self._refcounts = [0] * num_pages
        self._free_map = bytearray(_FREE * num_pages)
        self._num_free = num_pages
        self._lowest_free = 0

    @property
    def num_pages(self) -> int:
        return len(self._refcounts)

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate_low(self, count: int) -> list[int] | None:
        """`count` pages with a count of one each, the lowest free ids; None (and nothing taken) if there are fewer."""
        if count > self._num_free:
            return None
        pages = []
        for _ in range(count):
            page = self._free_map.find(_FREE, self._lowest_free)
            self._take(page, 1)
            self._lowest_free = page + 1
            pages.append(page)
        return pages

    def allocate_run(self, count: int) -> Run | None:
        """`count` consecutive pages, as high as there are; None if no such run is free."""
        first = self._free_map.rfind(_FREE * count)
        if first < 0:
            return None
        self._take(first, count)
        return (first, count)

    def free_runs_from_top(self) -> list[Run]:
        """Every maximal run of free pages, highest first. Nothing is taken."""
        runs: list[Run] = []
        end = len(self._free_map)
        while (last := self._free_map.rfind(_FREE, 0, end)) >= 0:
            first = self._free_map.rfind(0, 0, last) + 1
            runs.append((first, last - first + 1))
            end = first
        return runs

    def take_run(self, run: Run) -> None:
        """Take a run that `free_runs_from_top` gave, or a part of one."""
        first, count = run
        assert self._free_map[first : first + count] == _FREE * count, f"run {run} is not free"
        self._take(first, count)

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is free"
            self._refcounts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; at none it is free."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is free already"
            self._refcounts[page] -= 1
            if not self._refcounts[page]:
                self._free_map[page] = 1
                self._num_free += 1
                self._lowest_free = min(self._lowest_free, page)

    def check_integrity(self, references: Iterable[int]) -> None:
        """Compare the counts with every reference that owners hold (a page once a holder).

        Raises:
            AssertionError: a count differs, or the free pages do not add up.
        """
        held = [0] * self.num_pages
        for page in references:
            held[page] += 1
        wrong = [page for page, count in enumerate(self._refcounts) if count != held[page]]
        assert not wrong, f"pages with a wrong reference count: {wrong[:8]}"
        free = [page for page, count in enumerate(self._refcounts) if not count]
        assert len(free) == self._num_free == self._free_map.count(_FREE), "free pages do not add up"
        assert all(page >= self._lowest_free for page in free), "a free page lies below the search start"

    def _take(self, first: int, count: int) -> None:
        for page in range(first, first + count):
            self._refcounts[page] = 1
        self._free_map[first : first + count] = bytes(count)
        self._num_free -= count
