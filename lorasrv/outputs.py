"""What a request that was not served means to whoever asked: each `Refusal` as an exception."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NewType, Protocol

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

RequestId = NewType("RequestId", str)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token, before any penalty, filter or temperature, and what it found likelier.

    `logprob` natural, of the softmax of the raw logits; `top` the likeliest tokens, likeliest first, the smaller id
    first of equals. A token that is in `top` has the very same float there.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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


def refused(output: RequestOutput) -> LorasrvError | AdapterError | None:
    """Why a request was not served; None if it was, or failed."""
    if output.refusal is None:
        return None
    return _exception(output.refusal, output.error or "refused", output.retry_after_s or 1.0)


def not_loaded(why: str, refusal: Refusal | None) -> LorasrvError | AdapterError:
    """Why an adapter could not be brought in."""
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
            return InvalidRequest(why, param="max_tokens")
        case Refusal.TIMEOUT:
            return RequestTimeout(why)
        case Refusal.CORRUPT:
            return AdapterCorrupt(why)
        case Refusal.STEP:
            return StepFailed(why)
        case Refusal.MEMORY:
            return OutOfMemory(why)


class OutputStream(Protocol):
    """One of what `AsyncEngine.add_choices` returns: outputs, the last of which is finished."""

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None: ...
