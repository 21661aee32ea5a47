"""How an adapter comes nearer: disk -> host memory -> pool, one tier at a time, while everybody else goes on.

Plain data; the work is the loader's (`adapter_loader`), which gets its orders once a step and reports what is done.
Whoever needs an adapter asks for it again and again; the first asking begins the load, the others find it under way.
Host copies on their way in are bounded by the host cache's bytes: a load that would not fit waits, and so do all that
ask later. What is only promised is loaded when the pool has room for it, and holds no host memory while it has none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from adapter_store.spec import AdapterKey
from lorasrv.config import PARALLEL_LOADS
from lorasrv.memory.adapter_cache import AdapterCache
from lorasrv.memory.cost_model import CostModel
from lorasrv.memory.eviction import EvictionLevel, Evictor, Predicate
from lorasrv.scheduler_output import AdapterOrders
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter

NO_ROOM_RETRY_S = 5.0
MAX_WARMED = 256
"""Promises beside the pinned ones; any client can cause one."""


class Arriving(Enum):
    """Where an adapter is that is on its way."""

    LOADING = "loading"
    ON_HOST = "on host"
    COPYING = "copying"


@dataclass(slots=True)
class _Arrival:
    layout: AdapterLayout
    state: Arriving = Arriving.LOADING


@dataclass(slots=True)
class _Promise:
    """To have an adapter in the pool until a time, or, pinned, until it is taken back."""

    layout: AdapterLayout
    until_s: float = 0.0
    is_pinned: bool = False


@dataclass(slots=True)
class _Orders:
    loads: list[AdapterKey] = field(default_factory=list)
    copies: list[tuple[AdapterKey, PlacedAdapter]] = field(default_factory=list)
    cancels: list[AdapterKey] = field(default_factory=list)


class AdapterManager:
    """Adapters that are not in the pool yet and somebody wants there. Mutated by the engine thread only.

    Args:
        max_host_bytes: most bytes of host copies on their way at a time.
    """

    def __init__(
        self,
        adapters: AdapterCache,
        reclaimer: Evictor,
        max_host_bytes: int,
        costs: CostModel,
        clock: Callable[[], float],
    ) -> None:
        self._adapters = adapters
        self._reclaimer = reclaimer
        self._max_host_bytes = max_host_bytes
        self._costs = costs
        self._clock = clock
        self._arrivals: dict[AdapterKey, _Arrival] = {}
        self._host_bytes = 0
        self._promises: dict[AdapterKey, _Promise] = {}
        self._orders = _Orders()
        self._is_deferring = False
        reclaimer.is_held = self.is_held

    @property
    def num_arriving(self) -> int:
        return len(self._arrivals)

    def state(self, key: AdapterKey) -> Arriving | None:
        """Where an adapter is that is on its way; None if it is not."""
        arrival = self._arrivals.get(key)
        return None if arrival is None else arrival.state

    def is_promised(self, key: AdapterKey) -> bool:
        """Whether it is to be in the pool without a request that wants it."""
        return key in self._promises

    def is_held(self, key: AdapterKey) -> bool:
        """Whether the operator has pinned it."""
        promise = self._promises.get(key)
        return promise is not None and promise.is_pinned

    def held_pages(self) -> int:
        """Pages of all adapters that the operator has pinned."""
        return sum(self._adapters.pages_for(p.layout) for p in self._promises.values() if p.is_pinned)

    def promises(self) -> Iterator[tuple[AdapterKey, bool]]:
        """(key, pinned) of every adapter that is to be in the pool."""
        for key, promise in self._promises.items():
            yield key, promise.is_pinned

    def warm(self, key: AdapterKey, layout: AdapterLayout, until_s: float) -> None:
        """Bring an adapter to the pool ahead of its requests, and spare it until then. Of too many, the first go."""
        promise = self._promises.setdefault(key, _Promise(layout))
        promise.until_s = max(promise.until_s, until_s)
        warmed = [key for key, promise in self._promises.items() if not promise.is_pinned]
        for first in warmed[: max(0, len(warmed) - MAX_WARMED)]:
            del self._promises[first]

    def pin(self, key: AdapterKey, layout: AdapterLayout) -> None:
        """Bring an adapter to the pool, and keep it there."""
        self._promises.setdefault(key, _Promise(layout)).is_pinned = True

    def unpin(self, key: AdapterKey) -> None:
        """Keep it there no longer than it was to be warm; nothing happens if it was not pinned."""
        if key in self._promises:
            self._promises[key].is_pinned = False

    def begin_step(self) -> None:
        """Promises whose time is over are forgotten."""
        self._is_deferring = False
        if self._promises:
            now = self._clock()
            self._promises = {k: p for k, p in self._promises.items() if p.is_pinned or p.until_s >= now}

    def bring(
        self,
        key: AdapterKey,
        layout: AdapterLayout,
        keep_free: int,
        need: EvictionLevel,
        is_ahead: Predicate = lambda _: False,
    ) -> bool:
        """Have a missing adapter come one tier nearer, unless it is on its way; False if the pool has no room for it.

        `keep_free` pages are left for keys and values.
        """
        arrival = self._arrivals.get(key)
        if arrival is None:
            self._begin_load(key, layout)
        elif arrival.state is Arriving.ON_HOST:
            placed = self._reclaimer.place_adapter(key, layout, keep_free, need, is_ahead)
            if placed is None:
                return False
            arrival.state = Arriving.COPYING
            self._orders.copies.append((key, placed))
        return True

    def keep_promises(self, keep_free: int, is_asked_for: Predicate = lambda _: False) -> None:
        """Bring promised adapters nearer, as far as nobody needs the pages; pinned ones first. Those that requests ask
        for come by their asking.
        """
        missing = [key for key in self._promises if key not in self._adapters and not is_asked_for(key)]
        for key in sorted(missing, key=lambda key: not self._promises[key].is_pinned):
            if not self._keep_promise(key, self._promises[key].layout, keep_free):
                return

    def _keep_promise(self, key: AdapterKey, layout: AdapterLayout, keep_free: int) -> bool:
        arrival = self._arrivals.get(key)
        if arrival is None and not self._reclaimer.can_place(layout, keep_free, EvictionLevel.PREFETCH):
            return False
        if self.bring(key, layout, keep_free, EvictionLevel.PREFETCH):
            return True
        self._end(key)
        self._orders.cancels.append(key)
        return False

    def forget_unwanted(self, is_wanted: Predicate) -> None:
        """Stop loads that nobody waits for any more. A copy under way is let to end: its pages are being written."""
        for key, arrival in list(self._arrivals.items()):
            if arrival.state is not Arriving.COPYING and not is_wanted(key):
                self._end(key)
                self._orders.cancels.append(key)

    def loaded(self, key: AdapterKey) -> None:
        """A load has reached host memory, where the loader keeps it until the copy is done or cancelled."""
        if key in self._arrivals:
            self._arrivals[key].state = Arriving.ON_HOST

    def copied(self, key: AdapterKey) -> None:
        """An adapter is in the pool."""
        self._adapters.filled(key)
        self._end(key)

    def failed(self, key: AdapterKey) -> None:
        """A load or a copy has failed. What was promised is not tried again and again: whoever asked for it is told."""
        arrival = self._arrivals.get(key)
        if arrival is not None:
            if arrival.state is Arriving.COPYING:
                self._adapters.abandon(key)
            self._end(key)
        self._promises.pop(key, None)

    def outlook(self, key: AdapterKey, layout: AdapterLayout, *, on_host: bool, keep_free: int) -> tuple[float, str]:
        """In about how many seconds an adapter would be here, and what keeps it from being here: for whoever does not
        wait. Loads run side by side, copies one after another.
        """
        others = [arrival for other, arrival in self._arrivals.items() if other != key]
        loading = sum(a.layout.nbytes for a in others if a.state is Arriving.LOADING)
        copying = sum(a.layout.nbytes for a in others)
        seconds = loading * self._costs.load.seconds / PARALLEL_LOADS + copying * self._costs.copy.seconds
        seconds += self._costs.reload_s(layout.nbytes, on_host=on_host)
        if self._reclaimer.can_place(layout, keep_free, EvictionLevel.PREFETCH):
            return seconds, "it is being brought in"
        return max(seconds, NO_ROOM_RETRY_S), "running requests leave no room for it now"

    def take_orders(self) -> AdapterOrders:
        """What the loader is to do, since the last call."""
        orders, self._orders = self._orders, _Orders()
        return AdapterOrders(tuple(orders.loads), tuple(orders.copies), tuple(orders.cancels))

    def check_integrity(self) -> None:
        """Raises: AssertionError: an adapter without pages is being copied, or host bytes do not add up."""
        for key, arrival in self._arrivals.items():
            copying = arrival.state is Arriving.COPYING
            assert (key in self._adapters) == copying, f"adapter {key} is {arrival.state} but has pages or none"
            assert not self._adapter_manager.is_resident(key), f"adapter {key} is there and on its way"
        assert self._host_bytes == sum(a.layout.nbytes for a in self._arrivals.values()), "host bytes do not add up"
        unfilled = {key for key, _, ready, _ in self._adapters.residents() if not ready}
        assert unfilled <= self._arrivals.keys(), "an adapter has pages that nobody fills"

    def _begin_load(self, key: AdapterKey, layout: AdapterLayout) -> None:
        """First come, first served: else small ones would pass a large one for ever."""
        no_room = bool(self._arrivals) and self._host_bytes + layout.nbytes > self._max_host_bytes
        self._is_deferring = self._is_deferring or no_room
        if self._is_deferring:
            return
        self._arrivals[key] = _Arrival(layout)
        self._host_bytes += layout.nbytes
        self._orders.loads.append(key)

    def _end(self, key: AdapterKey) -> None:
        self._host_bytes -= self._arrivals.pop(key).layout.nbytes
