"""Waiting lanes: which waiting requests a step checks, in the order of the policy.

The order is maintained while requests come and go, not computed in every step. A lane whose first request cannot run
for a reason that outlasts the step is *blocked*: no step checks it until the reason is gone. So the work of a step does
not depend on how many requests wait. The reasons are

- its adapter is being loaded or copied, or waits for host memory before it can be loaded;
- the snapshot that it begins with is being restored;
- a limit of its adapter or key, until a request of that account leaves the batch or the rate allows more;
- the first choice of its prompt is not computed, the step has no prompt rows left, another group of beams runs, or the
  other beams of its group are to offer their next tokens.

A limit on a key's running requests or rate blocks all lanes of the key at once. If one event affects many lanes, at
most `MAX_MOVED` of them are updated per step.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
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

    __slots__ = ("lanes", "name", "num_cold", "order")

    def __init__(self, name: str, order: "LaneOrder") -> None:
        self.name, self.order, self.num_cold = name, order, 0
        self.lanes: SortedItems[Lane] = SortedItems()


class LaneOrder:
    """Sort API keys by their best lane, and the lanes of each key. A rank that has grown while its lane waits is
    updated when the lane comes up.

    Args:
        blocker: what the lanes wait for; None if steps check them.
    """

    def __init__(self, policy: Policy, blocker: Blocker | None = None) -> None:
        self._policy = policy
        self.blocker = blocker
        self._keys: dict[str, _KeyLanes] = {}
        self._sorted: SortedItems[_KeyLanes] = SortedItems()
        self.num_lanes = self.num_cold = 0

    def __iter__(self) -> Iterator[Lane]:
        return (lane for key in self._keys.values() for lane in key.lanes)

    def add(self, lane: Lane, *, is_cold: bool = False) -> _KeyLanes:
        """Add a lane; return the lanes of its key.

        Args:
            is_cold: whether a step is to load or place its adapter.
        """
        name = lane.name.principal
        if (key := self._keys.get(name)) is None:
            key = self._keys[name] = _KeyLanes(name, self)
        key.lanes.add(lane, self._policy.lane_rank(lane))
        lane.is_cold = is_cold
        self._count(key, lane, 1)
        self._sort(key)
        return key

    def remove(self, lane: Lane) -> None:
        """Remove a lane."""
        key = self._keys[lane.name.principal]
        key.lanes.remove(lane)
        self._count(key, lane, -1)
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

    def move_key(self, name: str, target: "LaneOrder") -> None:
        """Move all lanes of a key to an order that has no lanes of this key."""
        assert name not in target._keys, f"lanes of key {name} are in two places"
        key = self._keys.pop(name, None)
        if key is None:
            return
        self._sorted.remove(key)
        self.num_lanes -= len(key.lanes)
        self.num_cold -= key.num_cold
        key.order, target._keys[name] = target, key
        target.num_lanes += len(key.lanes)
        target.num_cold += key.num_cold
        target._sort(key)

    def _count(self, key: _KeyLanes, lane: Lane, change: int) -> None:
        self.num_lanes += change
        self.num_cold += change * lane.is_cold
        key.num_cold += change * lane.is_cold

    def _sort(self, key: _KeyLanes) -> None:
        if len(key.lanes):
            self._sorted.add(key, self._policy.key_rank(key.lanes.first))
        else:
            del self._keys[key.name]
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
        self._open = LaneOrder(policy)
        self._blocked: dict[Blocker, LaneOrder] = {}
        # Where each lane is, except those that a step is checking.
        self._homes: dict[Lane, _KeyLanes] = {}
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

    @property
    def wait_for_host_memory(self) -> bool:
        """Return whether a lane waits for host memory."""
        return HOST_MEMORY in self._blocked

    def are_held_back(self, key: AdapterKey) -> bool:
        """Return whether requests wait for an adapter, but all of them are blocked by something else first."""
        lanes = self._of_adapter.get(key, ())
        return bool(lanes) and all(map(self._is_held_back, lanes))

    def wake_s(self) -> float | None:
        """Return when a step has lanes to check even without an event; None if no time is known."""
        if self._relieved or self._moved or self._may_load_others:
            return 0.0
        while self._wake_times and self._wake_times[0][1] not in self._blocked:
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
            home.order.update(lane)

    def remove(self, request: Request) -> None:
        """Remove a request that no longer waits."""
        lane = self._lanes[LaneName.of(request)]
        was_first = lane.first is request
        if was_first and len(lane.requests) == 1:
            self._take_out(lane)
            self._drop(lane)
        lane.requests.remove(request)
        if was_first and (home := self._homes.get(lane)) is not None:
            home.order.update(lane)

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
            self._homes[lane] = self._open.add(lane, is_cold=lane.is_cold)
        return [lane.first for lane in lanes]

    def block(self, request: Request, blocker: Blocker, until_s: float | None = None) -> None:
        """Block a request's lane, or all lanes of its key, until the blocker is relieved or a time has come."""
        lane = self._lanes[LaneName.of(request)]
        self._take_out(lane)
        if blocker.is_of_key and blocker not in self._blocked:
            self._open.move_key(blocker.name, self._order(blocker))
        self._homes[lane] = self._order(blocker).add(lane)
        self._relieved.pop(blocker, None)
        if until_s is not None:
            heapq.heappush(self._wake_times, (until_s, blocker))

    def relieve(self, blocker: Blocker) -> None:
        """Note that a blocker may release lanes."""
        if blocker in self._blocked:
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
            blocked_by = self._homes[lane].order.blocker
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
        orders = (self._open, *self._blocked.values())
        places = [lane for order in orders for lane in order]
        assert len(places) == len(set(places)), "a lane is in two places"
        assert set(places) == set(self._lanes.values()) == self._homes.keys(), "a lane is in no place"
        assert all(order.num_lanes == len(list(order)) for order in orders), "lanes do not add up"
        assert all(self._homes[lane].order is order for order in orders for lane in order), "a lane is elsewhere"
        assert all(order.num_cold == sum(lane.is_cold for lane in order) for order in orders), "lanes do not add up"
        assert all(order.blocker == blocker and order.num_lanes for blocker, order in self._blocked.items()), "misfiled"
        by_adapter = {(key, lane) for key, lanes in self._of_adapter.items() for lane in lanes}
        assert by_adapter == {(key, lane) for lane in places for key in lane.term_keys}, "an adapter's lanes differ"

    def _order(self, blocker: Blocker) -> LaneOrder:
        """Return the lanes that a blocker blocks, as a new order if there are none."""
        if blocker not in self._blocked:
            self._blocked[blocker] = LaneOrder(self._policy, blocker)
        return self._blocked[blocker]

    def _file(self, lane: Lane) -> None:
        """Put a lane into the order that its key's limits and its adapter's state require."""
        of_key = Blocker.of_key(lane.name.principal)
        blocker = of_key if of_key in self._blocked else self._adapter_blocker(lane)
        if blocker is None:
            self._open_lane(lane)
        else:
            self._homes[lane] = self._order(blocker).add(lane)

    def _adapter_blocker(self, lane: Lane) -> Blocker | None:
        match self._adapters.next_to_move(lane.term_keys):
            case AdapterState.LOADING | AdapterState.COPYING, key:
                return Blocker.of_load(key)
            case AdapterState.ON_DISK, _:
                return HOST_MEMORY
        return None

    def _open_lane(self, lane: Lane) -> None:
        is_cold = not self._adapters.are_resident(lane.term_keys)
        self._homes[lane] = self._open.add(lane, is_cold=is_cold)

    def _unblock(self, blocker: Blocker, most: int) -> int:
        """Release at most `most` lanes of a relieved blocker, best first, or all lanes of a key; return how many moved.
        The blocker stays relieved while it has lanes."""
        order = self._blocked.get(blocker)
        if order is None or blocker.is_of_key:
            del self._relieved[blocker]
        if order is None:
            return 0
        if blocker.is_of_key:
            del self._blocked[blocker]
            order.move_key(blocker.name, self._open)
            return 1
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
            home = self._homes.get(lane)
            if home is not None and home.order is self._open and self._is_on_disk(lane):
                self._take_out(lane)
                self._homes[lane] = self._order(HOST_MEMORY).add(lane)
        self._tried.clear()
        num_bytes = 0
        for _ in range(MAX_LOADS):
            order = self._blocked.get(HOST_MEMORY)
            best = order.pop() if order is not None else None
            if order is None or best is None:
                break
            nbytes = self._bytes_on_disk(best.first)
            if not self._adapters.has_host_memory(nbytes, num_bytes):
                self._homes[best] = order.add(best)
                break
            if not order.num_lanes:
                del self._blocked[HOST_MEMORY]
            del self._homes[best]
            self._tried.append(best)
            if self._is_on_disk(best) and Blocker.of_key(best.name.principal) not in self._blocked:
                self._open_lane(best)
                num_bytes += nbytes
            else:
                self._file(best)

    @property
    def _may_load_others(self) -> bool:
        """Return whether lanes wait for the host memory that others, now gone or blocked by something else, would have
        used."""
        return self.wait_for_host_memory and any(map(self._is_held_back, self._tried))

    def _is_held_back(self, lane: Lane) -> bool:
        """Return whether a lane is gone, or blocked by something other than its adapter."""
        home = self._homes.get(lane)
        blocker = None if home is None else home.order.blocker
        return home is None or not (blocker is None or blocker.is_of_adapter)

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
        order = home.order
        order.remove(lane)
        if order.blocker is not None and not order.num_lanes:
            del self._blocked[order.blocker]

    def _drop(self, lane: Lane) -> None:
        del self._lanes[lane.name]
        self._moved.pop(lane, None)
        for key in lane.term_keys:
            del self._of_adapter[key][lane]
            if not self._of_adapter[key]:
                del self._of_adapter[key]
