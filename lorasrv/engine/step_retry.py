"""Step retry: compute a failed step again in parts, until the requests that fail are isolated.

Parts are halves, as in bisection of test cases (Zeller's ddmin). Every token's keys and values have their own place and
are written before anything reads them, and no row's result depends on other rows. So a part can be computed again
without harm, and the parts together give the result of the whole step. An exception costs the other requests of its
batch only time; n requests take at most 3 n runs. A request that does not fit into memory alone is also split along its
tokens, like a long prompt; the size that fits then bounds the next steps for a while. `StepResult.failed` has the
requests that still fail.
"""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lorasrv.errors import DeviceLost, EngineDead
from lorasrv.outputs import RequestId, TokenLogprobs
from lorasrv.scheduler_output import DrafterOutput, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from lorasrv.worker.device import is_out_of_memory

_LOG = logging.getLogger(__name__)
MAX_NAMED = 8
CALM_STEPS = 256
"""Number of steps within the bound before twice as many tokens are tried again."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Hold the result of a step."""

    output: ModelRunnerOutput
    # Requests that cannot be computed, even alone.
    failed: Mapping[RequestId, Exception] = field(default_factory=dict)
    # 1 if the step was computed at the first attempt.
    num_runs: int = 1


class FaultHook(Protocol):
    """Inject faults into steps (`fault_injection`)."""

    def on_step(self) -> None:
        """Note that a step is about to be computed, in one part or in several."""

    def on_part(self, part: SchedulerOutput) -> None:
        """Raise the fault of this part of the step, if it has one."""


class StepRetrier:
    """Run steps. For the engine thread.

    Args:
        run: computes a step whose page operations are done.
        recover: called after an exception; returns whether the device can still be used.
        beat: called before each run.
    """

    def __init__(
        self,
        run: Callable[[SchedulerOutput], ModelRunnerOutput],
        recover: Callable[[], bool],
        beat: Callable[[], None],
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
        """Return the most tokens that are computed together since memory was short; None: no bound."""
        return self._most_tokens

    def run(self, step: SchedulerOutput, collect: Callable[[], ModelRunnerOutput] | None = None) -> StepResult:
        """Compute a step, in parts if it cannot be computed as a whole.

        Args:
            collect: waits for the whole step, if it is in flight already.
        Raises:
            DeviceLost: the device cannot be used any more.
            EngineDead: a process that computes a part of the model has ended.
        """
        self._begin()
        parts, bound = [step], self._most_tokens
        gathered, failed, again, num_runs = _Gathered(), dict[RequestId, Exception](), set[RequestId](), 0
        while parts:
            part, *parts = [*self._bounded(parts[0]), *parts[1:]]
            num_runs += 1
            try:
                # Collect only once: `recover` drops the step in flight.
                wait, collect = collect, None
                self._prepare(part)
                gathered.take(wait() if wait is not None and part is step else self._run(part))
                continue
            except EngineDead:
                raise
            except Exception as error:
                names = ", ".join(s.request_id for s in part.requests[:MAX_NAMED])
                shown = part.num_tokens, len(part.requests), names, type(error).__name__
                _LOG.error(
                    "%d tokens of %d requests (%s) failed: %s", *shown, exc_info=error if num_runs == 1 else None
                )
                # Drop the frames, which keep allocated tensors alive.
                caught = error.with_traceback(None)
            if not self._recover():
                raise DeviceLost(f"the device cannot be used any more: {type(caught).__name__}") from caught
            if part.has_drafts:
                # The drafts may be the cause, or need too much memory; without them nothing is lost.
                parts.insert(0, part.without_drafts())
                continue
            smaller = self._smaller(part, caught)
            if smaller:
                parts[:0] = smaller
            elif part.requests[0].request_id not in again:
                # The cause may be transient: no request ends for a single failure.
                again.add(part.requests[0].request_id)
                parts.insert(0, part)
            else:
                failed |= {s.request_id: caught for s in part.requests}
                # If not even one token fits, the cause is not the step's size: keep the old bound for others.
                self._most_tokens = bound if is_out_of_memory(caught) else self._most_tokens
                parts = _without(parts, failed)
        self._calm_down()
        return StepResult(gathered.output(), failed, num_runs)

    def collect(self, step: SchedulerOutput, collect: Callable[[], ModelRunnerOutput]) -> StepResult:
        """Wait for a step behind which others are in flight.

        Raises:
            Exception: whatever goes wrong with it.
        """
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
        """Return the part's halves; empty if it is one request and a smaller part would not help."""
        if is_out_of_memory(error):
            self._enough_tokens = max(self._enough_tokens, part.num_tokens)
            self._most_tokens = max(1, part.num_tokens // 2)
            self._num_calm = 0
            return self._bounded(part) if part.num_tokens > 1 else []
        half = len(part.requests) // 2
        return [part.only(part.requests[:half]), part.only(part.requests[half:])] if half else []

    def _bounded(self, step: SchedulerOutput) -> list[SchedulerOutput]:
        """Split a step into parts within the bound."""
        most = self._most_tokens
        if most is None or step.num_tokens <= most:
            return [step]
        step = step.without_drafts()
        parts: list[list[ScheduledRequest]] = [[]]
        room = most
        for scheduled in step.requests:
            rest: ScheduledRequest | None = scheduled
            while rest is not None:
                if not room or (len(rest.token_ids) > room and parts[-1]):
                    parts.append([])
                    room = most
                piece = rest
                piece, rest = rest.cut(room) if len(rest.token_ids) > room else (piece, None)
                parts[-1].append(piece)
                room -= len(piece.token_ids)
        return [step.only(requests) for requests in parts]

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
    """Drop failed requests from parts: the rest of a split request would read what was not written."""
    left = [part.only([s for s in part.requests if s.request_id not in failed]) for part in parts]
    return [part for part in left if part.requests]


@dataclass(slots=True)
class _Gathered:
    """Merge the outputs of parts."""

    sampled: dict[RequestId, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    probed: dict[RequestId, tuple[int, ...]] = field(default_factory=dict)
    masses: dict[RequestId, Sequence[Sequence[float]]] = field(default_factory=dict)
    drafted: dict[str, DrafterOutput] = field(default_factory=dict)

    def take(self, output: ModelRunnerOutput) -> None:
        self.probed |= output.probed
        self.drafted |= output.drafted
        self.sampled |= output.sampled
        self.logprobs |= output.logprobs
        for request_id, rows in output.masses.items():
            self.masses[request_id] = (*self.masses.get(request_id, ()), *rows)
        for request_id, known in output.prompt_logprobs.items():
            self.prompt_logprobs[request_id] = (*self.prompt_logprobs.get(request_id, ()), *known)

    def output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            self.sampled, self.logprobs, self.prompt_logprobs, self.probed, self.drafted, self.masses
        )
