"""Request queue: which requests run, which wait, and the order in which a step serves them.

The order is the policy's, with one additional rule: a request that could run but had no tokens for `max_wait_steps`
steps is *starved*. Starved requests take request slots and pages from others, longest wait first. They are then
*protected*, ahead of all others, until they have `PROTECTED_TOKENS` more tokens: otherwise they could be preempted
before the tokens were of use. So a request gets tokens at the latest

    max_wait_steps + n / MAX_CHECKED + P · (1 + k) steps

after its arrival or its last tokens, if n requests are live, k others are starved before it and its adapter is resident
by then; otherwise n / MAX_CHECKED + P · (1 + k) steps after its adapter is resident. P is the length of protection:
PROTECTED_TOKENS steps plus the steps that compute the longest sequence in chunks. Time in which the limits of its own
adapter or key hold a request back does not count: within a throttled account, only the policy sets the order.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from adapter_store.spec import AdapterKey
from lorasrv.memory.adapter_manager import AdapterManager, AdapterState
from lorasrv.memory.sorted_items import SortedItems
from lorasrv.outputs import RequestId
from lorasrv.request import Request
from lorasrv.scheduler.policies import Policy
from lorasrv.scheduler.quotas import Blocker
from lorasrv.scheduler.waiting_lanes import WaitingLanes

MAX_CHECKED = 64
"""Most requests that a step checks for starvation; it checks those with the longest waits."""
MAX_STARVED = 64
"""Most requests that are starved at a time: they are served one after another anyway."""
PROTECTED_TOKENS = 16
MIN_SWEEP = 1024


class RequestQueue:
    """Hold the live requests. Mutated by the engine thread only.

    Args:
        policy: order of the requests.
        adapters: where each adapter is.
        max_wait_steps: steps without tokens after which a request is starved.
        find_blocker: returns which limit denies a request tokens now; None if none does.
    """

    def __init__(
        self,
        policy: Policy,
        adapters: AdapterManager,
        max_wait_steps: int,
        find_blocker: Callable[[Request], Blocker | None],
    ) -> None:
        self.policy = policy
        self.lanes = WaitingLanes(policy, adapters)
        self._adapters = adapters
        self._find_blocker = find_blocker
        self._max_wait_steps = max_wait_steps
        self._running: list[Request] = []
        self._waiting: dict[RequestId, Request] = {}
        self.requests: dict[RequestId, Request] = {}
        self._preempted: dict[RequestId, Request] = {}
        self._starved: dict[RequestId, Request] = {}
        # Requests that are not starved, by the step of their last tokens or an earlier one.
        self._by_wait: SortedItems[Request] = SortedItems()
        # Steps in which limits were last seen to hold requests back.
        self._limited: dict[Blocker, int] = {}
        # Waiting requests that are not starved only because an adapter is loading, which no preemption makes faster;
        # under every adapter that they need.
        self._loading: dict[AdapterKey, dict[RequestId, Request]] = {}
        self._num_added = 0
        self._next_sweep = MIN_SWEEP
        self.step = 0
        self.num_starved_total = 0

    @property
    def running(self) -> Sequence[Request]:
        """Return the requests that hold pages, by seniority."""
        return self._running

    @property
    def waiting(self) -> dict[RequestId, Request]:
        """Return the requests that do not run, by id."""
        return self._waiting

    @property
    def preempted(self) -> dict[RequestId, Request]:
        """Return the waiting requests that have run before."""
        return self._preempted

    @property
    def starved(self) -> dict[RequestId, Request]:
        """Return the starved requests, longest wait first."""
        return self._starved

    def add(self, request: Request) -> None:
        """Add a new request to the waiting ones."""
        self._num_added += 1
        request.number = self._num_added
        self._touch(request)
        self.requests[request.request_id] = self._waiting[request.request_id] = request
        self._enqueue(request)

    def admit(self, request: Request) -> None:
        """Move a request from waiting to running."""
        self._unqueue(request)
        self._running.append(request)
        self.policy.on_admitted(request)

    def preempt(self, request: Request) -> None:
        """Move a request from running back to waiting."""
        self._leave_batch(request)
        self._waiting[request.request_id] = self._preempted[request.request_id] = request
        self._enqueue(request)

    def remove(self, request: Request) -> None:
        """Remove a finished request."""
        del self.requests[request.request_id]
        self._starved.pop(request.request_id, None)
        if request in self._by_wait:
            self._by_wait.remove(request)
        if request.request_id in self._waiting:
            self._unqueue(request)
        else:
            self._leave_batch(request)

    def begin_step(self, now_s: float, relieved: Iterable[Blocker]) -> None:
        """Open the lanes that may go on, and find the starved requests.

        Args:
            relieved: limits that may allow more than in the last step.
        """
        self.step += 1
        for blocker in relieved:
            self.lanes.relieve(blocker)
        moved = self._adapters.take_moved()
        self.lanes.begin_step(now_s, moved)
        for request in {rid: r for key in moved for rid, r in self._loading.get(key, {}).items()}.values():
            self._end_wait_for_load(request)
            if request.request_id in self._waiting:
                self._watch(request, request.last_share_step)
        self._find_starved()

    def _find_starved(self) -> None:
        for request in list(self._starved.values()):
            if self._is_loading(request):
                del self._starved[request.request_id]
                self.num_starved_total -= 1
                self._wait_for_load(request)
            elif request.request_id not in self._waiting and (blocker := self._find_blocker(request)) is not None:
                # Told now, because another starved request may be visited first, and take this one's pages.
                self.mark_throttled(request, blocker)
        num_before = len(self._starved)
        for _ in range(min(MAX_CHECKED, len(self._by_wait))):
            request = self._by_wait.first
            since = self._by_wait.rank(request)[0]
            if self.step - since < self._max_wait_steps or len(self._starved) >= MAX_STARVED:
                break
            if since < request.last_share_step:
                self._watch(request, request.last_share_step)
                continue
            if (blocker := self._find_blocker(request)) is not None:
                self.mark_throttled(request, blocker)
            elif (limited := self._limited_step(request)) > request.last_share_step:
                self._watch(request, limited)
            elif self._is_loading(request):
                self._by_wait.remove(request)
                self._wait_for_load(request)
            else:
                self._by_wait.remove(request)
                self._starved[request.request_id] = request
                self.num_starved_total += 1
        if len(self._starved) > num_before:
            by_wait = sorted(self._starved.values(), key=lambda r: (r.last_share_step, r.number))
            self._starved = {request.request_id: request for request in by_wait}

    def _is_loading(self, request: Request) -> bool:
        return self._adapters.next_to_move(request.term_keys)[0] in (AdapterState.LOADING, AdapterState.COPYING)

    def _wait_for_load(self, request: Request) -> None:
        for key in request.term_keys:
            self._loading.setdefault(key, {})[request.request_id] = request

    def _end_wait_for_load(self, request: Request) -> None:
        for key in request.term_keys:
            del self._loading[key][request.request_id]
            if not self._loading[key]:
                del self._loading[key]

    def order(self) -> Generator[Request, None, None]:
        """Yield every request once, best first. The request yielded last may be admitted, finished or preempted before
        the next one is taken."""
        first = [r for r in self._running if r.request_id not in self._starved and r.is_protected]
        first += self._starved.values()
        yield from first
        named = {request.request_id for request in first}
        for request in self.policy.in_order(self._running, self.lanes.walk(), self.lanes.first):
            if request.request_id not in named:
                yield request

    def running_in_order(self) -> Sequence[Request]:
        """Return the running requests, best first."""
        return self.policy.running(self._running)

    def mark_scheduled(self, request: Request) -> None:
        """Note that a request has tokens in this step. A starved request becomes the most senior; otherwise it would be
        preempted at once."""
        was_starved = self._starved.pop(request.request_id, None) is not None
        if request.is_paused:
            self._resume(request)
        request.last_share_step = self.step
        if was_starved:
            self._touch(request)
            request.protected_until_tokens = request.num_generated_tokens + PROTECTED_TOKENS
            self._running.remove(request)
            self._running.insert(0, request)
            self.policy.on_starved(request)

    def mark_without_slot(self, request: Request) -> None:
        """Note that a running request has no tokens in this step because all request slots were taken."""
        if self.policy.pauses and not request.is_paused:
            request.is_paused = True
            self.policy.on_paused(request)

    def mark_throttled(self, request: Request, blocker: Blocker) -> None:
        """Note that a request could not run because of its own limits, which is not starvation."""
        self._starved.pop(request.request_id, None)
        if any(request.request_id in self._loading.get(key, ()) for key in request.term_keys):
            self._end_wait_for_load(request)
        self._touch(request)
        request.protected_until_tokens = 0
        self._limited[blocker] = self.step
        if len(self._limited) > self._next_sweep:
            self._limited = {b: at for b, at in self._limited.items() if self.step - at < self._max_wait_steps}
            self._next_sweep = max(MIN_SWEEP, 2 * len(self._limited))
        if not blocker.is_of_key:  # a limit of the key throttles all its adapters
            self.policy.on_throttled(request)

    def select_victim(self) -> Request | None:
        """Return the request to preempt so that running ones can grow; None if all are in steps in flight."""
        return self.policy.select_victim(self._unprotected()) or self.policy.select_victim(
            filter(_is_preemptible, self._running)
        )

    def select_victim_below(self, request: Request) -> Request | None:
        """Return the request to preempt so that `request` can be admitted; None if there is none."""
        if request.request_id in self._starved:
            return self.policy.select_victim(r for r in self._unprotected() if r.request_id not in self._starved)
        if not self.policy.may_displace:
            return None
        victim = self.policy.select_victim(self._unprotected())
        return victim if victim is not None and self.policy.rank(victim) > self.policy.rank(request) else None

    def check_integrity(self) -> None:
        """Compare the policy and the lists with each other.

        Raises:
            AssertionError: they differ.
        """
        self.lanes.check_integrity(self._waiting.values())
        assert not {r.request_id for r in self._running} & self._waiting.keys(), "a request runs and waits"
        live = {r.request_id for r in self._running} | self._waiting.keys()
        assert self.requests.keys() == live, "a request is lost"
        assert self._starved.keys() <= live, "a request that is gone is starved"
        loading = {rid for requests in self._loading.values() for rid in requests} & self._waiting.keys()
        of_wait = (*(r.request_id for r in self._by_wait), *self._starved, *loading)
        assert sorted(of_wait) == sorted(live), "a wait is counted twice, or not at all"
        steps = {request: self._by_wait.rank(request)[0] for request in self._by_wait}
        assert all(step <= request.last_share_step for request, step in steps.items()), "waits are not in order"

    def _unprotected(self) -> Iterator[Request]:
        return (r for r in self._running if _is_preemptible(r) and not r.is_protected)

    def _leave_batch(self, request: Request) -> None:
        if request.is_paused:
            self._resume(request)
        self._running.remove(request)
        self.policy.on_left_batch(request)

    def _resume(self, request: Request) -> None:
        request.is_paused, request.resumed_at = False, request.num_generated_tokens
        self.policy.on_resumed(request)

    def _touch(self, request: Request) -> None:
        """Note that the wait of a request begins now; it must not be starved."""
        self._watch(request, self.step)

    def _watch(self, request: Request, since: int) -> None:
        """Check later, when it may be starved, a request that has waited since step `since`."""
        request.last_share_step = since
        self._by_wait.add(request, (since, request.number))

    def _limited_step(self, request: Request) -> int:
        """Return the last step in which a limit of the request's adapter or key held requests back."""
        message = request.message
        return max(self._limited.get(limit, 0) for limit in Blocker.limits_of(message.adapter_id, message.principal))

    def _enqueue(self, request: Request) -> None:
        self.policy.on_waiting(request)
        self.lanes.add(request)

    def _unqueue(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._preempted.pop(request.request_id, None)
        self.policy.on_taken(request)
        self.lanes.remove(request)


def _is_preemptible(request: Request) -> bool:
    """Return whether no step in flight writes to the request's pages."""
    return not request.num_in_flight_tokens
