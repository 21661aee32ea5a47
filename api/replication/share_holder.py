"""Keep an engine within its shares of adapters' limits; a server's side of `shares.py`."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from adapter_store.errors import OriginUnreachable
from api.replication.headers import RENEW_S
from api.replication.shares import GRACE_S, MAX_SHARES, SHARED_LIMITS, ShareAnswers, ShareReport
from lorasrv.config import NO_SHARE, WHOLE, LimitShare
from lorasrv.engine.in_flight_requests import InFlightRequests
from lorasrv.errors import EngineDead

_LOG = logging.getLogger(__name__)
TELL_AGAIN_S = 0.2
"""Time after which an engine that uses more than its share is told the share again."""


@dataclass(slots=True)
class _Holding:
    """Hold the share of one adapter."""

    # Upper bound of what the engine may be using.
    held: LimitShare = NO_SHARE
    # The share that the engine was told last, and how many times it was told one.
    told: LimitShare = NO_SHARE
    num_told: int = 0
    # Whether shares have ended and the engine has not yet reported what still runs.
    is_ending: bool = False
    # Number of the last question that may have reported more than the engine now uses: its answer is ignored here.
    barred: int = 0
    # Requests that will reach the engine soon.
    pending: int = 0
    # Most requests at a time in this period of `RENEW_S` and the previous one.
    peak: int = 0
    peak_before: int = 0
    turned_s: float = -math.inf
    # Requests that the last question reported.
    asked_for: int = 0


class SharingEngine(Protocol):
    """Declare what a share holder needs of an engine; `AsyncEngine` implements it."""

    in_flight: InFlightRequests

    async def set_share(self, adapter_id: str, share: LimitShare) -> LimitShare: ...


class ShareHolder:
    """Tell an engine which share of adapters' limits it may use. For the event loop's thread.

    Until `begin`, the engine may use the whole limits, as on a server that has no followers and follows no other.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, engine: SharingEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._ask: Callable[[], Awaitable[object]] | None = None
        self._ask_soon: Callable[[], object] = lambda: None
        self._holdings: dict[str, _Holding] = {}
        # Holdings that have a share or need one.
        self._active: dict[str, _Holding] = {}
        self._until_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._asked = 0
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def is_on(self) -> bool:
        """Return whether limits are shared with other servers."""
        return self._ask is not None

    async def begin(self, ask: Callable[[], Awaitable[object]], ask_soon: Callable[[], object]) -> None:
        """Share limits from now on: without a share, no request of a limited adapter begins.

        Args:
            ask: sends `question` to the registry and passes the answer to `on_answer`; returns when this is done or has
                failed.
            ask_soon: triggers the same without waiting.
        """
        self._ask, self._ask_soon = ask, ask_soon
        self._active = dict(self._holdings)
        for holding in self._holdings.values():
            holding.held = WHOLE
        await asyncio.gather(*(self._tell(adapter_id, NO_SHARE) for adapter_id in self._active))

    async def set_limited(self, adapter_id: str, limits: Collection[str]) -> None:
        """Note which limits an adapter has; the engine is told before anything is awaited."""
        is_limited = not SHARED_LIMITS.isdisjoint(limits)
        if is_limited == (adapter_id in self._holdings):
            return
        if is_limited:
            self._holdings[adapter_id] = _Holding(held=WHOLE)
        else:
            del self._holdings[adapter_id]
            self._active.pop(adapter_id, None)
        if not self.is_on:
            return
        if is_limited:
            self._active[adapter_id] = self._holdings[adapter_id]
        await self._tell(adapter_id, NO_SHARE if is_limited else WHOLE)
        if adapter_id in self._engine.in_flight.by_adapter:
            self._ask_soon()

    async def prepare(self, adapter_id: str, answers: int) -> None:
        """Ask for a larger share, if needed, before an adapter's request goes to the engine.

        Whatever the answer, the request may then go to the engine, where it waits in the queue.
        """
        holding = self._holdings.get(adapter_id)
        if holding is None or self._ask is None:
            return
        self._active[adapter_id] = holding
        holding.pending += answers
        try:
            wanted = self._note_wanted(adapter_id, holding)
            has_too_few = holding.told.max_running is not None and wanted > holding.told.max_running
            # If more was already asked for and not granted, asking again with each request does not help.
            if has_too_few and holding.asked_for <= (holding.told.max_running or 0):
                if holding.told.is_nothing:
                    await self._ask()
                else:
                    self._ask_soon()
        finally:
            holding.pending -= answers

    def question(self) -> dict[str, Any]:
        """Return the question to send with the next lease renewal, as JSON."""
        self._asked += 1
        self._end_if_over()
        # Requests that `prepare` did not announce count as well.
        live = self._engine.in_flight.by_adapter
        self._active |= {name: self._holdings[name] for name in live if name in self._holdings}
        reports = []
        for adapter_id, holding in list(self._active.items()):
            wanted = self._note_wanted(adapter_id, holding)
            holding.asked_for = wanted
            if holding.is_ending:
                holding.barred = self._asked
            if not wanted and holding.held == holding.told == NO_SHARE:
                del self._active[adapter_id]
                continue
            together = max(self._engine.in_flight.by_adapter.get(adapter_id, (1,)))
            reports.append(
                ShareReport(adapter_id, holding.held.max_running, holding.held.tokens_per_s, wanted, together)
            )
        if len(reports) > MAX_SHARES:
            reports.sort(key=lambda report: (report.max_running == 0, not report.wanted))
        return {"number": self._asked, "shares": reports[:MAX_SHARES]}

    def on_answer(self, answer: Any, until_s: float) -> None:
        """Apply the shares that the registry grants.

        Args:
            until_s: time at which the lease ends, by this server's clock.

        Raises:
            ValueError: the answer is malformed.
        """
        answers = ShareAnswers.model_validate(answer)
        if answers.number != self._asked:
            return
        self._until_s = until_s - GRACE_S
        if self._timer is not None:
            self._timer.cancel()
        if math.isfinite(until_s):
            self._timer = asyncio.get_running_loop().call_later(self._until_s - self._clock(), self._end_if_over)
        for adapter_id, max_running, tokens_per_s in answers.shares:
            holding, share = self._active.get(adapter_id), LimitShare(max_running, tokens_per_s)
            if holding is not None and answers.number > holding.barred and share != holding.told:
                self._start_telling(adapter_id, share)

    def _end_if_over(self) -> None:
        """End all shares if their time is over. When the lease ends, too, requests without an output are refused."""
        if self._clock() < self._until_s:
            return
        self._until_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(GRACE_S, self._refuse_unanswered)
        for adapter_id, holding in self._active.items():
            holding.is_ending, holding.barred = True, self._asked
            self._start_telling(adapter_id, NO_SHARE)

    def _refuse_unanswered(self) -> None:
        error = OriginUnreachable(
            "the registry, which says how much of the adapter's limits is this server's, is cut off"
        )
        for adapter_id in self._active:
            self._engine.in_flight.abort_unanswered(adapter_id, error)
        # Repeat it for requests that were on their way to the engine.
        self._timer = asyncio.get_running_loop().call_later(RENEW_S, self._refuse_unanswered)

    def _note_wanted(self, adapter_id: str, holding: _Holding) -> int:
        """Return the most requests that ran or waited at once, in this period and the previous one."""
        now_s = self._clock()
        counts = self._engine.in_flight.by_adapter.get(adapter_id)
        live = (sum(counts.values()) if counts else 0) + holding.pending
        if now_s - holding.turned_s >= RENEW_S:
            is_next = now_s - holding.turned_s < 2 * RENEW_S
            holding.peak_before, holding.peak = holding.peak if is_next else 0, 0
            holding.turned_s = now_s
        holding.peak = max(holding.peak, live)
        return max(holding.peak, holding.peak_before)

    def _start_telling(self, adapter_id: str, share: LimitShare) -> None:
        task = asyncio.create_task(self._tell(adapter_id, share))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _tell(self, adapter_id: str, share: LimitShare) -> Coroutine[Any, Any, None]:
        """Tell the engine a share. Until it confirms, this server holds the union of the old and the new share; then,
        what the engine still uses."""
        holding, number = self._holdings.get(adapter_id), 0
        if holding is not None:
            holding.held, holding.told = holding.held.union(share), share
            number = holding.num_told = holding.num_told + 1
        return self._told(adapter_id, share, holding, number)

    async def _told(self, adapter_id: str, share: LimitShare, holding: _Holding | None, number: int) -> None:
        if holding is not None and self._holdings.get(adapter_id) is not holding:
            return
        try:
            used = await self._engine.set_share(adapter_id, share)
        except EngineDead:
            return
        except Exception:
            _LOG.exception("the engine was not told its share of %r; telling it again", adapter_id)
            used = None
        if holding is None or holding.num_told != number:
            return
        if used is None:
            asyncio.get_running_loop().call_later(RENEW_S, self._tell_again, adapter_id, holding, number)
            return
        before, holding.held, holding.is_ending = holding.held, used, False
        if used != share:
            # Some running requests exceed the share: ask again until they have ended.
            asyncio.get_running_loop().call_later(TELL_AGAIN_S, self._tell_again, adapter_id, holding, number)
        elif _is_less(used.max_running, before.max_running):
            # Report it at once, so that other servers may get what this one gave up.
            self._ask_soon()

    def _tell_again(self, adapter_id: str, holding: _Holding, number: int) -> None:
        if holding.num_told == number and self._holdings.get(adapter_id) is holding:
            self._start_telling(adapter_id, holding.told)


def _is_less(one: int | None, other: int | None) -> bool:
    return one is not None and (other is None or one < other)
