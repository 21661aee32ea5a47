"""Pages of adapters: where each lies in the pool, how many running requests use it, and what its eviction would cost.

`AdapterManager` decides when an adapter gets pages, when it may be read and when it leaves; only the pages, the pins of
running requests and the eviction scores are kept here. An adapter without pins that may be read is *evictable*. Its
score is GDSF's: uses x seconds to reload it / pages, on top of the clock (`GdsfClock`); prefix pages are scored in the
same unit. The lowest score is evicted first.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.memory.cost_model import GdsfClock
from lorasrv.memory.page_pool import PagePool
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, Run

MAX_COUNTED_USES = 64
ReloadSeconds = Callable[[AdapterKey, AdapterLayout], float]
"""Estimated seconds to load an adapter again after its eviction."""


@dataclass(slots=True)
class _CachedAdapter:
    placed: PlacedAdapter
    # Running requests that read it.
    pins: int = 0
    # Requests that have pinned it so far, at most `MAX_COUNTED_USES`.
    uses: int = 0
    # Valid while `is_evictable`.
    score: float = 0.0
    is_evictable: bool = False


class AdapterCache:
    """Own the pages of adapters. Mutated by the engine thread only.

    Args:
        pool: where the pages come from.
        page_bytes: bytes of one layer of a page.
        reload_s: cost of evicting an adapter.
        clock: shared with the prefix cache if both compete for the same pages.
    """

    def __init__(
        self,
        pool: PagePool,
        page_bytes: int,
        reload_s: ReloadSeconds = lambda _, layout: float(layout.nbytes),
        clock: GdsfClock | None = None,
    ) -> None:
        self.pool = pool
        self.clock = clock or GdsfClock()
        self._page_bytes = page_bytes
        self._reload_s = reload_s
        self._adapters: dict[AdapterKey, _CachedAdapter] = {}
        self._queue: list[tuple[float, AdapterKey]] = []
        self.num_pages = 0
        self.num_evictable_pages = 0

    def __contains__(self, key: AdapterKey) -> bool:
        """Return whether the adapter has pages, filled or not."""
        return key in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def pages_for(self, layout: AdapterLayout) -> int:
        """Return the number of pages that an adapter takes in one run."""
        return layout.num_pages(self._page_bytes)

    def placed(self, key: AdapterKey) -> PlacedAdapter:
        """Return where an adapter lies now. Valid for one step: compaction may move it before the next."""
        return self._adapters[key].placed

    def placements(self) -> Iterator[tuple[AdapterKey, PlacedAdapter, int]]:
        """Yield (key, place, pins) of every adapter with pages."""
        for key, adapter in self._adapters.items():
            yield key, adapter.placed, adapter.pins

    def pins(self) -> dict[AdapterKey, int]:
        """Return the number of pins of every adapter that has any."""
        return {key: adapter.pins for key, adapter in self._adapters.items() if adapter.pins}

    def place(self, key: AdapterKey, layout: AdapterLayout, *, keep_free: int = 0) -> PlacedAdapter | None:
        """Take pages for an adapter: one run, else pieces. It is neither evictable nor can it be pinned yet.

        Args:
            keep_free: pages that must be free afterwards.
        Returns:
            The place; None, and nothing taken, if the free pages do not suffice.
        """
        assert key not in self._adapters, f"adapter {key} has pages already"
        placed = self._place_in_one(layout, keep_free) or self._place_in_pieces(layout, keep_free)
        if placed is not None:
            self._adapters[key] = _CachedAdapter(placed)
            self.num_pages += placed.num_pages
        return placed

    def pin(self, key: AdapterKey) -> None:
        """Count one more running request that reads the adapter."""
        adapter = self._adapters[key]
        assert adapter.pins or adapter.is_evictable, f"adapter {key} is not resident"
        if adapter.is_evictable:
            adapter.is_evictable = False
            self.num_evictable_pages -= adapter.placed.num_pages
        adapter.pins += 1
        adapter.uses = min(adapter.uses + 1, MAX_COUNTED_USES)

    def unpin(self, key: AdapterKey) -> None:
        """Count one running request less; without any the adapter becomes evictable."""
        adapter = self._adapters[key]
        assert adapter.pins > 0, f"adapter {key} is not pinned"
        adapter.pins -= 1
        if not adapter.pins:
            self.make_evictable(key)

    def make_evictable(self, key: AdapterKey) -> None:
        """Score an adapter that may be read and has no pins, and queue it for eviction."""
        adapter = self._adapters[key]
        assert not adapter.pins, f"adapter {key} is pinned"
        assert not adapter.is_evictable, f"adapter {key} is evictable already"
        pages = adapter.placed.num_pages
        seconds = self._reload_s(key, adapter.placed.layout)
        adapter.score = self.clock.now + max(1, adapter.uses) * seconds / max(1, pages)
        adapter.is_evictable = True
        self.num_evictable_pages += pages
        heapq.heappush(self._queue, (adapter.score, key))
        if len(self._queue) > 4 * len(self._adapters) + 64:
            self._queue = [(a.score, k) for k, a in self._adapters.items() if a.is_evictable]
            heapq.heapify(self._queue)

    def is_evictable(self, key: AdapterKey) -> bool:
        """Return whether the adapter has filled pages and no pins."""
        adapter = self._adapters.get(key)
        return adapter is not None and adapter.is_evictable

    def lowest(self, is_spared: Callable[[AdapterKey], bool] = lambda _: False) -> tuple[float, AdapterKey] | None:
        """Return (score, key) of the evictable adapter with the lowest score; None if every one is spared."""
        passed_over = []
        found = None
        while self._queue and found is None:
            score, key = heapq.heappop(self._queue)
            adapter = self._adapters.get(key)
            if adapter is None or not adapter.is_evictable or adapter.score != score:
                continue  # outdated
            passed_over.append((score, key))
            if not is_spared(key):
                found = (score, key)
        for entry in passed_over:
            heapq.heappush(self._queue, entry)
        return found

    def num_evictable_pages_of(self, is_meant: Callable[[AdapterKey], bool]) -> int:
        """Return the number of pages of the evictable adapters that `is_meant` selects."""
        return sum(a.placed.num_pages for key, a in self._adapters.items() if a.is_evictable and is_meant(key))

    def remove(self, key: AdapterKey) -> None:
        """Free the pages of an adapter without pins."""
        adapter = self._adapters[key]
        assert not adapter.pins, f"adapter {key} is in use"
        if adapter.is_evictable:
            self.num_evictable_pages -= adapter.placed.num_pages
        del self._adapters[key]
        self.num_pages -= adapter.placed.num_pages
        self.pool.release(adapter.placed.pages)

    def move(self, moved_runs: Mapping[Run, Run]) -> None:
        """Follow pages that were moved: old run -> new run of the same length."""
        for adapter in self._adapters.values():
            own = {run: moved_runs[run] for run in adapter.placed.runs if run in moved_runs}
            if own:
                adapter.placed = adapter.placed.moved(own)

    def references(self) -> Iterator[int]:
        """Yield every page id that an adapter holds, for `PagePool.check_integrity`."""
        for adapter in self._adapters.values():
            yield from adapter.placed.pages

    def check_integrity(self) -> None:
        """Compare the totals with the adapters, and the eviction queue with what is evictable.

        Raises:
            AssertionError: pages do not add up, or an evictable adapter could never be evicted.
        """
        evictable = {key: a for key, a in self._adapters.items() if a.is_evictable}
        pages = sum(a.placed.num_pages for a in self._adapters.values())
        assert self.num_pages == pages, "adapter pages do not add up"
        pages = sum(a.placed.num_pages for a in evictable.values())
        assert self.num_evictable_pages == pages, "evictable pages do not add up"
        assert not any(a.pins for a in evictable.values()), "a pinned adapter is evictable"
        queued = set(self._queue)
        assert all((a.score, key) in queued for key, a in evictable.items()), "an evictable adapter is not queued"

    def _place_in_one(self, layout: AdapterLayout, keep_free: int) -> PlacedAdapter | None:
        pages = self.pages_for(layout)
        if self.pool.num_free < pages + keep_free:
            return None
        run = self.pool.allocate_run(pages)
        if run is None:
            return None
        placed = layout.place([run], self._page_bytes)
        assert placed is not None, "one run of the layout's own size always fits"
        return placed

    def _place_in_pieces(self, layout: AdapterLayout, keep_free: int) -> PlacedAdapter | None:
        """Split at panel borders over the longest free runs. The ends of runs are lost, so it may take more pages.

        Runs come longest first, so a panel that does not fit the next one fits none: at most one run per panel is used.
        """
        num_panels = max(len(sizes) for sizes in layout.panel_bytes)
        runs = heapq.nlargest(num_panels, self.pool.free_runs(), key=lambda run: (run[1], run[0]))
        placed = layout.place(runs, self._page_bytes)
        if placed is None:
            return None
        placed = placed.trimmed()
        if self.pool.num_free - placed.num_pages < keep_free:
            return None
        for used in placed.runs:
            self.pool.take_run(used)
        return placed
