"""A request's life as plain data: what is asked, where it stands, what comes out. No torch, no text, no HTTP.

Ids that never mix: a *reference* is what a client writes (`mia`, `mia@3`), an `AdapterKey` names one immutable content,
a position in the pool is the adapter cache's own business.

Which tokens may come next, as the engine sees it: no grammar, no text, no torch.

A `TokenConstraint` is compiled before admission and shared by the choices of a request; each choice follows it with a
`ConstraintState` of its own, which only the engine's thread touches.
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from adapter_store.spec import AdapterKey
from lorasrv.outputs import AdapterTier, EngineOutput, FinishReason, Refusal, RequestId, RequestTiming, TokenLogprobs
from lorasrv.sampling_params import BeamOptions, SamplingParams
from sgmv_kernels.formats.adapter_panels import AdapterLayout


class ConstraintState(Protocol):
    """Where one answer stands. Nothing of it raises.

    `error`: why it cannot be followed any further; the request ends with it.
    """

    error: str | None

    @property
    def is_over(self) -> bool:
        """Nothing but the end may follow."""

    def advance(self, token_id: int) -> None:
        """This token came. It was allowed."""

    def copy(self) -> "ConstraintState":
        """Return a state of its own that stands at the same place, to look ahead with."""

    def allowed(self) -> npt.NDArray[np.int32]:
        """[ceil(V / 32)]: bit t % 32 of word t // 32 says whether token t may come next; at least one may.

        The same buffer every time: to be read before the next call.
        """


class TokenConstraint(Protocol):
    """A compiled grammar."""

    def begin(self) -> ConstraintState:
        """The state before the first token of an answer."""


MAX_CHOICES = 8


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


class OnCold(StrEnum):
    """What to do with a request whose adapter is not in the pool when it arrives."""

    WAIT = "wait"
    FALLBACK_BASE = "fallback_base"
    REJECT = "reject"


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

    message: "EngineCoreRequest"
    arrival_s: float = 0.0
    adapter_key: AdapterKey | None = None
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    # Tokens behind those, which steps compute that are submitted and not collected.
    num_in_flight_tokens: int = 0
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
    def num_scheduled_tokens(self) -> int:
        """Return how many tokens are computed, or will be when the steps that are under way are done."""
        return self.num_computed_tokens + self.num_in_flight_tokens

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

    def on_load_started(self, now_s: float) -> None:
        """Note when the request began to wait for its adapter."""
        if self.load_started_s is None:
            self.load_started_s = now_s

    def on_load_finished(self, now_s: float) -> None:
        """Note when its adapter was there."""
        if self.load_started_s is not None:
            self.load_s += now_s - self.load_started_s
            self.load_started_s = None

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
class EngineCoreRequest:
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
