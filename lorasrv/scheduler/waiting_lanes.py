"""Waiting lanes: which waiting requests a step checks, in the order of the policy.

The order is maintained while requests come and go, not computed in every step. A lane whose first request cannot run
for a reason that outlasts the step is *blocked*: no step checks it until the reason is gone. So the work of a step does
not depend on how many requests wait. The reasons are

- its adapter is being loaded or copied, or waits for host memory before it can be loaded;
- the snapshot that it begins with is being restored;
- a limit of its adapter or key, until a request of that account leaves the batch or the rate allows more;
- the first choice of its prompt is not computed, the step has no prompt rows left, another group of beams runs, or the
  other beams of its group are to offer their next tokens.

A limit on a key's running requests or rate holds all lanes of the key at once: their adapters still decide where they
are filed, but no step checks or loads for them. If another event affects many lanes, at most `MAX_MOVED` of them are
updated per step.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from itertools import islice

from adapter_store.spec import AdapterKey
from lorasrv.config import PARALLEL_LOADS
from lorasrv.memory.adapter_manager import AdapterManager, AdapterState
from lorasrv.memory.sorted_items import SortedItems
from lorasrv.request import Request
from lorasrv.scheduler.policies import Policy
from lorasrv.scheduler.policies.lane import Lane, LaneName
from lorasrv.scheduler.quotas import Blocker

HOST_MEMORY = Blocker("host memory", "")
BEAMS = Blocker("beams", "")
PROMPT_ROWS = Blocker("prompt rows", "")
MAX_MOVED = 64
"""Most lanes that change their place at the beginning of a step."""
MAX_WOKEN = 16
"""Most lanes of one blocker that are tried again in a step: usually the first of them blocks the others again."""
MAX_LOADS = PARALLEL_LOADS
"""Most loads that begin in a step."""


class _KeyLanes:
    """Hold the lanes of one key in a `LaneOrder`."""

    __slots__ = ("lanes", "name", "num_cold")

    def __init__(self, name: str) -> None:
        self.name, self.num_cold = name, 0
        self.lanes: SortedItems[Lane] = SortedItems()


class LaneOrder:
    """Sort API keys by their best lane, and the lanes of each key. A rank that has grown while its lane waits is
    updated when the lane comes up.

    Args:
        blocker: what the lanes wait for; None if steps check them.
        held: keys that are on hold; call `hold` before adding one, and `release` after removing it.
    """

    def __init__(self, policy: Policy, blocker: Blocker | None = None, held: Set[str] = frozenset()) -> None:
        self._policy = policy
        self.blocker = blocker
        self._held = held
        self._keys: dict[str, _KeyLanes] = {}
        self._sorted: SortedItems[_KeyLanes] = SortedItems()
        self.num_lanes = self.num_cold = 0

    def __iter__(self) -> Iterator[Lane]:
        return (lane for key in self._keys.values() for lane in key.lanes)

    def add(self, lane: Lane, *, is_cold: bool = False) -> None:
        """Add a lane.

        Args:
            is_cold: whether a step is to load or place its adapter.
        """
        name = lane.name.principal
        if (key := self._keys.get(name)) is None:
            key = self._keys[name] = _KeyLanes(name)
        key.lanes.add(lane, self._policy.lane_rank(lane))
        lane.is_cold = is_cold
        self._count(key, 1, lane.is_cold)
        key.num_cold += lane.is_cold
        self._sort(key)

    def remove(self, lane: Lane) -> None:
        """Remove a lane."""
        key = self._keys[lane.name.principal]
        key.lanes.remove(lane)
        self._count(key, -1, -lane.is_cold)
        key.num_cold -= lane.is_cold
        self._sort(key)

    def update(self, lane: Lane) -> None:
        """Sort a lane again whose first request has changed."""
        key = self._keys[lane.name.principal]
        key.lanes.add(lane, self._policy.lane_rank(lane))
        self._sort(key)

    def pop(self) -> Lane | None:
        """Remove and return the best lane; None if there is none."""
        while len(self._sorted):
            key = self._sorted.first
            first = key.lanes.first
            if key.lanes.rank(first) != (rank := self._policy.lane_rank(first)):
                key.lanes.add(first, rank)
            elif self._sorted.rank(key) != (rank := self._policy.key_rank(first)):
                self._sorted.add(key, rank)
            else:
                best = self._policy.choose(key.lanes)
                self.remove(best)
                return best
        return None

    def hold(self, name: str) -> None:
        """Neither return nor count the lanes of a key."""
        if (key := self._keys.get(name)) is not None:
            self._count(key, -len(key.lanes), -key.num_cold)
            self._sorted.remove(key)

    def release(self, name: str) -> None:
        """Undo `hold`."""
        if (key := self._keys.get(name)) is not None:
            self._count(key, len(key.lanes), key.num_cold)
            self._sort(key)

    def check_integrity(self) -> None:
        """Compare the counts with the lanes that are not held.

        Raises:
            AssertionError: they differ.
        """
        lanes = [lane for lane in self if lane.name.principal not in self._held]
        assert {key.name for key in self._sorted} == {lane.name.principal for lane in lanes}, "keys differ"
        assert self.num_lanes == len(lanes), "lanes do not add up"
        assert self.num_cold == sum(lane.is_cold for lane in lanes), "lanes do not add up"

    def _count(self, key: _KeyLanes, num_lanes: int, num_cold: int) -> None:
        if key.name not in self._held:
            self.num_lanes += num_lanes
            self.num_cold += num_cold

    def _sort(self, key: _KeyLanes) -> None:
        if not len(key.lanes):
            del self._keys[key.name]
        if key.name not in self._held and len(key.lanes):
            self._sorted.add(key, self._policy.key_rank(key.lanes.first))
        elif key in self._sorted:
            self._sorted.remove(key)


class WaitingLanes:
    """Hold the waiting requests. Mutated by the engine thread only.

    Args:
        policy: ranks requests and lanes.
        adapters: where each adapter is.
    """

    def __init__(self, policy: Policy, adapters: AdapterManager) -> None:
        self._policy = policy
        self._adapters = adapters
        self._lanes: dict[LaneName, Lane] = {}
        self._of_adapter: defaultdict[AdapterKey, dict[Lane, None]] = defaultdict(dict)
        # Keys whose lanes a limit holds, which relief or time ends.
        self._held: set[str] = set()
        self._open = LaneOrder(policy, None, self._held)
        self._on_disk = LaneOrder(policy, HOST_MEMORY, self._held)
        self._blocked: dict[Blocker, LaneOrder] = {}
        # Where each lane is, except those that a step is checking.
        self._homes: dict[Lane, LaneOrder] = {}
        # Lanes whose turn to be loaded came in this step.
        self._tried: list[Lane] = []
        # Lanes whose adapter has changed its state, and blockers that may release lanes.
        self._moved: dict[Lane, None] = {}
        self._relieved: dict[Blocker, None] = {}
        self._wake_times: list[tuple[float, Blocker]] = []

    def __iter__(self) -> Iterator[Request]:
        return (request for lane in self._lanes.values() for request in lane.requests)

    @property
    def has_ready(self) -> bool:
        """Return whether any open lane has a resident adapter."""
        return self._open.num_lanes > self._open.num_cold

    @property
    def has_cold(self) -> bool:
        """Return whether any open lane has an adapter that is to be loaded or placed."""
        return self._open.num_cold > 0

    def are_held_back(self, key: AdapterKey) -> bool:
        """Return whether requests wait for an adapter, but all of them are blocked by something else first."""
        lanes = self._of_adapter.get(key, ())
        return bool(lanes) and all(map(self._is_held_back, lanes))

    def wake_s(self) -> float | None:
        """Return when a step has lanes to check even without an event; None if no time is known."""
        if self._relieved or self._moved or self._may_load_others:
            return 0.0
        while self._wake_times and not self._is_blocking(self._wake_times[0][1]):
            heapq.heappop(self._wake_times)
        return self._wake_times[0][0] if self._wake_times else None

    def of_adapter(self, key: AdapterKey) -> list[Request]:
        """Return the waiting requests that need an adapter."""
        return [request for lane in self._of_adapter.get(key, ()) for request in lane.requests]

    def add(self, request: Request) -> None:
        """Add a request that begins to wait."""
        name = LaneName.of(request)
        lane = self._lanes.get(name)
        is_new = lane is None
        if lane is None:
            lane = self._lanes[name] = Lane(name, request.term_keys)
            for key in lane.term_keys:
                self._of_adapter[key][lane] = None
        lane.requests.add(request, (*self._policy.rank(request), request.number))
        if is_new:
            self._file(lane)
        elif (home := self._homes.get(lane)) is not None and lane.first is request:
            home.update(lane)

    def remove(self, request: Request) -> None:
        """Remove a request that no longer waits."""
        lane = self._lanes[LaneName.of(request)]
        was_first = lane.first is request
        if was_first and len(lane.requests) == 1:
            self._take_out(lane)
            self._drop(lane)
        lane.requests.remove(request)
        if was_first and (home := self._homes.get(lane)) is not None:
            home.update(lane)

    def walk(self) -> Iterator[Request]:
        """Yield the first request of every open lane, best first. After an admitted request, its lane's next one
        follows.

        At the end, the skipped lanes are filed again by the current state of their adapters.
        """
        passed: list[Lane] = []
        try:
            while (lane := self._open.pop()) is not None:
                del self._homes[lane]
                passed.append(lane)
                request = lane.first
                yield request
                if lane in self._homes or not len(lane.requests):
                    passed.pop()
                elif lane.first is not request:
                    self._open_lane(passed.pop())
        finally:
            for lane in passed:
                if len(lane.requests) and lane not in self._homes:
                    self._file(lane)

    def first(self, count: int) -> list[Request]:
        """Return the first requests of the best `count` lanes, before a walk."""
        lanes = [lane for _ in range(count) if (lane := self._open.pop()) is not None]
        for lane in lanes:
            self._open.add(lane, is_cold=lane.is_cold)
        return [lane.first for lane in lanes]

    def block(self, request: Request, blocker: Blocker, until_s: float | None = None) -> None:
        """Block a request's lane, or hold all lanes of its key, until the blocker is relieved or a time has come."""
        lane = self._lanes[LaneName.of(request)]
        self._take_out(lane)
        if not blocker.is_of_key:
            self._put(lane, self._order(blocker))
        else:
            if blocker.name not in self._held:
                self._open.hold(blocker.name)
                self._on_disk.hold(blocker.name)
                self._held.add(blocker.name)
            self._file(lane)
        self._relieved.pop(blocker, None)
        if until_s is not None:
            heapq.heappush(self._wake_times, (until_s, blocker))

    def relieve(self, blocker: Blocker) -> None:
        """Note that a blocker may release lanes."""
        if self._is_blocking(blocker):
            self._relieved[blocker] = None

    def begin_step(self, now_s: float, moved: Iterable[AdapterKey]) -> None:
        """Open the lanes that may go on.

        Args:
            moved: adapters that have changed their state.
        """
        for key in moved:
            self._moved.update(self._of_adapter.get(key, {}))
        while self._wake_times and self._wake_times[0][0] <= now_s:
            self.relieve(heapq.heappop(self._wake_times)[1])
        self.relieve(PROMPT_ROWS)
        num_left = MAX_MOVED
        for blocker in list(islice(self._relieved, MAX_MOVED)):
            num_left -= self._unblock(blocker, min(MAX_WOKEN, num_left)) if num_left > 0 else 0
        for lane in list(islice(self._moved, max(MAX_WOKEN, num_left))):
            del self._moved[lane]
            blocked_by = self._homes[lane].blocker
            if blocked_by is None or blocked_by.is_of_adapter:
                self._take_out(lane)
                self._file(lane)
        self._try_loads()

    def check_integrity(self, waiting: Iterable[Request]) -> None:
        """Compare the lanes with the waiting requests.

        Raises:
            AssertionError: they differ, or a lane is in no order or in two.
        """
        assert set(self) == set(waiting), "the lanes differ from the waiting requests"
        orders = (self._open, self._on_disk, *self._blocked.values())
        places = [lane for order in orders for lane in order]
        assert len(places) == len(set(places)), "a lane is in two places"
        assert set(places) == set(self._lanes.values()) == self._homes.keys(), "a lane is in no place"
        for order in orders:
            order.check_integrity()
        assert all(self._homes[lane] is order for order in orders for lane in order), "a lane is elsewhere"
        assert all(order.blocker == blocker and order.num_lanes for blocker, order in self._blocked.items()), "misfiled"
        by_adapter = {(key, lane) for key, lanes in self._of_adapter.items() for lane in lanes}
        assert by_adapter == {(key, lane) for lane in places for key in lane.term_keys}, "an adapter's lanes differ"

    def _is_blocking(self, blocker: Blocker) -> bool:
        return blocker.name in self._held if blocker.is_of_key else blocker in self._blocked

    def _order(self, blocker: Blocker) -> LaneOrder:
        """Return the lanes that a blocker blocks, as a new order if there are none."""
        if blocker is HOST_MEMORY:
            return self._on_disk
        if blocker not in self._blocked:
            self._blocked[blocker] = LaneOrder(self._policy, blocker)
        return self._blocked[blocker]

    def _file(self, lane: Lane) -> None:
        """Put a lane into the order that its adapter's state requires."""
        if (blocker := self._adapter_blocker(lane)) is None:
            self._open_lane(lane)
        else:
            self._put(lane, self._order(blocker))

    def _adapter_blocker(self, lane: Lane) -> Blocker | None:
        match self._adapters.next_to_move(lane.term_keys):
            case AdapterState.LOADING | AdapterState.COPYING, key:
                return Blocker.of_load(key)
            case AdapterState.ON_DISK, _:
                return HOST_MEMORY
        return None

    def _open_lane(self, lane: Lane) -> None:
        self._put(lane, self._open, is_cold=not self._adapters.are_resident(lane.term_keys))

    def _put(self, lane: Lane, order: LaneOrder, *, is_cold: bool = False) -> None:
        self._homes[lane] = order
        order.add(lane, is_cold=is_cold)

    def _unblock(self, blocker: Blocker, most: int) -> int:
        """Release at most `most` lanes of a relieved blocker, best first, or all lanes of a key as one; return how many
        moved. The blocker stays relieved while it has lanes."""
        if not self._is_blocking(blocker):
            del self._relieved[blocker]
            return 0
        if blocker.is_of_key:
            del self._relieved[blocker]
            self._held.remove(blocker.name)
            self._open.release(blocker.name)
            self._on_disk.release(blocker.name)
            return 1
        order = self._blocked[blocker]
        lanes = [lane for _ in range(min(most, order.num_lanes)) if (lane := order.pop()) is not None]
        if not order.num_lanes:
            del self._blocked[blocker], self._relieved[blocker]
        for lane in lanes:
            del self._homes[lane]
            self._file(lane)
        return len(lanes)

    def _try_loads(self) -> None:
        """Open the best of the lanes that wait for host memory, as far as there may be enough for them."""
        for lane in self._tried:  # lanes that no step reached: others may be better now
            if self._homes.get(lane) is self._open and self._is_on_disk(lane):
                self._take_out(lane)
                self._put(lane, self._on_disk)
        self._tried.clear()
        num_bytes = 0
        for _ in range(MAX_LOADS):
            if (best := self._on_disk.pop()) is None:
                break
            self._tried.append(best)
            nbytes = self._bytes_on_disk(best.first)
            if not self._adapters.has_host_memory(nbytes, num_bytes):
                self._put(best, self._on_disk)
                break
            if self._is_on_disk(best):
                self._open_lane(best)
                num_bytes += nbytes
            else:
                self._file(best)

    @property
    def _may_load_others(self) -> bool:
        """Return whether lanes wait for the host memory that others, now gone or blocked by something else, would have
        used."""
        return self._on_disk.num_lanes > 0 and any(map(self._is_held_back, self._tried))

    def _is_held_back(self, lane: Lane) -> bool:
        """Return whether a lane is gone, held, or blocked by something other than its adapter."""
        home = self._homes.get(lane)
        if home is None or lane.name.principal in self._held:
            return True
        return not (home.blocker is None or home.blocker.is_of_adapter)

    def _is_on_disk(self, lane: Lane) -> bool:
        return self._adapter_blocker(lane) is HOST_MEMORY

    def _bytes_on_disk(self, request: Request) -> int:
        """Return the bytes that must be read from disk for a request."""
        on_disk = (t for t in request.terms if self._adapters.state(t.key) is AdapterState.ON_DISK)
        return sum(term.layout.nbytes for term in on_disk)

    def _take_out(self, lane: Lane) -> None:
        """Remove a lane from its order, unless a step is checking it."""
        home = self._homes.pop(lane, None)
        if home is None:
            return
        home.remove(lane)
        if home.blocker in self._blocked and not home.num_lanes:
            del self._blocked[home.blocker]

    def _drop(self, lane: Lane) -> None:
        del self._lanes[lane.name]
        self._moved.pop(lane, None)
        for key in lane.term_keys:
            del self._of_adapter[key][lane]
            if not self._of_adapter[key]:
                del self._of_adapter[key]
