"""How many may wait, in requests and in tokens of prompts, and when those should come back for whom there is no room.

For the event loop's thread; no torch. Who waits and who runs, the engine says after each step; what was sent to it
since then, and prompts that have not been computed yet, are counted here.

How fast something drains, measured only while there is something to drain. No torch.

Sums that fade, as in `traffic`: an amount, and the time in which it went, both count for less the longer ago they were.
Their quotient is right from the first amount on, and an idle hour changes nothing.
"""

import math
import time
from collections.abc import Callable, Sequence

from adapter_store.quota import ANONYMOUS
from lorasrv.config import SchedulerOptions
from lorasrv.errors import EngineOverloaded
from lorasrv.metrics.engine_stats import EngineStats
from lorasrv.outputs import RequestId
from lorasrv.request import EngineCoreRequest

FADE_S = 10.0


class ThroughputEstimate:
    """An amount a second. Whoever owns it says when time has passed."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def passed(self, seconds: float) -> None:
        """So long there was something to drain."""
        fade = math.exp(-seconds / FADE_S)
        self._amount *= fade
        self._seconds = self._seconds * fade + FADE_S * (1.0 - fade)

    def add(self, amount: float) -> None:
        """So much has gone."""
        self._amount += amount

    def seconds_for(self, amount: float) -> float | None:
        """How long so much will take; None: nothing was measured yet."""
        if not self._amount or not self._seconds:
            return None
        return amount * self._seconds / self._amount


MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
MAX_PROMISES = 256
"""Of so many keys it is known what they were told; of more, those that asked last."""


def num_queued(num_sent: int, num_waiting: int, num_running: int, seats: int) -> int:
    """Requests that do not run: those that wait, and those that were sent to the engine and find no free seat."""
    free = 0 if num_waiting else max(0, seats - num_running)
    return num_waiting + max(0, num_sent - free)


class QueueLimiter:
    """The requests of one engine that have no token yet.

    Args:
        options: how many requests may wait for their first step, how many tokens of prompts to be computed, and how
            many requests run at a time.
        engine: what the engine said last.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        engine: Callable[[], EngineStats],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests, self._max_tokens = options.max_num_queued_seqs, options.max_num_queued_tokens
        self._seats = options.max_num_seqs
        self._engine = engine
        self._clock = clock
        self._tokens: dict[RequestId, int] = {}
        self._num_tokens = 0
        self._num_sent = 0
        self._requests_drained, self._tokens_drained = ThroughputEstimate(), ThroughputEstimate()
        self._since_s = clock()
        self._promised_s: dict[str, float] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts that are not computed yet; what choices share counts once."""
        return self._num_tokens

    def num_queued(self, num_more: int = 0) -> int:
        """Requests that do not run yet, with so many more."""
        engine = self._engine()
        sent = self._num_sent - engine.requests_arrived_total + num_more
        waiting = engine.requests_waiting + engine.requests_waiting_for_adapter
        return num_queued(sent, waiting, engine.requests_running, self._seats)

    def check(self, num_requests: int = 1, num_tokens: int = 1, principal: str = ANONYMOUS) -> None:
        """Whether so many more may come in. Nobody is too many where nobody waits.

        Raises: EngineOverloaded: they may not; says when a place should be free.
        """
        queued = self.num_queued()
        if queued and self.num_queued(num_requests) > self._max_requests:
            why = f"{queued} requests are queued already, and {self._max_requests} may be"
        elif self._num_tokens and self._num_tokens + num_tokens > self._max_tokens:
            why = f"prompts of {self._num_tokens} tokens are queued already, and {self._max_tokens} may be"
        else:
            return
        raise EngineOverloaded(why, retry_after_s=self._retry_after_s(num_requests, num_tokens, principal))

    def enter(self, messages: Sequence[EngineCoreRequest]) -> None:
        """These are on their way to the engine."""
        self._time_passes()
        self._num_sent += len(messages)
        for message in messages:
            tokens = 0 if message.fork_of is not None else len(message.prompt_token_ids)
            self._tokens[message.request_id] = tokens
            self._num_tokens += tokens

    def leave(self, request_id: RequestId) -> None:
        """A request has its first token, or has ended; nothing happens if it had left before."""
        tokens = self._tokens.get(request_id)
        if tokens is None:
            return
        self._time_passes()
        del self._tokens[request_id]
        self._num_tokens -= tokens
        self._requests_drained.add(1)
        self._tokens_drained.add(tokens)

    def _retry_after_s(self, num_requests: int, num_tokens: int, principal: str) -> float:
        """When as much as these need will have drained, behind all those of the key that were sent away before: told
        the same, they would come back at once, to be sent away once more. Keys that were sent away share what drains.
        """
        self._time_passes()
        requests_s = self._requests_drained.seconds_for(num_requests)
        tokens_s = self._tokens_drained.seconds_for(num_tokens)
        if requests_s is None:
            return MIN_RETRY_S
        now = self._clock()
        promised = {name: until for name, until in self._promised_s.items() if until > now}
        begin = promised.pop(principal, now)
        while len(promised) >= MAX_PROMISES:
            del promised[next(iter(promised))]
        needed_s = (len(promised) + 1) * max(requests_s, tokens_s or 0.0)
        promised[principal] = until = min(begin + needed_s, now + MAX_RETRY_S)
        self._promised_s = promised
        return max(MIN_RETRY_S, until - now)

    def _time_passes(self) -> None:
        now = self._clock()
        if self._tokens:
            for rate in (self._requests_drained, self._tokens_drained):
                rate.passed(now - self._since_s)
        self._since_s = now
