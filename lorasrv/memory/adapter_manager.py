"""The life of an adapter: disk, host memory, pool. `AdapterManager` is the only owner of an adapter's state.

State       Host bytes  Host pin  Pages  Request pins
----------  ----------  --------  -----  ------------
ON_DISK     no          no        no     no
LOADING     yes         no        no     no
ON_HOST     yes         yes       no     no
COPYING     yes         yes       yes    no
RESIDENT    no          no        yes    yes

Host bytes count towards `max_host_bytes`. The loader owns the host pin, on the host copy in `HostCache`; `AdapterCache`
owns the pages and the pins of running requests. After the copy, or after a cancelled load, the host copy stays in
`HostCache` without a pin until other adapters need its bytes: loading it again in the meantime does not read the disk.

From        Method        To          Trigger
----------  ------------  ----------  -------
ON_DISK     request_load  LOADING     a request or a reservation needs it, and its host bytes fit
LOADING     on_loaded     ON_HOST     the loader has read it
LOADING     on_failed     ON_DISK     the loader could not read it
LOADING     cancel        ON_DISK     no request and no reservation needs it any more
ON_HOST     cancel        ON_DISK     the same; or the pool has no room for a reservation, or for what limits hold back
ON_HOST     place         COPYING     pages were found for it
COPYING     on_copied     RESIDENT    the loader has filled its pages
COPYING     on_failed     ON_DISK     the copy failed
RESIDENT    evict         ON_DISK     its pages are needed for something else

Every other call is an error. A copy under way is never cancelled: its pages are being written. The loader receives its
orders once per step and reports what has finished; a report that arrives after a cancel is ignored.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from adapter_store.spec import AdapterKey
from lorasrv.config import PARALLEL_LOADS
from lorasrv.memory.adapter_cache import AdapterCache, Need
from lorasrv.memory.cost_model import CostModel
from lorasrv.memory.prefix_cache import PrefixCache
from lorasrv.outputs import AdapterTier
from lorasrv.scheduler_output import AdapterOrders
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, Run

MAX_RESERVED = 256
"""Most reservations besides the pinned ones; any client can cause one."""


class AdapterState(StrEnum):
    """Name where an adapter is."""

    ON_DISK = "on disk"
    LOADING = "loading"
    ON_HOST = "on host"
    COPYING = "copying"
    RESIDENT = "resident"


class Owned(NamedTuple):
    """List what an adapter owns in a state. Request pins are optional, everything else is required."""

    host_bytes: bool
    host_pin: bool
    pages: bool
    request_pins: bool


OWNED = MappingProxyType(
    {
        AdapterState.ON_DISK: Owned(host_bytes=False, host_pin=False, pages=False, request_pins=False),
        AdapterState.LOADING: Owned(host_bytes=True, host_pin=False, pages=False, request_pins=False),
        AdapterState.ON_HOST: Owned(host_bytes=True, host_pin=True, pages=False, request_pins=False),
        AdapterState.COPYING: Owned(host_bytes=True, host_pin=True, pages=True, request_pins=False),
        AdapterState.RESIDENT: Owned(host_bytes=False, host_pin=False, pages=True, request_pins=True),
    }
)
TRANSITIONS = MappingProxyType(
    {
        (AdapterState.ON_DISK, "request_load"): AdapterState.LOADING,
        (AdapterState.LOADING, "on_loaded"): AdapterState.ON_HOST,
        (AdapterState.LOADING, "on_failed"): AdapterState.ON_DISK,
        (AdapterState.LOADING, "cancel"): AdapterState.ON_DISK,
        (AdapterState.ON_HOST, "cancel"): AdapterState.ON_DISK,
        (AdapterState.ON_HOST, "place"): AdapterState.COPYING,
        (AdapterState.COPYING, "on_copied"): AdapterState.RESIDENT,
        (AdapterState.COPYING, "on_failed"): AdapterState.ON_DISK,
        (AdapterState.RESIDENT, "evict"): AdapterState.ON_DISK,
    }
)
"""State after a method of `AdapterManager`, for every state in which the method may be called."""


_ORDER = (
    AdapterState.ON_HOST,
    AdapterState.ON_DISK,
    AdapterState.LOADING,
    AdapterState.COPYING,
    AdapterState.RESIDENT,
)
"""States in the order in which their adapters are moved: those that can be moved, then those on their way."""


@dataclass(slots=True)
class _Reservation:
    """Keep an adapter in the pool until a given time, or if pinned until it is unpinned."""

    layout: AdapterLayout
    until_s: float = 0.0
    is_pinned: bool = False


@dataclass(slots=True)
class _Orders:
    loads: list[AdapterKey] = field(default_factory=list)
    copies: list[tuple[AdapterKey, PlacedAdapter]] = field(default_factory=list)
    cancels: list[AdapterKey] = field(default_factory=list)


class AdapterManager:
    """Own the state of every adapter, and what needs it: requests and reservations. Mutated by the engine thread only.

    Args:
        cache: pages of the adapters.
        prefixes: notified when an adapter becomes resident and when it is evicted.
        max_host_bytes: most bytes of host copies that are being loaded or copied at a time; one is always allowed.
        clock: returns seconds, for reservations.
        is_on_host: returns whether the host cache has an adapter. Any thread may call it.
    """

    def __init__(
        self,
        cache: AdapterCache,
        prefixes: PrefixCache | None,
        max_host_bytes: int,
        costs: CostModel,
        clock: Callable[[], float],
        is_on_host: Callable[[AdapterKey], bool],
    ) -> None:
        self.cache = cache
        self._prefixes = prefixes
        self._max_host_bytes = max_host_bytes
        self._costs = costs
        self._clock = clock
        self._is_on_host = is_on_host
        self._states: dict[AdapterKey, AdapterState] = {}
        self._host_copies: dict[AdapterKey, AdapterLayout] = {}
        self._host_bytes = 0
        self._requests: Counter[AdapterKey] = Counter()
        self._reservations: dict[AdapterKey, _Reservation] = {}
        # Loads that were last known to be needed by nothing.
        self._unneeded: dict[AdapterKey, None] = {}
        self._orders = _Orders()
        self._is_host_full = False
        self._moved: dict[AdapterKey, None] = {}
        self.num_evictions = 0

    # State.

    def state(self, key: AdapterKey) -> AdapterState:
        """Return where an adapter is. Any thread may call this."""
        return self._states.get(key, AdapterState.ON_DISK)

    def is_resident(self, key: AdapterKey) -> bool:
        """Return whether a step may read the adapter. Any thread may call this."""
        return self._states.get(key) is AdapterState.RESIDENT

    def are_resident(self, keys: Iterable[AdapterKey]) -> bool:
        """Return whether a step may read all of these adapters. Any thread may call this."""
        return all(map(self.is_resident, keys))

    def tier(self, key: AdapterKey) -> AdapterTier:
        """Return where an adapter is now; the answer may be outdated at once. Any thread may call this."""
        if self.is_resident(key):
            return AdapterTier.RESIDENT
        return AdapterTier.HOST if self._is_on_host(key) else AdapterTier.DISK

    def next_to_move(self, keys: Iterable[AdapterKey]) -> tuple[AdapterState, AdapterKey | None]:
        """Return the state and key of the adapter that must be loaded next, among several that are needed together.

        Adapters that can be moved come before those on their way. The state is RESIDENT if all are resident; the key is
        None if there are no adapters.
        """
        found = [(_ORDER.index(self.state(key)), key) for key in keys]
        order, key = min(found, default=(-1, None))
        return _ORDER[order], key

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the host copies that are being loaded or copied."""
        return self._host_bytes

    @property
    def num_loading(self) -> int:
        """Return the number of adapters between disk and pool: LOADING, ON_HOST or COPYING."""
        return len(self._host_copies)

    def on_host(self) -> list[AdapterKey]:
        """Return the adapters in host memory that have no pages yet."""
        return [key for key in self._host_copies if self._states[key] is AdapterState.ON_HOST]

    @property
    def num_copying(self) -> int:
        """Return the number of adapters whose pages are being filled."""
        return sum(self._states[key] is AdapterState.COPYING for key in self._host_copies)

    @property
    def num_resident(self) -> int:
        """Return the number of adapters that a step may read."""
        return len(self._states) - len(self._host_copies)

    def has_host_memory(self, nbytes: int, ahead: int) -> bool:
        """Return whether a load of `nbytes` bytes may begin after others of `ahead` bytes in all."""
        is_first = not self._host_copies and not ahead
        return is_first or self._host_bytes + ahead + nbytes <= self._max_host_bytes

    @property
    def has_moved(self) -> bool:
        """Return whether `take_moved` would return any adapter."""
        return bool(self._moved)

    def take_moved(self) -> Iterable[AdapterKey]:
        """Return the adapters whose state has changed since the last call."""
        moved, self._moved = self._moved, {}
        return moved

    # What needs an adapter.

    def add_request(self, key: AdapterKey) -> None:
        """Count one more live request of an adapter."""
        self._requests[key] += 1
        self._note_need(key)

    def remove_request(self, key: AdapterKey) -> None:
        """Count one live request less."""
        assert self._requests[key] > 0, f"adapter {key} has no request"
        self._requests[key] -= 1
        if not self._requests[key]:
            del self._requests[key]
            self._note_need(key)

    def requests(self) -> dict[AdapterKey, int]:
        """Return the number of live requests of every adapter that has any."""
        return dict(self._requests)

    def reserve(self, key: AdapterKey, layout: AdapterLayout, until_s: float) -> None:
        """Prefetch an adapter and keep it until `until_s`. Beyond `MAX_RESERVED` the oldest reservation is dropped.
        Renewing a reservation makes it the newest.
        """
        reservation = self._reservations.pop(key, None) or _Reservation(layout)
        self._reservations[key] = reservation
        reservation.until_s = max(reservation.until_s, until_s)
        timed = [key for key, r in self._reservations.items() if not r.is_pinned]
        for oldest in timed[: max(0, len(timed) - MAX_RESERVED)]:
            self._drop_reservation(oldest)
        self._note_need(key)

    def pin(self, key: AdapterKey, layout: AdapterLayout) -> None:
        """Prefetch an adapter and keep it in the pool until `unpin`."""
        self._reservations.setdefault(key, _Reservation(layout)).is_pinned = True
        self._note_need(key)

    def unpin(self, key: AdapterKey) -> None:
        """Undo `pin`; a reservation that has not ended stays. Do nothing if the adapter is not pinned."""
        if key in self._reservations:
            self._reservations[key].is_pinned = False
            self._note_need(key)

    def need(self, key: AdapterKey) -> Need:
        """Return the strongest need for the adapter."""
        if self.is_pinned(key):
            return Need.PINNED
        return Need.WANTED if key in self._requests or key in self._reservations else Need.NOTHING

    def is_pinned(self, key: AdapterKey) -> bool:
        """Return whether an operator has pinned the adapter."""
        reservation = self._reservations.get(key)
        return reservation is not None and reservation.is_pinned

    def num_pinned_pages(self) -> int:
        """Return the number of pages that all pinned adapters take."""
        return sum(self.cache.pages_for(r.layout) for r in self._reservations.values() if r.is_pinned)

    def reservations(self) -> Iterator[tuple[AdapterKey, bool]]:
        """Yield (key, is pinned) of every reserved adapter."""
        for key, reservation in self._reservations.items():
            yield key, reservation.is_pinned

    def wake_s(self) -> float | None:
        """Return when the next reservation ends, if others may wait for its pages; None if none do."""
        ends = [r.until_s for r in self._reservations.values() if not r.is_pinned]
        return min(ends) if ends and self.reserved_missing() else None

    def reserved_missing(self) -> list[tuple[AdapterKey, AdapterLayout]]:
        """Return the reserved adapters without pages and without a request, the pinned ones first."""
        missing = [key for key in self._reservations if key not in self.cache and key not in self._requests]
        missing.sort(key=lambda key: not self._reservations[key].is_pinned)
        return [(key, self._reservations[key].layout) for key in missing]

    # Transitions.

    def begin_step(self) -> None:
        """Drop the reservations whose time is over."""
        self._is_host_full = False
        if self._reservations:
            now = self._clock()
            for key in [k for k, r in self._reservations.items() if not r.is_pinned and r.until_s <= now]:
                self._drop_reservation(key)

    def cancel_unneeded(self) -> None:
        """Cancel the loads that neither a request nor a reservation needs any more."""
        for key in self._unneeded:
            is_begun = self.state(key) in (AdapterState.LOADING, AdapterState.ON_HOST)
            if is_begun and self.need(key) is Need.NOTHING:
                self.cancel(key)
        self._unneeded.clear()

    def request_load(self, key: AdapterKey, layout: AdapterLayout) -> None:
        """Begin to load an adapter from disk, if its host bytes fit. Call again in the next step if they did not.

        First come, first served: after one adapter that does not fit, no other load begins in this step; otherwise
        small adapters would overtake a large one for ever.
        """
        self._check(key, "request_load")
        is_full = bool(self._host_copies) and self._host_bytes + layout.nbytes > self._max_host_bytes
        self._is_host_full = self._is_host_full or is_full
        if self._is_host_full:
            return
        self._move(key, "request_load")
        self._host_copies[key] = layout
        self._host_bytes += layout.nbytes
        self._note_need(key)
        self._orders.loads.append(key)

    def on_loaded(self, key: AdapterKey) -> None:
        """Note that a load has reached host memory; the loader pins the host copy until it is copied or cancelled."""
        if key not in self._orders.cancels:
            self._move(key, "on_loaded")

    def place(self, key: AdapterKey, *, keep_free: int = 0) -> PlacedAdapter | None:
        """Take pages for an adapter that is in host memory, and order the copy.

        Returns:
            The place; None, and nothing changed, if fewer than `keep_free` pages would stay free.
        """
        self._check(key, "place")
        placed = self.cache.place(key, self._host_copies[key], self.need(key), keep_free=keep_free)
        if placed is not None:
            self._move(key, "place")
            self._orders.copies.append((key, placed))
        return placed

    def on_copied(self, key: AdapterKey) -> None:
        """Note that an adapter's pages hold its weights."""
        self._move(key, "on_copied")
        self.cache.make_evictable(key)
        if self._prefixes is not None:
            self._prefixes.on_adapter_resident(key)

    def on_failed(self, key: AdapterKey) -> None:
        """Note that a load or a copy has failed. Its reservation is dropped: the load would fail again and again."""
        if key not in self._orders.cancels:
            self._move(key, "on_failed")
            if key in self.cache:
                self.cache.remove(key)
        self._drop_reservation(key)

    def cancel(self, key: AdapterKey) -> None:
        """Stop a load, or release a host copy that has no pages yet."""
        self._move(key, "cancel")
        if key in self._orders.loads:
            self._orders.loads.remove(key)
        else:
            self._orders.cancels.append(key)

    def evict(self, key: AdapterKey) -> None:
        """Free the pages of a resident adapter that no running request reads."""
        self._check(key, "evict")
        self.cache.remove(key)
        self._move(key, "evict")
        self.num_evictions += 1
        if self._prefixes is not None:
            self._prefixes.on_adapter_evicted(key)

    def evict_lowest(self, most: Need = Need.PINNED, spared: Set[AdapterKey] = frozenset()) -> bool:
        """Evict the adapter with the lowest score of those that `AdapterCache.lowest` chooses from; return False if
        there is none."""
        lowest = self.cache.lowest(most, spared)
        if lowest is None:
            return False
        self.cache.clock.advance(lowest[0])
        self.evict(lowest[1])
        return True

    def take_orders(self) -> AdapterOrders:
        """Return the loader's new orders since the last call; cancels come before loads, loads before copies."""
        orders, self._orders = self._orders, _Orders()
        return AdapterOrders(tuple(orders.loads), tuple(orders.copies), tuple(orders.cancels))

    # Queries.

    def host_layout(self, key: AdapterKey) -> AdapterLayout:
        """Return the layout of an adapter that is LOADING, ON_HOST or COPYING."""
        return self._host_copies[key]

    def runs_in(self, state: AdapterState) -> dict[Run, AdapterKey]:
        """Return the runs of pages of all adapters in a state."""
        return {
            run: key for key, placed, _ in self.cache.placements() if self._states[key] is state for run in placed.runs
        }

    def estimate_load_s(self, key: AdapterKey, layout: AdapterLayout, *, on_host: bool) -> float:
        """Estimate the seconds until an adapter is resident, given room in the pool.

        Loads run in parallel, copies one after another; `on_host`: whether the host cache has the adapter.
        """
        others = [other for other in self._host_copies if other != key]
        loading = sum(self._host_copies[k].nbytes for k in others if self._states[k] is AdapterState.LOADING)
        copying = sum(self._host_copies[k].nbytes for k in others)
        seconds = loading * self._costs.load.seconds / PARALLEL_LOADS + copying * self._costs.copy.seconds
        return seconds + self._costs.reload_s(layout.nbytes, on_host=on_host)

    def check_integrity(self) -> None:
        """Compare every adapter's state with what it owns.

        Raises:
            AssertionError: an owner disagrees with `OWNED`, or a total does not add up.
        """
        self.cache.check_integrity()
        states, pins = self._states, self.cache.pins()
        assert AdapterState.ON_DISK not in states.values(), "an adapter on disk has a record"
        residents = sum(state is AdapterState.RESIDENT for state in states.values())
        assert self.num_resident == residents, "resident adapters do not add up"
        assert self._host_copies.keys() == {k for k, s in states.items() if OWNED[s].host_bytes}, "host copies differ"
        assert self._host_bytes == sum(c.nbytes for c in self._host_copies.values()), "host bytes do not add up"
        with_pages = {key for key, _, _ in self.cache.placements()}
        assert with_pages == {key for key, state in states.items() if OWNED[state].pages}, "adapters with pages differ"
        for key in with_pages:
            is_usable = key in pins or self.cache.is_evictable(key)
            assert is_usable == OWNED[states[key]].request_pins, f"adapter {key} is {states[key]} but usable or not"
            assert self.cache.need(key) is self.need(key), f"adapter {key} is filed under a wrong need"
        stray = [k for k in self._host_copies if self.need(k) is Need.NOTHING and k not in self._unneeded]
        assert all(states[key] is AdapterState.COPYING for key in stray), "a load that nothing needs is not noted"
        copies = {key for key, _ in self._orders.copies}
        assert copies <= {k for k, s in states.items() if s is AdapterState.COPYING}, "a copy was ordered in vain"
        loads = set(self._orders.loads)
        assert loads <= {k for k, s in states.items() if s is AdapterState.LOADING}, "a load was ordered in vain"

    def _note_need(self, key: AdapterKey) -> None:
        """Tell the cache what needs an adapter now; note a load that nothing needs."""
        need = self.need(key)
        self.cache.set_need(key, need)
        if need is Need.NOTHING and key in self._host_copies:
            self._unneeded[key] = None

    def _drop_reservation(self, key: AdapterKey) -> None:
        if self._reservations.pop(key, None) is not None:
            self._note_need(key)

    def _check(self, key: AdapterKey, method: str) -> None:
        state = self.state(key)
        assert (state, method) in TRANSITIONS, f"adapter {key} is {state}, where {method} is illegal"

    def _move(self, key: AdapterKey, method: str) -> None:
        self._check(key, method)
        source = self.state(key)
        target = TRANSITIONS[source, method]
        self._moved[key] = None
        if target is AdapterState.ON_DISK:
            del self._states[key]
        else:
            self._states[key] = target
        if OWNED[source].host_bytes and not OWNED[target].host_bytes:
            self._host_bytes -= self._host_copies.pop(key).nbytes
