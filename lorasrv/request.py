"""A request's life as plain data: what is asked, where it stands, what comes out. No torch, no text, no HTTP.

Ids that never mix: a *reference* is what a client writes (`mia`, `mia@3`), an `AdapterKey` names one immutable content,
a position in the pool is the adapter cache's own business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import NewType

from adapter_store.spec import AdapterKey
from lorasrv.beam_options import BeamOptions
from lorasrv.constraint import ConstraintState, TokenConstraint
from lorasrv.sampling import SamplingParams
from sgmv_kernels.layout import AdapterLayout

RequestId = NewType("RequestId", str)

MAX_CHOICES = 8


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token, before any penalty, filter or temperature, and what it found likelier.

    `logprob` natural, of the softmax of the raw logits; `top` the likeliest tokens, likeliest first, the smaller id
    first of equals. A token that is in `top` has the very same float there.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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
    """Why a request was not served, where whoever asked can do something about it."""

    COLD = "cold"
    LIMIT = "limit"
    TIMEOUT = "timeout"
    LATE = "late"
    UNFIT = "unfit"
    CORRUPT = "corrupt"
    STEP = "step"
    MEMORY = "memory"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: its tokens and how far they are computed. Owned by the `Scheduler`, nobody else writes it.

    `num_computed_tokens` chases `len(token_ids)`: there is no prefill and no decode phase. `num_swapped_pages` pages of
    what is computed lie in host memory. `number` counts up in the order of arrival. `last_share_step` is the step in
    which it had tokens computed last, or arrived; until it has `protected_until_tokens` it gives way to nobody.
    `service` is `Mlfq`'s. `predicted_tokens` the answer was expected to have when it began, `planned_tokens` since it
    outgrew that. The first `num_charged_tokens` tokens are on its account. `prompt_logprobs`: those known so far, if
    they are asked for; they are not computed again after a preemption.
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
    constraint_state: ConstraintState | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)
        self.token_ids = list(self.message.prompt_token_ids)
        self.adapter_key = self.message.adapter_key
        constraint = self.message.constraint
        self.constraint_state = constraint.begin() if constraint is not None else None

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

    def prompt_rows(self, start: int, end: int) -> range:
        """Of positions `start .. end - 1`, those whose logits say how likely the prompt's next token is, and are asked
        for. What is known is not asked again."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        return range(max(start, len(self.prompt_logprobs) - 1), min(end, self.num_prompt_tokens - 1))

    @property
    def num_reusable_tokens(self) -> int:
        """How many of its first tokens need no logits: their keys and values may be another request's."""
        asked = self.prompt_rows(0, self.num_tokens)
        return asked.start if asked else self.num_tokens

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

    def output(
        self, new_token_ids: tuple[int, ...], now_s: float, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> "EngineOutput":
        """What the caller is told: these tokens, and the end if this is it."""
        asked = self.sampling.prompt_logprobs is not None
        says_prompt = asked and bool(new_token_ids) and self.num_generated_tokens == len(new_token_ids)
        return EngineOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids,
            finish_reason=self.finish_reason,
            timing=self._timing(now_s),
            stop_token_id=self.stop_token_id,
            error=self.error,
            refusal=self.refusal,
            retry_after_s=self.retry_after_s,
            logprobs=logprobs,
            prompt_logprobs=tuple(self.prompt_logprobs) if says_prompt else None,
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
    goes first. `timeout_s` from arrival to the last token. `constraint` says which tokens may come. Of the special
    tokens those of `shown_token_ids` are written as text. It may be one of `beams`.
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
    constraint: TokenConstraint | None = None
    shown_token_ids: frozenset[int] = frozenset()
    beams: BeamOptions | None = None


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
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a caller of `AsyncEngine.generate` or `LLM.generate` sees: text that is whole UTF-8, and counts so far.

    Exactly one output of a request has a `finish_reason`, and it is the last. `stop_reason` is the stop string or
    stop token id that ended it, None for an end-of-sequence token or another reason. `logprobs`, if asked for: one for
    each of `token_ids`; `prompt_logprobs`, in the first output only: one for each token of the prompt, None for its
    first, which nothing predicts. `text_offsets`, with `logprobs`: how many characters of the whole text are certain
    before each of `token_ids`, also those that are still held back.
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
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    text_offsets: tuple[int, ...] = ()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def followed_by(self, later: "RequestOutput") -> "RequestOutput":
        """This one and the next as one output."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs,
            text_offsets=self.text_offsets + later.text_offsets,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, as `LLM.generate` returns it; `logprobs` and `prompt_logprobs` as in `RequestOutput`."""

    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    num_prompt_tokens: int
    timing: RequestTiming
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
