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

RequestId = NewType("RequestId", str)

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256


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


class AdapterTier(StrEnum):
    """Where an adapter was found when its request was admitted."""

    RESIDENT = "resident"
    HOST = "host"
    DISK = "disk"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: its tokens and how far they are computed. Owned by the `Scheduler`, nobody else writes it.

    `num_computed_tokens` chases `len(token_ids)`: there is no prefill and no decode phase.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    adapter_key: AdapterKey | None = None
    principal: str = "anonymous"
    arrival_s: float = 0.0
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    tier: AdapterTier | None = None
    scheduled_s: float | None = None
    load_started_s: float | None = None
    load_s: float = 0.0
    stop_token_id: int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens known so far."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """Most tokens that this request can come to hold."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while tokens may still follow."""
        return _FINISH_REASONS.get(self.status)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The message that brings a request to the engine: frozen, no tensors, so that any transport can carry it."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    adapter_key: AdapterKey | None = None
    principal: str = "anonymous"


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Where the time before the first token went, and where the adapter was found."""

    queue_ms: float = 0.0
    load_ms: float = 0.0
    tier: AdapterTier | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one engine step brought for one request: new token ids, and the end if this is it."""

    request_id: RequestId
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    timing: RequestTiming
    stop_token_id: int | None = None
    error: str | None = None


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
