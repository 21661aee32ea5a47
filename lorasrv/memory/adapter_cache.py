"""Which adapters are resident in the pool, on which pages, and who needs them there. The one owner of residency.

An adapter that is being copied in, or that a running request pins, stays. The others are a cache: the one whose return
would cost least for the pages it holds goes first. Its worth is uses x seconds to bring it back / pages, on top of the
clock (`GdsfClock`); prefix pages have theirs in the same currency.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.memory.cost_model import GdsfClock
from lorasrv.memory.page_pool import PagePool
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, Run

MAX_COUNTED_USES = 64
SecondsToReturn = Callable[[AdapterKey, AdapterLayout], float]
"""What it would cost to have an adapter back in the pool once it has left."""


@dataclass(slots=True)
class _Resident:
    placed: PlacedAdapter
    is_ready: bool = False
    pins: int = 0
    uses: int = 0
    worth: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it could be evicted."""
        return self.is_ready and not self.pins


class AdapterCache:
    """Adapters in the pool. Mutated by the engine thread only.

    Args:
        pool: where their pages come from.
        page_bytes: of one layer of a page.
        reload_s: the cost of evicting one.
        on_arrival, on_departure: told when an adapter becomes ready, and when it leaves.
    """

    def __init__(
        self,
        pool: PagePool,
        page_bytes: int,
        reload_s: SecondsToReturn = lambda _, layout: float(layout.nbytes),
        on_arrival: Callable[[AdapterKey], None] = lambda _: None,
        on_departure: Callable[[AdapterKey], None] = lambda _: None,
        clock: GdsfClock | None = None,
    ) -> None:
        self.pool = pool
        self._page_bytes = page_bytes
        self._seconds_to_return = reload_s
        self._on_arrival, self._on_departure = on_arrival, on_departure
        self._residents: dict[AdapterKey, _Resident] = {}
        self._queue: list[tuple[float, AdapterKey]] = []
        self._clock = clock or GdsfClock()
        self.num_pages = 0
        self.num_evictable_pages = 0
        self.num_evictions = 0

    def __contains__(self, key: AdapterKey) -> bool:
        """Whether it has pages, be they filled or not."""
        return key in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def num_filling(self) -> int:
        """Adapters whose pages are being filled."""
        return sum(not resident.is_ready for resident in self._residents.values())

    @property
    def num_ready(self) -> int:
        """Adapters that a step may read."""
        return len(self._residents) - self.num_filling

    def is_ready(self, key: AdapterKey) -> bool:
        """Whether a step may read it."""
        resident = self._residents.get(key)
        return resident is not None and resident.is_ready

    def placed(self, key: AdapterKey) -> PlacedAdapter:
        """Where a resident adapter lies now. Valid for this step only: ask again at the next."""
        return self._residents[key].placed

    def pin(self, key: AdapterKey) -> None:
        """One more running request needs this adapter, which is ready."""
        resident = self._residents[key]
        assert resident.is_ready, f"adapter {key} is not there yet"
        if not resident.pins:
            self.num_evictable_pages -= resident.placed.num_pages
        resident.pins += 1
        resident.uses = min(resident.uses + 1, MAX_COUNTED_USES)

    def unpin(self, key: AdapterKey) -> None:
        resident = self._residents[key]
        assert resident.pins > 0, f"adapter {key} is not pinned"
        resident.pins -= 1
        if not resident.pins:
            self._idle_again(key, resident)

    def pages_for(self, layout: AdapterLayout) -> int:
        return layout.num_pages(self._page_bytes)

    def place(self, key: AdapterKey, layout: AdapterLayout, *, keep_free: int = 0) -> PlacedAdapter | None:
        """Find pages for an adapter: one run, else pieces; None if neither is free beside `keep_free` pages.

        Nothing may read the pages before they are filled and `filled` was called.
        """
        assert key not in self._residents, f"adapter {key} is resident already"
        placed = self._place_in_one(layout, keep_free) or self._place_in_pieces(layout, keep_free)
        if placed is not None:
            self._residents[key] = _Resident(placed)
            self.num_pages += placed.num_pages
        return placed

    def filled(self, key: AdapterKey) -> None:
        """The adapter's pages hold its weights now."""
        resident = self._residents[key]
        assert not resident.is_ready, f"adapter {key} was there already"
        resident.is_ready = True
        self._idle_again(key, resident)
        self._on_arrival(key)

    def abandon(self, key: AdapterKey) -> None:
        """The copy has failed; the pages are free again."""
        resident = self._residents[key]
        assert not resident.is_ready, f"adapter {key} is in use"
        self._remove(key, resident)

    def evict_idle(self, is_spared: Callable[[AdapterKey], bool] = lambda _: False) -> bool:
        """Give back the pages of the adapter that is worth least, of those that nobody pins; False if there is none."""
        victim = self._least(is_spared)
        if victim is None:
            return False
        self._clock.passes(victim[0])
        self.evict(victim[1])
        return True

    def least_worth(self, is_spared: Callable[[AdapterKey], bool]) -> float:
        """What `evict_idle` would give up, a page; infinite if there is none."""
        victim = self._least(is_spared)
        return math.inf if victim is None else victim[0]

    def _least(self, is_spared: Callable[[AdapterKey], bool]) -> tuple[float, AdapterKey] | None:
        passed_over = []
        found = None
        while self._queue and found is None:
            worth, key = heapq.heappop(self._queue)
            resident = self._residents.get(key)
            if resident is None or not resident.is_idle or resident.worth != worth:
                continue  # an entry of the past
            passed_over.append((worth, key))
            if not is_spared(key):
                found = (worth, key)
        for entry in passed_over:
            heapq.heappush(self._queue, entry)
        return found

    def evict(self, key: AdapterKey) -> None:
        """Give back the pages of an adapter that nobody pins."""
        resident = self._residents[key]
        assert resident.is_idle, f"adapter {key} is in use"
        self.num_evictable_pages -= resident.placed.num_pages
        self._remove(key, resident)
        self.num_evictions += 1
        self._on_departure(key)

    def num_idle_pages_of(self, are_meant: Callable[[AdapterKey], bool]) -> int:
        """Pages of those idle adapters."""
        return sum(r.placed.num_pages for key, r in self._residents.items() if r.is_idle and are_meant(key))

    def residents(self) -> Iterator[tuple[AdapterKey, PlacedAdapter, bool, int]]:
        """(key, place, ready, pins) of each."""
        for key, resident in self._residents.items():
            yield key, resident.placed, resident.is_ready, resident.pins

    def movable_runs(self) -> dict[Run, AdapterKey]:
        """Runs of pages that may be moved between steps."""
        return {run: key for key, r in self._residents.items() if r.is_ready for run in r.placed.runs}

    def fixed_runs(self) -> dict[Run, AdapterKey]:
        """Runs of pages that are being filled."""
        return {run: key for key, r in self._residents.items() if not r.is_ready for run in r.placed.runs}

    def move(self, moved_runs: Mapping[Run, Run]) -> None:
        """Runs lie elsewhere now: old -> new, of equal length."""
        for resident in self._residents.values():
            own = {run: moved_runs[run] for run in resident.placed.runs if run in moved_runs}
            if own:
                resident.placed = resident.placed.moved(own)

    def references(self) -> Iterator[int]:
        """Every page id that a resident adapter holds, for `PagePool.check_integrity`."""
        for resident in self._residents.values():
            yield from resident.placed.pages

    def pins(self) -> dict[AdapterKey, int]:
        """Adapters with at least one pin."""
        return {key: resident.pins for key, resident in self._residents.items() if resident.pins}

    def check_integrity(self) -> None:
        """Raises: AssertionError: pages do not add up, or an idle adapter could never be evicted."""
        residents = self._residents.items()
        idle = {key: r for key, r in residents if r.is_idle}
        assert self.num_pages == sum(r.placed.num_pages for _, r in residents), "adapter pages do not add up"
        assert self.num_evictable_pages == sum(r.placed.num_pages for r in idle.values()), "idle pages do not add up"
        assert all(r.is_ready for _, r in residents if r.pins), "an adapter is in use before it is there"
        queued = set(self._queue)
        assert all((r.worth, key) in queued for key, r in idle.items()), "an idle adapter is not in the queue"

    def _idle_again(self, key: AdapterKey, resident: _Resident) -> None:
        pages = resident.placed.num_pages
        seconds = self._seconds_to_return(key, resident.placed.layout)
        resident.worth = self._clock.now + max(1, resident.uses) * seconds / max(1, pages)
        self.num_evictable_pages += pages
        heapq.heappush(self._queue, (resident.worth, key))
        if len(self._queue) > 4 * len(self._residents) + 64:
            self._queue = [(r.worth, k) for k, r in self._residents.items() if r.is_idle]
            heapq.heapify(self._queue)

    def _remove(self, key: AdapterKey, resident: _Resident) -> None:
        del self._residents[key]
        self.num_pages -= resident.placed.num_pages
        self.pool.release(resident.placed.pages)

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
        """Split at panel borders over the longest free runs. Ends of runs are lost, so it may take a few pages more.

        Runs come longest first, so a panel that does not fit the next one fits none: there is at most one a panel.
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
