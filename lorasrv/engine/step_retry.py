"""A step that fails is computed again in parts, until what cannot be computed stands alone.

A token's keys and values go to a place of its own before anything reads them, and no row's result depends on the rows
beside it: to compute a part again changes nothing, and parts give what the whole would have given. So an exception
costs the others of its batch a moment; n requests are found out about in at most 3 n runs. A request that does not fit
into memory alone is cut along its tokens too, as long prompts are anyway; what did fit bounds the next steps for a
while. What is left of a fault then is in `StepResult.failed`.

The parts that come of one step are halves, as in bisection of test cases (Zeller's ddmin); nothing is kept of them.
"""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lorasrv.errors import DeviceLost
from lorasrv.outputs import RequestId, TokenLogprobs
from lorasrv.scheduler_output import ScheduledRequest, SchedulerOutput
from lorasrv.worker.model_runner import ModelRunnerOutput

_LOG = logging.getLogger(__name__)
MAX_NAMED = 8
CALM_STEPS = 256
"""Steps within the bound before twice as many tokens are tried again."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to. `failed`: requests that cannot be computed, even alone. `num_runs`: 1 if all went well."""

    output: ModelRunnerOutput
    failed: Mapping[RequestId, Exception] = field(default_factory=dict)
    num_runs: int = 1


class FaultHook(Protocol):
    """Faults that were asked for (`faults.py`)."""

    def on_step(self) -> None:
        """A step is about to be computed, in one part or in several."""

    def on_part(self, part: SchedulerOutput) -> None:
        """One of its parts is. Raises: whatever shall go wrong with it."""


class StepRetrier:
    """Runs steps. For the engine's thread.

    Args:
        run: computes a step, whose pages are arranged.
        recover: called after an exception; whether the device can be used any more.
        beat: called before each run.
    """

    def __init__(
        self,
        run: Callable[[SchedulerOutput], ModelRunnerOutput],
        recover: Callable[[], bool] = lambda: True,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._recover = recover
        self._beat = beat
        self.fault_hook: FaultHook | None = None
        self._most_tokens: int | None = None
        self._enough_tokens = 0
        self._num_calm = 0

    @property
    def most_tokens(self) -> int | None:
        """Tokens that are computed together at most, since memory was short; None: as many as are scheduled."""
        return self._most_tokens

    def run(self, step: SchedulerOutput, collect: Callable[[], ModelRunnerOutput] | None = None) -> StepResult:
        """Compute a step, in parts if it cannot be computed as a whole.

        Args:
            collect: waits for the whole step, which is under way already.
        Raises:
            DeviceLost: the device is gone; nothing can be computed any more.
        """
        self._begin()
        parts, bound = [step], self._most_tokens
        gathered, failed, again, num_runs = _Gathered(), dict[RequestId, Exception](), set[RequestId](), 0
        while parts:
            part, *parts = [*self._bounded(parts[0]), *parts[1:]]
            num_runs += 1
            try:
                self._prepare(part)
                if collect is not None and part is step:
                    wait, collect = collect, None
                    gathered.take(wait())
                else:
                    gathered.take(self._run(part))
                continue
            except Exception as error:
                names = ", ".join(share.request_id for share in part.scheduled[:MAX_NAMED])
                shown = part.num_tokens, len(part.scheduled), names, type(error).__name__
                _LOG.error(
                    "%d tokens of %d requests (%s) failed: %s", *shown, exc_info=error if num_runs == 1 else None
                )
                # Without its frames, which hold on to what they have allocated.
                caught = error.with_traceback(None)
            if not self._recover():
                raise DeviceLost(f"the device cannot be used any more: {type(caught).__name__}") from caught
            if part.num_draft_tokens:
                # Guesses may have been what was wrong, or too much; nothing is lost without them.
                parts.insert(0, part.without_drafts())
                continue
            smaller = self._smaller(part, caught)
            if smaller:
                parts[:0] = smaller
            elif part.scheduled[0].request_id not in again:
                # It may have been the moment. Nobody ends for something that happens once.
                again.add(part.scheduled[0].request_id)
                parts.insert(0, part)
            else:
                failed |= {share.request_id: caught for share in part.scheduled}
                # If not even a token fits, it is not for want of room that others should keep to so little.
                self._most_tokens = bound if is_out_of_memory(caught) else self._most_tokens
                parts = _without(parts, failed)
        self._calm_down()
        return StepResult(gathered.output(), failed, num_runs)

    def collect(self, step: SchedulerOutput, collect: Callable[[], ModelRunnerOutput]) -> StepResult:
        """Wait for a step behind which others are under way. Raises: whatever goes wrong with it."""
        self._begin()
        self._prepare(step)
        return StepResult(collect())

    def _begin(self) -> None:
        if self.fault_hook is not None:
            self.fault_hook.on_step()

    def _prepare(self, part: SchedulerOutput) -> None:
        self._beat()
        if self.fault_hook is not None:
            self.fault_hook.on_part(part)

    def _smaller(self, part: SchedulerOutput, error: Exception) -> list[SchedulerOutput]:
        """Its halves; none if it is one request, and less of it would not help."""
        if is_out_of_memory(error):
            self._enough_tokens = max(self._enough_tokens, part.num_tokens)
            self._most_tokens = max(1, part.num_tokens // 2)
            self._num_calm = 0
            return self._bounded(part) if part.num_tokens > 1 else []
        half = len(part.scheduled) // 2
        return [part.only(part.scheduled[:half]), part.only(part.scheduled[half:])] if half else []

    def _bounded(self, step: SchedulerOutput) -> list[SchedulerOutput]:
        """The step, in parts that are known to fit."""
        most = self._most_tokens
        if most is None or step.num_tokens <= most:
            return [step]
        step = step.without_drafts()
        parts: list[list[ScheduledRequest]] = [[]]
        room = most
        for share in step.scheduled:
            rest: ScheduledRequest | None = share
            while rest is not None:
                if not room or (len(rest.token_ids) > room and parts[-1]):
                    parts.append([])
                    room = most
                piece = rest
                piece, rest = rest.cut(room) if len(rest.token_ids) > room else (piece, None)
                parts[-1].append(piece)
                room -= len(piece.token_ids)
        return [step.only(shares) for shares in parts]

    def _calm_down(self) -> None:
        if self._most_tokens is None:
            return
        self._num_calm += 1
        if self._num_calm >= CALM_STEPS:
            self._num_calm = 0
            self._most_tokens *= 2
            if self._most_tokens >= self._enough_tokens:
                self._most_tokens = None


def _without(parts: Sequence[SchedulerOutput], failed: Container[RequestId]) -> list[SchedulerOutput]:
    """Of a request that was cut, the rest would read what was not written."""
    left = [part.only([share for share in part.scheduled if share.request_id not in failed]) for part in parts]
    return [part for part in left if part.scheduled]


@dataclass(slots=True)
class _Gathered:
    """The outputs of parts, put together."""

    sampled: dict[RequestId, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)

    def take(self, output: ModelRunnerOutput) -> None:
        self.sampled |= output.sampled
        self.logprobs |= output.logprobs
        for request_id, known in output.prompt_logprobs.items():
            self.prompt_logprobs[request_id] = (*self.prompt_logprobs.get(request_id, ()), *known)

    def output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(self.sampled, self.logprobs, self.prompt_logprobs)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device, or of the host: torch's CPU allocator has no exception of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
