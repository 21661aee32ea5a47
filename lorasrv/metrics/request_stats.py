"""Count requests and measure their latency per adapter, for operators and listeners. Torch-free; holds no text.

Owned by the event loop's thread; an output costs a microsecond. Rates are decaying sums: a token's weight falls to 1/e
in `FADE_S`, so no token has to be kept.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from adapter_store.spec import AdapterKey
from lorasrv.errors import name_of
from lorasrv.metrics.histogram import Histogram
from lorasrv.metrics.request_observer import RequestObserver
from lorasrv.outputs import CLIENT, AdapterTier, FinishReason, RequestId, RequestOutput, RequestTiming, refused
from lorasrv.request import Account, EngineCoreRequest


@dataclass(frozen=True, slots=True)
class FinishedRequestStats:
    """Describe one finished choice of one prompt."""

    request_id: str
    adapter_id: str
    adapter_key: AdapterKey | None
    principal: str
    reason: FinishReason
    # Cause of failure, such as `adapter_cold`; if it was aborted, even too late, `client` or the error's name; "" if
    # there is none.
    why: str
    # Monotonic arrival time; the request ended `total_s` later.
    arrived_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    # Steps that gave it tokens; draft tokens that these steps verified, and those that were right.
    steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    # Parts of the time to the first token.
    queue_s: float = 0.0
    load_s: float = 0.0
    # Seconds from arrival to the first token; None: there was no token.
    first_token_s: float | None = None
    tier: AdapterTier | None = None
    # Whether the base answered in place of the adapter.
    fell_back: bool = False
    # Whether the choice shares the pages of the first choice's prompt.
    is_further: bool = False
    # Account that is charged in the ledger.
    account: Account = ("", None)

    @property
    def is_answered(self) -> bool:
        """Return whether there is an answer, complete or partial. With `max_tokens: 0` the answer has no token."""
        return self.first_token_s is not None or self.reason is FinishReason.LENGTH

    @property
    def failed(self) -> bool:
        """Return whether its client got an error in place of the rest."""
        return self.why not in ("", CLIENT)

    @property
    def prefill_s(self) -> float:
        """Return the seconds from the first step to the first token; 0 without a token."""
        return max(0.0, self.first_token_s - self.queue_s - self.load_s) if self.first_token_s is not None else 0.0

    @property
    def decode_s(self) -> float:
        """Return the seconds from the first token to the end; 0 without a token."""
        return self.total_s - self.first_token_s if self.first_token_s is not None else 0.0


class RequestListener(Protocol):
    """Listen to the requests that are added in one context."""

    def on_request_accepted(self, request_id: str) -> None:
        """Note a request; its end will be told."""

    def on_request_finished(self, request: FinishedRequestStats) -> None:
        """Note the end of a request."""


Listener = Callable[[FinishedRequestStats], None]
REQUEST_LISTENER: ContextVar[RequestListener | None] = ContextVar("request_listener", default=None)
"""Listener to each request that is added in the current context."""
_LOG = logging.getLogger(__name__)
FADE_S = 10.0
MAX_ACCOUNTS = 8192


@dataclass(slots=True)
class RequestTotals:
    """Accumulate the requests that name one adapter id ("": the base), and the tokens of its answers."""

    # The content requested last.
    key: AdapterKey | None = None
    requests: int = 0
    tokens: int = 0
    _faded: float = 0.0
    _at_s: float = 0.0

    def add(self, tokens: int, now_s: float) -> None:
        """Count generated tokens."""
        self.tokens += tokens
        self._faded = self._faded * math.exp((self._at_s - now_s) / FADE_S) + tokens
        self._at_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        """Return the decaying average of tokens per second."""
        return self._faded * math.exp((self._at_s - now_s) / FADE_S) / FADE_S


_NOTHING = RequestOutput(RequestId(""), "", (), 0, 0, RequestTiming())


@dataclass(slots=True)
class _LiveRequest:
    account: RequestTotals
    adapter_id: str
    key: AdapterKey | None
    charged: Account
    principal: str
    prompt_tokens: int
    is_further: bool
    listener: RequestListener | None
    arrived_s: float
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    # Of these, tokens that another replica has generated and counted.
    resumed_tokens: int = 0
    latest: RequestOutput = field(default_factory=lambda: _NOTHING)


class RequestStats(RequestObserver):
    """Count every request. If there are too many ids, those not requested for longest are forgotten.

    Attributes:
        finished: count by finish reason, as clients are told it.
        rejected: count by error name (`name_of`).
        aborted: count by error name, or `client` for clients that disconnected.
        askers: adapter -> the account that requested it last.
        listeners: called with each finished request.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[RequestId, _LiveRequest] = {}
        self._accounts: dict[str, RequestTotals] = {}
        self.askers: dict[AdapterKey, Account] = {}
        self.listeners: list[Listener] = []
        self.finished: Counter[FinishReason] = Counter()
        self.rejected: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.total = RequestTotals()
        self.queue = Histogram()
        self.first_token = Histogram()
        self.inter_token = Histogram()
        self.request = Histogram()

    def on_accepted(self, requests: Sequence[EngineCoreRequest], arrived_s: float) -> None:
        """Open accounts for requests that arrived at `arrived_s`, on this object's clock, except those that a peer
        counts. The listener of the caller's context is told of them."""
        listener = REQUEST_LISTENER.get()
        for message in (request for request in requests if not request.is_for_peer):
            # Move the account to the end: those at the front have not been requested for longest.
            account = self._accounts.pop(message.adapter_id, None) or RequestTotals()
            self._accounts[message.adapter_id] = account
            account.key = message.adapter_key
            account.requests += 1
            self.total.requests += 1
            prompt = len(message.prompt_token_ids)
            self._open[message.request_id] = _LiveRequest(
                account,
                message.adapter_id,
                message.adapter_key,
                message.account,
                message.principal,
                prompt,
                message.fork_of is not None,
                listener,
                arrived_s,
                tokens=len(message.resumed_token_ids),
                resumed_tokens=len(message.resumed_token_ids),
            )
            if listener is not None:
                listener.on_request_accepted(message.request_id)
            if message.adapter_key is not None:
                self.askers.pop(message.adapter_key, None)
                self.askers[message.adapter_key] = message.account
        for table in (self._accounts, self.askers):
            while len(table) > MAX_ACCOUNTS:
                del table[next(iter(table))]  # type: ignore[arg-type]

    def on_refused(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self.rejected[name_of(type(error))] += 1
        else:
            self.aborted[CLIENT] += 1

    def on_output(self, request_id: RequestId, output: RequestOutput) -> None:
        request = self._open.get(request_id)
        if request is None:
            return
        now_s = self._clock()
        request.latest = output
        if (new := output.num_generated_tokens - request.tokens) > 0:
            request.tokens += new
            self._answering(request).add(new, now_s)
            self.total.add(new, now_s)
            if request.first_s is None:
                self._begun(request, now_s)
            else:
                self.inter_token.add((now_s - request.last_s) / new, new)
            request.last_s = now_s

    def on_finished(self, request_id: RequestId, why: str = "") -> None:
        request = self._open.pop(request_id, None)
        if request is None:
            return
        reason, why = request.latest.finish_reason or FinishReason.ABORT, _why(request.latest) or why
        now_s = self._clock()
        if request.first_s is not None and reason is not FinishReason.ABORT:
            self.request.add(now_s - request.arrived_s)
        # A beam that ended with another one has no reason of its own.
        if why and reason is FinishReason.ABORT:
            self.aborted[why] += 1
        if reason in (FinishReason.REFUSED, FinishReason.TIMEOUT):
            self.rejected[why] += 1
        self._over(request_id, request, reason, why, now_s)

    def of(self, adapter_id: str) -> RequestTotals:
        """Return an id's account; an empty one for an id without requests."""
        return self._accounts.get(adapter_id) or RequestTotals()

    def forget(self, adapter_id: str) -> None:
        """Drop the account of a deleted id, so that a new adapter with that name starts from zero."""
        self._accounts.pop(adapter_id, None)

    def hottest(self, most: int) -> list[tuple[str, RequestTotals]]:
        """Return up to `most` ids by tokens per second, including the base (""); ids without requests are left out."""
        now_s = self._clock()
        ranked = sorted(self._accounts.items(), key=lambda item: -item[1].tokens_per_s(now_s))
        return ranked[:most]

    def rate(self, account: RequestTotals) -> float:
        """Return an account's tokens per second now."""
        return account.tokens_per_s(self._clock())

    def open(self) -> Iterator[tuple[str, bool]]:
        """Yield (adapter id, has a token) for each unfinished request."""
        for request in self._open.values():
            yield request.adapter_id, request.first_s is not None

    def _answering(self, request: _LiveRequest) -> RequestTotals:
        """Return the account whose model answers a request: the base's, if the base answers in place of the adapter."""
        return self._accounts.setdefault("", RequestTotals()) if request.latest.timing.fell_back else request.account

    def _begun(self, request: _LiveRequest, now_s: float) -> None:
        request.first_s = now_s
        self.queue.add(request.latest.timing.queue_ms / 1e3)
        self.first_token.add(now_s - request.arrived_s)

    def _over(self, request_id: RequestId, request: _LiveRequest, reason: FinishReason, why: str, now_s: float) -> None:
        self.finished[reason] += 1
        latest, timing, arrived_s = request.latest, request.latest.timing, request.arrived_s
        ended = FinishedRequestStats(
            request_id=request_id,
            adapter_id=request.adapter_id,
            adapter_key=request.key,
            account=request.charged,
            principal=request.principal,
            reason=reason,
            why=why,
            arrived_s=arrived_s,
            total_s=now_s - arrived_s,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=timing.num_cached_tokens,
            generated_tokens=request.tokens - request.resumed_tokens,
            steps=latest.num_steps,
            draft_tokens=latest.num_draft_tokens,
            accepted_draft_tokens=latest.num_accepted_tokens,
            queue_s=timing.queue_ms / 1e3,
            load_s=timing.load_ms / 1e3,
            first_token_s=None if request.first_s is None else request.first_s - arrived_s,
            tier=timing.tier,
            fell_back=timing.fell_back,
            is_further=request.is_further,
        )
        own = [] if request.listener is None else [request.listener.on_request_finished]
        for listener in (*self.listeners, *own):
            _tell(listener, ended)


def _tell(listener: Listener, ended: FinishedRequestStats) -> None:
    try:
        listener(ended)
    except Exception:
        # A failing listener must not cost a client its answer.
        _LOG.exception("counting request %s failed", ended.request_id)


def _why(output: RequestOutput) -> str:
    """Return the cause of failure as a label; "" if there is none."""
    if (error := refused(output)) is not None:
        return name_of(type(error))
    if output.error is not None:
        return "generation_failed" if output.num_generated_tokens else "adapter_load_failed"
    return ""
