"""Executors with two steps in flight, for engines that collect steps one step late."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import ModelRunnerOutput, PageOp, SchedulerOutput
from lorasrv.worker.executor import InProcessExecutor, LaunchingExecutor, StepHandle, ThreadedExecutor
from sgmv_kernels.cpu_ops.recorded_step import RecordedStep
from sgmv_kernels.cpu_runtime.team import take_team


@dataclass(eq=False, slots=True)
class _Late(StepHandle):
    output: ModelRunnerOutput | None = None
    error: Exception | None = None


class LateExecutor(InProcessExecutor):
    """An executor with two steps in flight: each is computed as late as the interface allows, and its results come one
    step later.
    """

    @property
    def depth(self) -> int:
        return 2

    def __init__(self, executor: InProcessExecutor) -> None:
        super().__init__(executor.runner)
        self.submitted: list[_Late] = []
        self.most_under_way = 0
        self._tokens: dict[RequestId, int] = {}

    def submit(self, step: SchedulerOutput) -> StepHandle:
        self.submitted.append(_Late(step))
        self.most_under_way = max(self.most_under_way, len(self.submitted))
        return self.submitted[-1]

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        assert isinstance(handle, _Late)
        self._compute(until=handle)
        if handle.error is not None:
            raise handle.error
        assert handle.output is not None, "collected twice"
        output, handle.output = handle.output, None
        return output

    def apply_page_ops(self, ops: Sequence[PageOp]) -> int:
        if ops:
            self._compute(until=None)
        return super().apply_page_ops(ops)

    def _compute(self, until: _Late | None) -> None:
        while self.submitted and (until is None or (until.output is None and until.error is None)):
            first = self.submitted.pop(0)
            try:
                first.output = self.runner.run(first.step.with_tokens(self._tokens))
                self._tokens = {request: tokens[-1] for request, tokens in first.output.sampled.items()}
            except Exception as error:
                first.error = error


class Counted(InProcessExecutor):
    """An executor that counts the steps in flight."""

    def __init__(self, executor: InProcessExecutor) -> None:
        super().__init__(executor.runner)
        self.num_under_way = self.most_under_way = 0

    def submit(self, step: SchedulerOutput) -> StepHandle:
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        return super().submit(step)

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        self.num_under_way -= 1
        return super().collect(handle)


class LaunchedAtOnce(Counted, LaunchingExecutor):
    """The executor for GPUs, for use with a fake GPU."""


class ThreadedAtOnce(Counted, ThreadedExecutor):
    """The executor for CPUs, whose helper threads compute beside the engine's thread; checks that no page changes while
    they compute."""

    _is_settled = False

    def settle(self) -> None:
        super().settle()
        self._is_settled = True

    def submit(self, step: SchedulerOutput) -> StepHandle:
        self._is_settled = False
        return super().submit(step)

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        self._is_settled = False
        return super().collect(handle)

    def apply_page_ops(self, ops: Sequence[PageOp]) -> int:
        assert not ops or self._is_settled or not self._submitted, "a step in flight uses the pages"
        return super().apply_page_ops(ops)


class HeldBackTeam:
    """A team that computes a pass only when its end is awaited, after the next step was planned: if planning changes
    data of the pass, answers are wrong."""

    def __init__(self, threads: int) -> None:
        self._team = take_team(threads)

    def open(self, *region: int) -> None:
        self._region = region

    def take_part(self, ticks: int) -> None:
        """Compute nothing."""

    def complete(self) -> None:
        self._team.open(*self._region)
        self._team.complete()

    def give_back(self) -> None:
        self._team.give_back()


class ThreadedInPart(ThreadedAtOnce):
    """The same, but passes of many rows are not recorded, so that no other thread computes them."""

    def __init__(self, executor: InProcessExecutor) -> None:
        super().__init__(executor)
        decoder = self.runner._decoder
        program = decoder._program
        assert program is not None
        decoder._program = RecordedStep(program._stages, replace(program._shape, max_rows=8), program._planner)
