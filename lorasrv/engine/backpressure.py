"""Backpressure: how many requests and prompt tokens may queue, and when to retry if there is no room.

For the event loop's thread; no torch. After each step the engine publishes how many requests wait and run. Requests
sent since then, and prompts that are not computed yet, are counted here.
"""

import math
import time
from collections.abc import Callable, Sequence

from adapter_store.quota import ANONYMOUS
from lorasrv.config import SchedulerOptions
from lorasrv.errors import EngineOverloaded
from lorasrv.metrics.engine_stats import EngineStats
from lorasrv.metrics.request_observer import RequestObserver
from lorasrv.outputs import RequestId, RequestOutput
from lorasrv.request import EngineCoreRequest

FADE_S = 10.0
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
MAX_KEYS = 256
"""Most API keys whose retry times are remembered: those refused last."""


def num_queued(num_sent: int, num_waiting: int, num_running: int, request_slots: int) -> int:
    """Return the number of requests that do not run: the waiting ones, and those sent to the engine that exceed its
    free slots."""
    free = 0 if num_waiting else max(0, request_slots - num_running)
    return num_waiting + max(0, num_sent - free)


class ThroughputEstimate:
    """Estimate how fast a queue drains, measured only while it is not empty.

    It is the quotient of two decaying sums: the drained amount and the time that this took. The quotient is right from
    the first amount on, and an idle hour does not change it.
    """

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def advance(self, seconds: float) -> None:
        """Note that the queue was not empty for `seconds`."""
        fade = math.exp(-seconds / FADE_S)
        self._amount *= fade
        self._seconds = self._seconds * fade + FADE_S * (1.0 - fade)

    def add(self, amount: float) -> None:
        """Note that `amount` has drained."""
        self._amount += amount

    def seconds_for(self, amount: float) -> float | None:
        """Return how long `amount` takes to drain; None before the first measurement."""
        if not self._amount or not self._seconds:
            return None
        return amount * self._seconds / self._amount


class QueueLimiter(RequestObserver):
    """Bound the requests of one engine that have no token yet.

    Args:
        options: how many requests may wait for their first step, how many prompt tokens may wait to be computed, and
            how many requests run at a time.
        engine: returns the engine's newest statistics.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        engine: Callable[[], EngineStats],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests, self._max_tokens = options.max_num_queued_seqs, options.max_num_queued_tokens
        self._request_slots = options.max_num_seqs
        self._engine = engine
        self._clock = clock
        self._tokens: dict[RequestId, int] = {}
        self._num_tokens = 0
        self._num_sent = 0
        self._requests_drained, self._tokens_drained = ThroughputEstimate(), ThroughputEstimate()
        self._since_s = clock()
        self._retry_at_s: dict[str, float] = {}

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt tokens that are not computed yet; choices of one prompt count it once."""
        return self._num_tokens

    def num_queued(self, num_more: int = 0) -> int:
        """Return the number of requests that do not run yet, with `num_more` added."""
        engine = self._engine()
        sent = self._num_sent - engine.requests_arrived_total + num_more
        waiting = engine.requests_waiting + engine.requests_waiting_for_adapter
        return num_queued(sent, waiting, engine.requests_running, self._request_slots)

    def check(self, num_requests: int = 1, num_tokens: int = 1, principal: str = ANONYMOUS) -> None:
        """Check that more requests may queue. An empty queue accepts any number.

        Raises:
            EngineOverloaded: the queue is full; says when a place should be free.
        """
        queued = self.num_queued()
        if queued and self.num_queued(num_requests) > self._max_requests:
            why = f"{queued} requests are queued already; --max-num-queued-seqs is {self._max_requests}"
        elif self._num_tokens and self._num_tokens + num_tokens > self._max_tokens:
            why = (
                f"prompts of {self._num_tokens} tokens are queued already; "
                f"--max-num-queued-tokens is {self._max_tokens}"
            )
        else:
            return
        raise EngineOverloaded(why, retry_after_s=self._retry_after_s(num_requests, num_tokens, principal))

    def on_accepted(self, requests: Sequence[EngineCoreRequest], arrived_s: float) -> None:
        self._advance_clock()
        self._num_sent += len(requests)
        for request in requests:
            tokens = 0 if request.fork_of is not None else len(request.prompt_token_ids)
            self._tokens[request.request_id] = tokens
            self._num_tokens += tokens

    def on_output(self, request_id: RequestId, output: RequestOutput) -> None:
        self._remove(request_id)

    def on_finished(self, request_id: RequestId, why: str = "") -> None:
        self._remove(request_id)

    def _remove(self, request_id: RequestId) -> None:
        tokens = self._tokens.get(request_id)
        if tokens is None:
            return
        self._advance_clock()
        del self._tokens[request_id]
        self._num_tokens -= tokens
        self._requests_drained.add(1)
        self._tokens_drained.add(tokens)

    def _retry_after_s(self, num_requests: int, num_tokens: int, principal: str) -> float:
        """Return the seconds until these requests should have room, after the earlier refused requests of the same
        key: with equal times they would all return at once. Keys with refused requests share the throughput."""
        self._advance_clock()
        requests_s = self._requests_drained.seconds_for(num_requests)
        tokens_s = self._tokens_drained.seconds_for(num_tokens)
        if requests_s is None:
            return MIN_RETRY_S
        now = self._clock()
        retry_at = {name: until for name, until in self._retry_at_s.items() if until > now}
        begin = retry_at.pop(principal, now)
        while len(retry_at) >= MAX_KEYS:
            del retry_at[next(iter(retry_at))]
        needed_s = (len(retry_at) + 1) * max(requests_s, tokens_s or 0.0)
        retry_at[principal] = until = min(begin + needed_s, now + MAX_RETRY_S)
        self._retry_at_s = retry_at
        return max(MIN_RETRY_S, until - now)

    def _advance_clock(self) -> None:
        now = self._clock()
        if self._tokens:
            for rate in (self._requests_drained, self._tokens_drained):
                rate.advance(now - self._since_s)
        self._since_s = now
