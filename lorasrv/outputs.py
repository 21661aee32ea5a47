"""Outputs: what the engine emits for a request, and how a refusal becomes an exception."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NewType, Protocol, TypeVar, dataclass_transform

from adapter_store.errors import AdapterCorrupt, AdapterError
from lorasrv.errors import (
    AdapterCold,
    AdapterLoadFailed,
    DeadlineUnreachable,
    InvalidRequest,
    LimitExceeded,
    LorasrvError,
    OutOfMemory,
    RequestTimeout,
    StepFailed,
)
from lorasrv.kv_policy import KvPolicy

RequestId = NewType("RequestId", str)
CLIENT = "client"
"""Reason of a request that ended because its client left; other reasons are names of errors."""
T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a class a dataclass with slots, whose fields are read-only for the type checker only.

    For objects that every step creates for every request: creating a frozen dataclass of 20 fields takes five times as
    long.
    """
    return dataclass(slots=True)(cls)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Hold a token's log-probability and the likeliest tokens, before any penalty, filter or temperature."""

    token_id: int
    # Natural logarithm of the softmax of the raw logits.
    logprob: float
    # (token id, log-probability), likeliest first, the smaller id first among equals. If the token is among them, it
    # has the same float there.
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(StrEnum):
    """Name why a request ended, in the words of the API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REFUSED = "refused"
    TIMEOUT = "timeout"


class AdapterTier(StrEnum):
    """Name where an adapter was found when its request was admitted."""

    RESIDENT = "resident"
    HOST = "host"
    DISK = "disk"


def slowest(tiers: Iterable[AdapterTier]) -> AdapterTier:
    """Return the slowest tier among those of adapters that are needed together."""
    order = list(AdapterTier)
    return max(tiers, key=order.index, default=AdapterTier.RESIDENT)


class Refusal(StrEnum):
    """Name why a request was refused, if the client can react to the reason."""

    COLD = "cold"
    LIMIT = "limit"
    TIMEOUT = "timeout"
    LATE = "late"
    UNFIT = "unfit"
    CORRUPT = "corrupt"
    STEP = "step"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class KvUsage:
    """Describe the effect of a policy on a request's keys and values."""

    policy: KvPolicy
    # Tokens whose keys and values are held, and those that were dropped.
    kept_tokens: int
    dropped_tokens: int
    # Number of first tokens of the answer that equal those of full attention.
    exact_tokens: int


@dataclass(frozen=True, slots=True)
class PageLease:
    """Describe pages that stay unchanged until a given time, for a peer to read."""

    lease_id: str
    # Empty: there is no lease.
    pages: tuple[int, ...]
    # On the engine's clock.
    until_s: float


@record
class RequestTiming:
    """Hold how the time before the first token was spent, and other values that most tokens do not change."""

    queue_ms: float = 0.0
    load_ms: float = 0.0
    # Tier in which the adapter was found.
    tier: AdapterTier | None = None
    num_preemptions: int = 0
    # Prompt tokens that were in the prefix cache.
    num_cached_tokens: int = 0
    # Number of these that came from a peer, and whether a peer was named.
    num_peer_tokens: int = 0
    has_peer: bool = False
    # Whether the base model answered in place of the adapter, as the request allows.
    fell_back: bool = False
    # How draft tokens were accepted, if the server has several ways.
    accept: str | None = None
    # Why the answer was not drafted although the request asked for drafts.
    not_drafted: str | None = None
    # None without a policy.
    kv: KvUsage | None = None


@record
class EngineOutput:
    """Carry one request's output of an engine step: new token ids, and the end if it has finished."""

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
    # Steps so far that gave it tokens; draft tokens that these steps verified, and those that were right.
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@record
class RequestOutput:
    """Carry an output for a caller of `AsyncEngine.generate` or `LLM.generate`: whole UTF-8 text, and counts so far.

    Exactly one output of a request has a `finish_reason`, and it is the last.
    """

    request_id: RequestId
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_generated_tokens: int
    timing: RequestTiming
    finish_reason: FinishReason | None = None
    # Stop string or stop token id that ended it; None for an end-of-sequence token or another reason.
    stop_reason: str | int | None = None
    error: str | None = None
    refusal: Refusal | None = None
    retry_after_s: float | None = None
    # One for each of `token_ids`, if asked for.
    logprobs: tuple[TokenLogprobs, ...] = ()
    # In the first output only: one for each prompt token, None for the first one.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    # With `logprobs`: for each of `token_ids`, how many characters of the whole text are certain before it, including
    # those held back.
    text_offsets: tuple[int, ...] = ()
    # With `logprobs`: the text that became certain with each of `token_ids`; joined, they are `text`.
    token_texts: tuple[str, ...] = ()
    # As in `EngineOutput`.
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Return whether this is the last output."""
        return self.finish_reason is not None

    def followed_by(self, later: "RequestOutput") -> "RequestOutput":
        """Return this output and the next as one."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs,
            text_offsets=self.text_offsets + later.text_offsets,
            token_texts=self.token_texts + later.token_texts,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """Hold a whole answer, as `LLM.generate` returns it; `logprobs` and `prompt_logprobs` as in `RequestOutput`."""

    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    num_prompt_tokens: int
    timing: RequestTiming
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


def refused(output: RequestOutput) -> LorasrvError | AdapterError | None:
    """Return why a request was refused, as an exception; None if it was not."""
    if output.refusal is None:
        return None
    return _exception(output.refusal, output.error or "refused", output.retry_after_s or 1.0)


def not_loaded(why: str, refusal: Refusal | None) -> LorasrvError | AdapterError:
    """Return why an adapter could not be loaded, as an exception."""
    return AdapterLoadFailed(why) if refusal is None else _exception(refusal, why, 1.0)


def _exception(refusal: Refusal, why: str, retry_after_s: float) -> LorasrvError | AdapterError:
    match refusal:
        case Refusal.COLD:
            return AdapterCold(why, retry_after_s=retry_after_s)
        case Refusal.LIMIT:
            return LimitExceeded(why, retry_after_s=retry_after_s)
        case Refusal.LATE:
            return DeadlineUnreachable(why, retry_after_s=retry_after_s)
        case Refusal.UNFIT:
            return InvalidRequest(why)
        case Refusal.TIMEOUT:
            return RequestTimeout(why)
        case Refusal.CORRUPT:
            return AdapterCorrupt(why)
        case Refusal.STEP:
            return StepFailed(why)
        case Refusal.MEMORY:
            return OutOfMemory(why)


class OutputStream(Protocol):
    """Iterate over the outputs of one choice; the last one is finished."""

    async def __anext__(self) -> RequestOutput: ...

    def pass_to(self, take: Callable[[RequestOutput], bool]) -> None:
        """Offer each output to `take` while the reader waits for one.

        Outputs for which it returns False, the last output and errors go to the reader. If it raises, the request is
        aborted and the reader gets that error.
        """

    async def aclose(self, why: str = CLIENT) -> None:
        """Abort the request if it has not finished; `why` names the reason, an error's name or `CLIENT`."""
