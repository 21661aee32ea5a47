"""How an adapter comes nearer: disk -> host memory -> pool, one tier at a time, while everybody else goes on.

Plain data; the work is the loader's (`adapter_loader`), which gets its orders once a step and reports what is done.
Whoever needs an adapter asks for it again and again; the first asking begins the load, the others find it under way.
Host copies on their way in are bounded by the host cache's bytes: a load that would not fit waits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from adapter_store.spec import AdapterKey
from lorasrv.adapter_cache import AdapterCache
from lorasrv.costs import CostModel
from lorasrv.reclaim import Need, Predicate, Reclaimer
from lorasrv.step import AdapterOrders
from sgmv_kernels.layout import AdapterLayout, PlacedAdapter


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
    """To have an adapter in the pool until a time; `until_s` None holds it there until it is taken back."""

    layout: AdapterLayout
    until_s: float | None


@dataclass(slots=True)
class _Orders:
    loads: list[AdapterKey] = field(default_factory=list)
    copies: list[tuple[AdapterKey, PlacedAdapter]] = field(default_factory=list)
    cancels: list[AdapterKey] = field(default_factory=list)


class AdapterTiers:
    """Adapters that are not in the pool yet and somebody wants there. Mutated by the engine thread only.

    Args:
        max_host_bytes: most bytes of host copies on their way at a time.
    """

    def __init__(
        self,
        adapters: AdapterCache,
        reclaimer: Reclaimer,
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
        return promise is not None and promise.until_s is None

    def held_pages(self) -> int:
        """Pages of all adapters that the operator has pinned."""
        return sum(self._adapters.pages_for(p.layout) for p in self._promises.values() if p.until_s is None)

    def promise(self, key: AdapterKey, layout: AdapterLayout, until_s: float | None) -> None:
        """Bring an adapter to the pool ahead of its requests, and spare it until then; None: for good."""
        held = self.is_held(key)
        self._promises[key] = _Promise(layout, None if held else until_s)

    def let_go(self, key: AdapterKey) -> None:
        """Take a promise back."""
        self._promises.pop(key, None)

    def bring(
        self, key: AdapterKey, layout: AdapterLayout, keep_free: int, need: Need, is_ahead: Predicate = lambda _: False
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

    def keep_promises(self, keep_free: int) -> None:
        """Bring promised adapters nearer, as far as nobody needs the pages."""
        for key, promise in list(self._promises.items()):
            if promise.until_s is not None and promise.until_s < self._clock():
                del self._promises[key]
            elif key not in self._adapters:
                self.bring(key, promise.layout, keep_free, Need.AHEAD)

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
        """A load or a copy has failed. What was promised is not tried again and again: whoever pinned it is told."""
        arrival = self._arrivals.get(key)
        if arrival is not None:
            if arrival.state is Arriving.COPYING:
                self._adapters.abandon(key)
            self._end(key)
        self.let_go(key)

    def expected_s(self, layout: AdapterLayout, *, on_host: bool) -> float:
        """In about this time an adapter that nobody has asked for yet would be here: what is on its way comes first."""
        before = sum(self._costs.seconds_to_return(a.layout.nbytes, on_host=False) for a in self._arrivals.values())
        return before + self._costs.seconds_to_return(layout.nbytes, on_host=on_host)

    def take_orders(self) -> AdapterOrders:
        """What the loader is to do, since the last call."""
        orders, self._orders = self._orders, _Orders()
        return AdapterOrders(tuple(orders.loads), tuple(orders.copies), tuple(orders.cancels))

    def check_integrity(self) -> None:
        """Raises: AssertionError: an adapter without pages is being copied, or host bytes do not add up."""
        for key, arrival in self._arrivals.items():
            copying = arrival.state is Arriving.COPYING
            assert (key in self._adapters) == copying, f"adapter {key} is {arrival.state} but has pages or none"
            assert not self._adapters.is_ready(key), f"adapter {key} is there and on its way"
        assert self._host_bytes == sum(a.layout.nbytes for a in self._arrivals.values()), "host bytes do not add up"
        unfilled = {key for key, _, ready, _ in self._adapters.residents() if not ready}
        assert unfilled <= self._arrivals.keys(), "an adapter has pages that nobody fills"

    def _begin_load(self, key: AdapterKey, layout: AdapterLayout) -> None:
        if self._arrivals and self._host_bytes + layout.nbytes > self._max_host_bytes:
            return
        self._arrivals[key] = _Arrival(layout)
        self._host_bytes += layout.nbytes
        self._orders.loads.append(key)

    def _end(self, key: AdapterKey) -> None:
        self._host_bytes -= self._arrivals.pop(key).layout.nbytes
