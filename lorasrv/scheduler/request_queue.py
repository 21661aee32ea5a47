"""Request queue: which requests run, which wait, and the order in which a step serves them.

The order is the policy's, with one rule on top: a request that could run but had no tokens for `max_wait_steps` steps
is *starved*. Starved requests take request slots and pages from others, longest wait first, and are then *protected*,
ahead of all others, until they have `PROTECTED_TOKENS` more tokens: otherwise they could be preempted before the tokens
were of use. So a request has tokens at the latest

    max_wait_steps + CHECK_EVERY + P · (1 + k) steps

after its arrival or its last tokens, if k others are starved before it and its adapter is resident by then; otherwise
CHECK_EVERY + P · (1 + k) steps after its adapter is resident. P is the length of protection: PROTECTED_TOKENS steps and
those in which the longest sequence is computed in chunks. Time during which the limits of its own adapter or key hold a
request back does not count: within a throttled account the order is the policy's alone.
"""

from collections.abc import Callable, Iterator, Sequence

from lorasrv.outputs import RequestId
from lorasrv.request import Request
from lorasrv.scheduler.policies import Policy

CHECK_EVERY = 16
PROTECTED_TOKENS = 16


class RequestQueue:
    """Hold the live requests. Mutated by the engine thread only.

    Args:
        policy: order of the requests.
        max_wait_steps: steps without tokens after which a request is starved.
        may_run: whether limits would let a waiting request run now.
    """

    def __init__(self, policy: Policy, max_wait_steps: int, may_run: Callable[[Request], bool]) -> None:
        self.policy = policy
        self._may_run = may_run
        self._max_wait_steps = max_wait_steps
        self._running: list[Request] = []
        self._waiting: dict[RequestId, Request] = {}
        self.requests: dict[RequestId, Request] = {}
        self._preempted: dict[RequestId, Request] = {}
        self._starved: dict[RequestId, Request] = {}
        self._num_added = 0
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
    def checks_starvation_now(self) -> bool:
        """Return whether this step looks at all waiting requests."""
        return self.step % CHECK_EVERY == 0

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
        request.last_share_step = self.step
        self.requests[request.request_id] = self._waiting[request.request_id] = request
        self.policy.add(request)

    def admit(self, request: Request) -> None:
        """Move a request from waiting to running."""
        self._unqueue(request)
        self._running.append(request)
        self.policy.on_admitted(request)

    def preempt(self, request: Request) -> None:
        """Move a request from running back to waiting."""
        self._running.remove(request)
        self.policy.on_left_batch(request)
        self._waiting[request.request_id] = self._preempted[request.request_id] = request
        self.policy.add(request)

    def finish(self, request: Request) -> None:
        """Remove a finished request."""
        del self.requests[request.request_id]
        self._starved.pop(request.request_id, None)
        if request.request_id in self._waiting:
            self._unqueue(request)
        else:
            self._running.remove(request)
            self.policy.on_left_batch(request)

    def begin_step(self) -> None:
        """Find the starved requests."""
        self.step += 1
        if not self.checks_starvation_now:
            return
        for request in (*self._running, *self._waiting.values()):
            if self.step - request.last_share_step < self._max_wait_steps or request.request_id in self._starved:
                continue
            if request.request_id in self._waiting and not self._may_run(request):
                self.mark_throttled(request)
                continue
            self._starved[request.request_id] = request
            self.num_starved_total += 1
        if len(self._starved) > 1:
            by_wait = sorted(self._starved.values(), key=lambda r: (r.last_share_step, r.number))
            self._starved = {request.request_id: request for request in by_wait}

    def order(self) -> Iterator[Request]:
        """Yield every request once, best first. The one yielded last may be admitted, finished or preempted before
        the next is taken."""
        first = [r for r in self._running if r.request_id not in self._starved and _is_protected(r)]
        first += self._starved.values()
        yield from first
        named = {request.request_id for request in first}
        for request in self.policy.in_order(self._running):
            if request.request_id not in named:
                yield request

    def running_in_order(self) -> Sequence[Request]:
        """Return the running requests, best first."""
        return self.policy.running(self._running)

    def mark_scheduled(self, request: Request) -> None:
        """Note that a request has tokens in this step. A starved one becomes the most senior: else it would be
        preempted at once."""
        request.last_share_step = self.step
        if self._starved.pop(request.request_id, None) is not None:
            request.protected_until_tokens = request.num_generated_tokens + PROTECTED_TOKENS
            self._running.remove(request)
            self._running.insert(0, request)
            self.policy.on_starved(request)

    def mark_throttled(self, request: Request) -> None:
        """Note that a request could not run because of its own limits, which is no starvation."""
        request.last_share_step = self.step
        request.protected_until_tokens = 0
        self._starved.pop(request.request_id, None)
        self.policy.on_throttled(request)

    def select_victim(self) -> Request | None:
        """Return the request to preempt so that running ones can grow; None if all of them are in steps in flight."""
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
        assert {r.request_id for r in self.policy.waiting()} <= self._waiting.keys(), (
            "the policy knows one that is gone"
        )
        assert not {r.request_id for r in self._running} & self._waiting.keys(), "a request runs and waits"
        live = {r.request_id for r in self._running} | self._waiting.keys()
        assert self.requests.keys() == live, "a request is lost"
        assert self._starved.keys() <= live, "a request that is gone is starved"

    def _unprotected(self) -> Iterator[Request]:
        return (r for r in self._running if _is_preemptible(r) and not _is_protected(r))

    def _unqueue(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._preempted.pop(request.request_id, None)
        self.policy.remove(request)


def _is_preemptible(request: Request) -> bool:
    """Return whether no step in flight writes to the request's pages."""
    return not request.num_in_flight_tokens


def _is_protected(request: Request) -> bool:
    return request.num_generated_tokens < request.protected_until_tokens
