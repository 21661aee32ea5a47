"""Deadlines of requests, and early abort of those that are predicted to miss theirs.

`timeout_s` counts from arrival to the last token, the server's queue timeout from arrival to the first step. With early
abort, a request that is predicted to miss one of them is refused before any work is spent on it (after S-LoRA's abort
strategy). On arrival the prediction includes the work ahead of the request; later only the request's own work.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from lorasrv.config import SchedulerOptions
from lorasrv.memory.cost_model import CostModel, StepShape
from lorasrv.request import Request, RequestStatus
from lorasrv.scheduler.length_predictor import MEDIAN, LengthPredictor

MIN_SWEEP = 256
MAX_JUDGED = 32
"""Most waiting requests for which a step predicts whether they will miss their deadlines."""


class Deadlines:
    """Track the deadlines of live requests. Mutated by the engine thread only.

    Args:
        options: the longest wait for the first step, and whether requests are aborted early.
    """

    def __init__(
        self, options: SchedulerOptions, costs: CostModel, predictor: LengthPredictor, clock: Callable[[], float]
    ) -> None:
        self._queue_timeout_s, self._early_abort = options.queue_timeout_s, options.early_abort
        self._costs = costs
        self._predictor = predictor
        self._clock = clock
        self._heap: list[tuple[float, int, int, Request]] = []
        self._next_sweep = MIN_SWEEP
        self._to_judge: deque[Request] = deque()

    def watch(self, request: Request) -> None:
        """Track the deadlines of a new request."""
        if self._early_abort:
            self._to_judge.append(request)
        for kind, deadline in enumerate((self._begin_by(request), self._end_by(request))):
            if deadline is not None:
                heapq.heappush(self._heap, (deadline, request.number, kind, request))
        if len(self._heap) > self._next_sweep:
            # Otherwise a request that finishes long before its deadline would be kept until the deadline.
            self._heap = [entry for entry in self._heap if not self._is_past(entry[-1])]
            heapq.heapify(self._heap)
            self._next_sweep = max(MIN_SWEEP, 2 * len(self._heap))

    def next_s(self) -> float | None:
        """Return the time of the next deadline; None if there is none."""
        self._drop_ended()
        return self._heap[0][0] if self._heap else None

    def take_missed(self) -> Iterator[tuple[Request, str]]:
        """Yield (request, reason) of every request whose deadline has passed."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            *_, request = heapq.heappop(self._heap)
            why = self._why_missed(request, now)
            if why is not None and not request.status.is_finished:
                yield request, why

    def take_hopeless(self) -> Iterator[tuple[Request, str, float]]:
        """Yield (request, reason, seconds too late) of some of the waiting requests that will miss a deadline."""
        for _ in range(min(MAX_JUDGED, len(self._to_judge))):
            request = self._to_judge.popleft()
            if request.status.is_finished or request.num_generated_tokens:
                continue
            self._to_judge.append(request)
            if request.status is not RequestStatus.RUNNING and (late := self.why_hopeless(request)):
                yield request, *late

    def why_hopeless(self, request: Request, ahead_s: float = 0.0) -> tuple[str, float] | None:
        """Predict whether a waiting request will miss a deadline.

        Args:
            ahead_s: seconds of other requests' work before its own.
        Returns:
            (reason, seconds by which it would be late); None if it may be in time.
        """
        begin_by, end_by = self._begin_by(request), self._end_by(request)
        if (begin_by is None and end_by is None) or not self._costs.step.is_learned or not self._predictor.is_learned:
            return None  # never refuse on a guess: a server that admits nothing would never learn
        begin_s = self._clock() + ahead_s + self._first_token_s(request)
        if end_by is not None:
            end_s = begin_s + self._predictor.remaining(request, MEDIAN) * self._each_token_s(request)
            if end_s > end_by:
                return f"predicted to take {end_s - request.arrival_s:.1f} s, its timeout_s is " + (
                    f"{request.message.timeout_s:g}"
                ), end_s - end_by
        if begin_by is not None and begin_s > begin_by and request.scheduled_s is None:
            return f"predicted to wait {begin_s - request.arrival_s:.1f} s, the server's queue timeout is " + (
                f"{self._queue_timeout_s:g} s"
            ), begin_s - begin_by
        return None

    def ahead_s(self, running: Sequence[Request], num_waiting: int, request_slots: int) -> float:
        """Estimate the seconds until a request slot is free behind `num_waiting` others."""
        if len(running) + num_waiting < request_slots or not running:
            return 0.0
        return (1 + num_waiting) / request_slots * self.answer_s(running)

    def answer_s(self, running: Sequence[Request]) -> float:
        """Estimate the seconds until the running requests finish, on average."""
        if not running:
            return 0.0
        left = sum(self._predictor.remaining(request, MEDIAN) for request in running) / len(running)
        return left * self._each_token_s(*running)

    def _first_token_s(self, request: Request) -> float:
        """Estimate the seconds of the request's own work before its first token."""
        return (request.num_tokens - request.num_computed_tokens) * self._costs.step.token_s

    def _each_token_s(self, *requests: Request) -> float:
        """Predict the seconds of a step of these requests."""
        layouts = {term.key: term.layout for request in requests for term in request.terms}
        adapter_bytes = sum(layout.nbytes for layout in layouts.values())
        pairs = sum(r.num_tokens for r in requests)
        return self._costs.step.seconds(StepShape(len(requests), len(requests), adapter_bytes, pairs))

    def _begin_by(self, request: Request) -> float | None:
        return None if self._queue_timeout_s is None else request.arrival_s + self._queue_timeout_s

    def _end_by(self, request: Request) -> float | None:
        timeout_s = request.message.timeout_s
        return None if timeout_s is None else request.arrival_s + timeout_s

    def _why_missed(self, request: Request, now: float) -> str | None:
        end_by, begin_by = self._end_by(request), self._begin_by(request)
        if end_by is not None and end_by <= now:
            return f"not done within its timeout_s of {request.message.timeout_s:g}"
        if begin_by is not None and begin_by <= now and request.scheduled_s is None:
            return f"waited longer than the server's queue timeout of {self._queue_timeout_s:g} s"
        return None

    def _drop_ended(self) -> None:
        while self._heap and self._is_past(self._heap[0][-1]):
            heapq.heappop(self._heap)

    def _is_past(self, request: Request) -> bool:
        return request.status.is_finished or (request.scheduled_s is not None and self._end_by(request) is None)
