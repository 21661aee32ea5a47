"""The seam between the engine and the worker that computes: steps go in, and what they say comes out.

An executor acts in the order in which it is called: page operations are done when the steps that were submitted before
them are, and before those that are submitted after them. Adapters are written beside that, by threads of the loader,
to pages that no step under way reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lorasrv.metrics.step_stats import StepProfile
from lorasrv.scheduler_output import PageOp, SchedulerOutput
from lorasrv.worker.adapter_loader import WriteAdapter
from lorasrv.worker.model_runner import ModelRunner, ModelRunnerOutput


@dataclass(eq=False, slots=True)
class StepHandle:
    """A step that was submitted, to be collected once. One that is not collected is forgotten."""

    step: SchedulerOutput


class Executor(Protocol):
    """Computes steps. For the engine's thread, but for `write_adapter`."""

    @property
    def depth(self) -> int:
        """Return how many steps may be under way together; at 1 each is collected before the next is planned."""

    @property
    def profile(self) -> StepProfile:
        """Return where the time of steps has gone."""

    @property
    def write_adapter(self) -> WriteAdapter:
        """Return what fills an adapter's pages, for threads of the loader."""

    def bind_thread(self) -> None:
        """Prepare the calling thread, which submits steps from then on."""

    def submit(self, step: SchedulerOutput) -> StepHandle:
        """Begin to compute a step whose page operations were applied. Nothing of it raises before it is collected."""

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for a step, in the order of submission, and return what it says.

        Raises:
            Exception: it could not be computed. It may be submitted again, after `recover`; those behind it are to be.
        """

    def apply_page_ops(self, ops: Sequence[PageOp]) -> int:
        """Copy and swap pages; return how many bytes went to or came from host memory.

        Raises:
            Exception: an operation could not be done; those before it were.
        """

    def recover(self) -> bool:
        """Clear up after a step that failed; return whether the device can be used any more."""


class InProcessExecutor:
    """Computes each step when it is collected, in the thread that asks."""

    depth = 1

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    @property
    def profile(self) -> StepProfile:
        return self.runner.profile

    @property
    def write_adapter(self) -> WriteAdapter:
        return self.runner.write_adapter

    def bind_thread(self) -> None:
        self.runner.bind_thread()

    def submit(self, step: SchedulerOutput) -> StepHandle:
        return StepHandle(step)

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        return self.runner.run(handle.step)

    def apply_page_ops(self, ops: Sequence[PageOp]) -> int:
        return self.runner.apply_page_ops(ops)

    def recover(self) -> bool:
        return self.runner.recover()
