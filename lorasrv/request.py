"""A request's life as plain data: what is asked, where it stands, what comes out. No torch, no text, no HTTP.

Ids that never mix: a *reference* is what a client writes (`mia`, `mia@3`), an `AdapterKey` names one immutable content,
a position in the pool is the adapter cache's own business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NewType

from adapter_store.spec import AdapterKey
from lorasrv.errors import InvalidRequest
from sgmv_kernels.layout import AdapterLayout

RequestId = NewType("RequestId", str)

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_CHOICES = 8


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1.0 are off.

    Raises:
        InvalidRequest: a value is out of range; `param` names the field.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check(self.max_tokens is None or 1 <= self.max_tokens < 2**31, "max_tokens", "must be a positive integer")
        _check(0.0 <= self.temperature <= 100.0, "temperature", "must be between 0 and 100")
        _check(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
        _check(0 <= self.top_k < 2**31, "top_k", "must be 0 (off) or a positive integer")
        _check(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        _check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "must fit in 64 bits")
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"must have at most {MAX_STOP_STRINGS} strings")
        for stop in self.stop:
            _check(stop != "", "stop", "must not contain an empty string")
            _check(len(stop.encode("utf-8", "replace")) <= MAX_STOP_BYTES, "stop", f"strings: {MAX_STOP_BYTES} bytes")

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the argmax: a temperature below 1e-5 is the same as none."""
        return self.temperature < 1e-5


def _check(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {rule}", param=param)


class RequestStatus(IntEnum):
    """Ordered so that "finished" is a comparison."""

    WAITING = 0
    WAITING_FOR_ADAPTER = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REFUSED = 8
    FINISHED_TIMEOUT = 9

    @property
    def is_finished(self) -> bool:
        """No token will follow."""
        return self >= RequestStatus.FINISHED_STOPPED


class FinishReason(StrEnum):
    """Why a request ended, in the words that clients read."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REFUSED = "refused"
    TIMEOUT = "timeout"


class AdapterTier(StrEnum):
    """Where an adapter was found when its request was admitted."""

    RESIDENT = "resident"
    HOST = "host"
    DISK = "disk"


class OnCold(StrEnum):
    """What to do with a request whose adapter is not in the pool when it arrives."""

    WAIT = "wait"
    FALLBACK_BASE = "fallback_base"
    REJECT = "reject"


class Refusal(StrEnum):
    """Why a request was not served, where the adapter or the engine did not fail."""

    COLD = "cold"
    LIMIT = "limit"
    TIMEOUT = "timeout"
    LATE = "late"
    UNFIT = "unfit"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: its tokens and how far they are computed. Owned by the `Scheduler`, nobody else writes it.

    `num_computed_tokens` chases `len(token_ids)`: there is no prefill and no decode phase. `num_swapped_pages` pages of
    what is computed lie in host memory. `number` counts up in the order of arrival. `last_share_step` is the step in
    which it had tokens computed last, or arrived; until it has `protected_until_tokens` it gives way to nobody.
    `service` is `Mlfq`'s. `predicted_tokens` the answer was expected to have when it began, `planned_tokens` since it
    outgrew that. The first `num_charged_tokens` tokens are on its account.
    """

    message: "AddRequest"
    arrival_s: float = 0.0
    adapter_key: AdapterKey | None = None
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_swapped_pages: int = 0
    num_preemptions: int = 0
    number: int = 0
    last_share_step: int = 0
    protected_until_tokens: int = 0
    service: float = 0.0
    predicted_tokens: int | None = None
    planned_tokens: int = 0
    num_charged_tokens: int = 0
    tier: AdapterTier | None = None
    fell_back: bool = False
    scheduled_s: float | None = None
    load_started_s: float | None = None
    load_s: float = 0.0
    stop_token_id: int | None = None
    error: str | None = None
    refusal: Refusal | None = None
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.message.prompt_token_ids)
        self.adapter_key = self.message.adapter_key

    @property
    def request_id(self) -> RequestId:
        return self.message.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.message.sampling

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens known so far."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.message.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while tokens may still follow."""
        return _FINISH_REASONS.get(self.status)

    def load_begins(self, now_s: float) -> None:
        """The request waits for its adapter from now on."""
        self.status = RequestStatus.WAITING_FOR_ADAPTER
        if self.load_started_s is None:
            self.load_started_s = now_s

    def load_ends(self, now_s: float) -> None:
        """Its adapter is there."""
        if self.load_started_s is not None:
            self.load_s += now_s - self.load_started_s
            self.load_started_s = None
            self.status = RequestStatus.WAITING

    def output(self, new_token_ids: tuple[int, ...], now_s: float) -> "EngineOutput":
        """What the caller is told: these tokens, and the end if this is it."""
        return EngineOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids,
            finish_reason=self.finish_reason,
            timing=self._timing(now_s),
            stop_token_id=self.stop_token_id,
            error=self.error,
            refusal=self.refusal,
            retry_after_s=self.retry_after_s,
        )

    def _timing(self, now_s: float) -> "RequestTiming":
        begun = self.scheduled_s if self.scheduled_s is not None else now_s
        return RequestTiming(
            queue_ms=max(0.0, begun - self.arrival_s - self.load_s) * 1e3,
            load_ms=self.load_s * 1e3,
            tier=self.tier,
            num_preemptions=self.num_preemptions,
            num_cached_tokens=self.num_cached_tokens,
            fell_back=self.fell_back,
        )


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REFUSED: FinishReason.REFUSED,
    RequestStatus.FINISHED_TIMEOUT: FinishReason.TIMEOUT,
}


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The message that brings a request to the engine: frozen, no tensors.

    `hold` keeps the adapter in the store until the request has ended and this message is forgotten. `found` is the
    tier in which the adapter was on arrival, before anything was begun for this request. `fork_of` is the first choice
    of the same prompt, whose pages this one shares. `cache_salt` keeps its prefix pages from those who have another.
    `adapter_id` is the name on whose account it runs, whatever version it means; "" is the base. A lower `priority`
    goes first. `timeout_s` from arrival to the last token.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    adapter_key: AdapterKey | None = None
    layout: AdapterLayout | None = None
    found: AdapterTier | None = None
    principal: str = "anonymous"
    on_cold: OnCold = OnCold.WAIT
    cache_salt: str = ""
    fork_of: RequestId | None = None
    adapter_id: str = ""
    priority: int = 0
    timeout_s: float | None = None
    hold: object = None


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Where the time before the first token went, where the adapter was found, and what was not computed again.

    `num_cached_tokens` of the prompt lay in the pool already. `fell_back`: the base answered, as the request allowed.
    """

    queue_ms: float = 0.0
    load_ms: float = 0.0
    tier: AdapterTier | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    fell_back: bool = False


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one engine step brought for one request: new token ids, and the end if this is it."""

    request_id: RequestId
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    timing: RequestTiming
    stop_token_id: int | None = None
    error: str | None = None
    refusal: Refusal | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a caller of `AsyncEngine.generate` or `LLM.generate` sees: text that is whole UTF-8, and counts so far.

    Exactly one output of a request has a `finish_reason`, and it is the last. `stop_reason` is the stop string or
    stop token id that ended it, None for an end-of-sequence token or another reason.
    """

    request_id: RequestId
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_generated_tokens: int
    timing: RequestTiming
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    refusal: Refusal | None = None
    retry_after_s: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, as `LLM.generate` returns it."""

    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    num_prompt_tokens: int
    timing: RequestTiming
