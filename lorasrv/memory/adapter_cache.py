"""Pages of adapters: where each lies in the pool, how many running requests use it, and what its eviction would cost.

`AdapterManager` decides when an adapter gets pages, when it may be read and when it leaves. This module keeps only the
pages, the pins of running requests and the eviction scores. An adapter that may be read and has no pins is *evictable*.
Its score is that of GDSF: uses x seconds to reload it / pages, plus the clock (`GdsfClock`); prefix pages are scored in
the same unit. The lowest score is evicted first.

The eviction order is maintained rather than computed, one order for each `Need`, so that a search never visits adapters
that must stay because something needs them.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import IntEnum

from adapter_store.spec import AdapterKey
from lorasrv.memory.cost_model import GdsfClock
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.sorted_items import SortedItems
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, Run

MAX_COUNTED_USES = 64
ReloadSeconds = Callable[[AdapterKey, AdapterLayout], float]
"""Estimated seconds to load an adapter again after its eviction."""


class Need(IntEnum):
    """Rank what needs an adapter in the pool, other than running requests."""

    NOTHING = 0
    # A waiting request or a reservation.
    WANTED = 1
    # An operator.
    PINNED = 2


@dataclass(slots=True)
class _CachedAdapter:
    placed: PlacedAdapter
    need: Need
    # Number of running requests that read it.
    pins: int = 0
    # Number of requests admitted with it so far, at most `MAX_COUNTED_USES`.
    uses: int = 0
    # Valid while `is_evictable`.
    score: float = 0.0
    is_evictable: bool = False


class AdapterCache:
    """Own the pages of adapters. Mutated by the engine thread only.

    Args:
        pool: where the pages come from.
        page_bytes: bytes of one layer of a page.
        reload_s: estimates the cost of evicting an adapter.
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
        self._evictable: dict[Need, SortedItems[AdapterKey]] = {need: SortedItems() for need in Need}
        self._evictable_pages = dict.fromkeys(Need, 0)
        self.num_pages = 0

    def __contains__(self, key: AdapterKey) -> bool:
        """Return whether the adapter has pages, filled or not."""
        return key in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def num_evictable_pages(self) -> int:
        """Return the number of pages of all evictable adapters."""
        return sum(self._evictable_pages.values())

    def pages_for(self, layout: AdapterLayout) -> int:
        """Return the number of pages that an adapter takes in one run."""
        return layout.num_pages(self._page_bytes)

    def placed(self, key: AdapterKey) -> PlacedAdapter:
        """Return where an adapter lies now. Valid for one step: compaction may move it before the next step."""
        return self._adapters[key].placed

    def placements(self) -> Iterator[tuple[AdapterKey, PlacedAdapter, int]]:
        """Yield (key, place, pins) of every adapter with pages."""
        for key, adapter in self._adapters.items():
            yield key, adapter.placed, adapter.pins

    def pins(self) -> dict[AdapterKey, int]:
        """Return the number of pins of every adapter that has any."""
        return {key: adapter.pins for key, adapter in self._adapters.items() if adapter.pins}

    def place(
        self, key: AdapterKey, layout: AdapterLayout, need: Need = Need.NOTHING, *, keep_free: int = 0
    ) -> PlacedAdapter | None:
        """Take pages for an adapter, in one run or else in pieces. It can be neither evicted nor pinned yet.

        Args:
            need: what needs it now; `set_need` changes that.
            keep_free: pages that must be free afterwards.
        Returns:
            The place; None, and nothing taken, if the free pages do not suffice.
        """
        assert key not in self._adapters, f"adapter {key} has pages already"
        placed = self._place_in_one(layout, keep_free) or self._place_in_pieces(layout, keep_free)
        if placed is not None:
            self._adapters[key] = _CachedAdapter(placed, need)
            self.num_pages += placed.num_pages
        return placed

    def set_need(self, key: AdapterKey, need: Need) -> None:
        """Note what needs an adapter now; do nothing if it has no pages."""
        adapter = self._adapters.get(key)
        if adapter is None or adapter.need is need:
            return
        is_evictable = adapter.is_evictable
        if is_evictable:
            self._protect(key, adapter)
        adapter.need = need
        if is_evictable:
            self._offer(key, adapter)

    def pin(self, key: AdapterKey) -> None:
        """Count one more running request that reads the adapter."""
        adapter = self._adapters[key]
        assert adapter.pins or adapter.is_evictable, f"adapter {key} is not resident"
        if adapter.is_evictable:
            self._protect(key, adapter)
        adapter.pins += 1

    def count_use(self, key: AdapterKey) -> None:
        """Count one more request that was admitted with a pinned adapter; the score depends on this count."""
        adapter = self._adapters[key]
        assert adapter.pins, f"adapter {key} is not pinned"
        adapter.uses = min(adapter.uses + 1, MAX_COUNTED_USES)

    def unpin(self, key: AdapterKey) -> None:
        """Count one running request less; after the last one the adapter becomes evictable."""
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
        self._offer(key, adapter)

    def is_evictable(self, key: AdapterKey) -> bool:
        """Return whether the adapter has filled pages and no pins."""
        adapter = self._adapters.get(key)
        return adapter is not None and adapter.is_evictable

    def lowest(
        self, most: Need = Need.PINNED, spared: Set[AdapterKey] = frozenset()
    ) -> tuple[float, AdapterKey] | None:
        """Return (score, key) of the evictable adapter with the lowest score; None if there is none.

        Args:
            most: highest need of the adapters to choose from.
            spared: adapters not to choose.
        """
        found = (self._lowest_of(need, spared) for need in Need if need <= most)
        return min((entry for entry in found if entry is not None), default=None)

    def num_evictable_pages_of(self, most: Need, spared: Set[AdapterKey]) -> int:
        """Return the number of pages of the evictable adapters that `lowest` chooses from."""
        pages = sum(self._evictable_pages[need] for need in Need if need <= most)
        adapters = (a for key in spared if (a := self._adapters.get(key)) is not None)
        return pages - sum(a.placed.num_pages for a in adapters if a.is_evictable and a.need <= most)

    def remove(self, key: AdapterKey) -> None:
        """Free the pages of an adapter without pins."""
        adapter = self._adapters[key]
        assert not adapter.pins, f"adapter {key} is in use"
        if adapter.is_evictable:
            self._protect(key, adapter)
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
        for need, queue in self._evictable.items():
            own = {key: a for key, a in evictable.items() if a.need is need}
            pages = sum(a.placed.num_pages for a in own.values())
            assert self._evictable_pages[need] == pages, "evictable pages do not add up"
            assert {queue.rank(key) for key in queue} == {(a.score, key) for key, a in own.items()}, "misfiled"
        assert not any(a.pins for a in evictable.values()), "a pinned adapter is evictable"

    def need(self, key: AdapterKey) -> Need:
        """Return the strongest need for an adapter that has pages."""
        return self._adapters[key].need

    def _offer(self, key: AdapterKey, adapter: _CachedAdapter) -> None:
        """Add an adapter to the eviction order of its need."""
        adapter.is_evictable = True
        self._evictable_pages[adapter.need] += adapter.placed.num_pages
        self._evictable[adapter.need].add(key, (adapter.score, key))

    def _protect(self, key: AdapterKey, adapter: _CachedAdapter) -> None:
        """Remove an adapter from the eviction order."""
        adapter.is_evictable = False
        self._evictable_pages[adapter.need] -= adapter.placed.num_pages
        self._evictable[adapter.need].remove(key)

    def _lowest_of(self, need: Need, spared: Set[AdapterKey]) -> tuple[float, AdapterKey] | None:
        key = next((key for key in self._evictable[need] if key not in spared), None)
        return None if key is None else (self._adapters[key].score, key)

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
        """Split an adapter at panel borders over the longest free runs. The ends of runs are unused, so it may take
        more pages.

        Runs come longest first, so a panel that does not fit the next run fits none: at most one run per panel is used.
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
