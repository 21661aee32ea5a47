"""Which adapters are resident in the pool, on which pages, and who needs them there. The one owner of residency.

A pinned adapter is never evicted; the others are a cache, least recently used first out. An evicted adapter comes back
from its host copy, or from the store.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.page_pool import PagePool
from sgmv_kernels.layout import AdapterLayout, PlacedAdapter


@dataclass(slots=True)
class _Resident:
    placed: PlacedAdapter
    pins: int = 0


class AdapterCache:
    """Adapters in the pool, in order of last use."""

    def __init__(self, pool: PagePool, page_bytes: int) -> None:
        self._pool = pool
        self._page_bytes = page_bytes
        self._residents: OrderedDict[AdapterKey, _Resident] = OrderedDict()
        self.num_evictions = 0

    def __contains__(self, key: AdapterKey) -> bool:
        return key in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def num_pages(self) -> int:
        """Pages of all resident adapters."""
        return sum(count for resident in self._residents.values() for _, count in resident.placed.runs)

    def placed(self, key: AdapterKey) -> PlacedAdapter:
        """Where a resident adapter lies now. Valid for this step only: ask again at the next."""
        return self._residents[key].placed

    def pin(self, key: AdapterKey) -> None:
        """One more running request needs this resident adapter; it becomes the most recently used."""
        self._residents[key].pins += 1
        self._residents.move_to_end(key)

    def unpin(self, key: AdapterKey) -> None:
        resident = self._residents[key]
        assert resident.pins > 0, f"adapter {key} is not pinned"
        resident.pins -= 1
        self._residents.move_to_end(key)

    def pages_for(self, layout: AdapterLayout) -> int:
        return layout.num_pages(self._page_bytes)

    def place(self, key: AdapterKey, layout: AdapterLayout, *, keep_free: int = 0) -> PlacedAdapter | None:
        """Find pages for an adapter, evicting idle ones; None if even then it does not fit beside `keep_free` pages.

        Nothing is evicted unless the idle pages are enough in number. The caller must fill the pages before a step
        reads them.
        """
        assert key not in self._residents, f"adapter {key} is resident already"
        needed = self.pages_for(layout) + keep_free
        if self._pool.num_free + self._num_idle_pages() < needed:
            return None
        while True:
            if self._pool.num_free >= needed and (placed := self._try_place(layout, keep_free)):
                self._residents[key] = _Resident(placed)
                return placed
            if not self.evict_idle():
                return None

    def evict_idle(self) -> bool:
        """Give back the pages of the least recently used adapter that nobody pins; False if there is none."""
        for key, resident in self._residents.items():
            if not resident.pins:
                self._pool.release(resident.placed.pages)
                del self._residents[key]
                self.num_evictions += 1
                return True
        return False

    def references(self) -> Iterator[int]:
        """Every page id that a resident adapter holds, for `PagePool.check_integrity`."""
        for resident in self._residents.values():
            yield from resident.placed.pages

    def pins(self) -> dict[AdapterKey, int]:
        """Adapters with at least one pin."""
        return {key: resident.pins for key, resident in self._residents.items() if resident.pins}

    def _num_idle_pages(self) -> int:
        return sum(count for r in self._residents.values() if not r.pins for _, count in r.placed.runs)

    def _try_place(self, layout: AdapterLayout, keep_free: int) -> PlacedAdapter | None:
        run = self._pool.allocate_run(self.pages_for(layout))
        if run is not None:
            placed = layout.place([run], self._page_bytes)
            assert placed is not None, "one run of the layout's own size always fits"
            return placed
        return self._place_in_pieces(layout, keep_free)

    def _place_in_pieces(self, layout: AdapterLayout, keep_free: int) -> PlacedAdapter | None:
        """Split at panel borders over the longest free runs. Ends of runs are lost, so it may take a few pages more.

        Runs come longest first, so a panel that does not fit the next one fits none: there is at most one a panel.
        """
        num_panels = max(len(sizes) for sizes in layout.panel_bytes)
        runs = sorted(self._pool.free_runs_from_top(), key=lambda run: -run[1])[:num_panels]
        placed = layout.place(runs, self._page_bytes)
        if placed is None:
            return None
        placed = placed.trimmed()
        if self._pool.num_free - len(placed.pages) < keep_free:
            return None
        for used in placed.runs:
            self._pool.take_run(used)
        return placed
