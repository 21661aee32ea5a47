"""Executor: the seam between the engine and the worker that computes steps.

An executor acts in the order of its calls: behind `settle`, page operations are done after the steps submitted before
them and before those submitted after them. Loader threads write adapters beside that, to pages that no step in flight
reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from lorasrv.metrics.step_stats import StepProfile
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import ModelRunnerOutput, PageOp, SchedulerOutput
from lorasrv.worker.adapter_loader import WriteAdapter
from lorasrv.worker.launched_step import LaunchedStep
from lorasrv.worker.model_runner import NO_TOKENS, BeforePass, ModelRunner, PreparedStep, do_nothing
from lorasrv.worker.snapshot_loader import ReadPages, WritePages


@dataclass(eq=False, slots=True)
class StepHandle:
    """Identify a submitted step. Collect it at most once; one that is not collected is dropped."""

    step: SchedulerOutput
    # When its pass was complete, by `time.perf_counter`; None until it is collected, and where that is not known.
    pass_ended_s: float | None = None


class Executor(Protocol):
    """Compute steps. For the engine thread, except `write_adapter`."""

    @property
    def depth(self) -> int:
        """Return how many steps may be in flight together; at 1 each is collected before the next is planned."""

    @property
    def share_hidden(self) -> float:
        """Return the share of the time of planning that a step planned ahead saves: less than all where the thread that
        plans would compute meanwhile."""

    @property
    def profile(self) -> StepProfile:
        """Return where the time of steps was spent."""

    @property
    def num_late_kernels(self) -> int:
        """Return how many kernels steps have waited for though they were warmed up."""

    @property
    def write_adapter(self) -> WriteAdapter:
        """Return the function that fills an adapter's pages, for loader threads."""

    @property
    def read_pages(self) -> ReadPages:
        """Return the function that reads pages: after the steps submitted so far, for the engine's thread behind
        `settle`; at any time for other threads, if no step changes the pages."""

    @property
    def write_pages(self) -> WritePages:
        """Return the function that fills pages, for loader threads."""

    def commit_pages(self, slab: int, first_page: int, num_pages: int) -> None:
        """Have the system give memory to pages of a slab."""

    @property
    def lost(self) -> str | None:
        """Return why what computes elsewhere has gone, so that no step can be computed any more; None if it has not."""

    @property
    def silence(self) -> str | None:
        """Return what computes elsewhere and has not been heard of for seconds; None if nothing."""

    def exit_when_lost(self, tell: Callable[[str], None]) -> None:
        """Have this process end when what computes elsewhere has gone, seconds after `tell` was called with the reason,
        in any thread. Without this call, only what is asked of the executor raises."""

    def bind_thread(self, before_pass: BeforePass = do_nothing) -> None:
        """Prepare the calling thread, which submits steps from then on.

        Args:
            before_pass: called in this thread when it is about to compute a collected step without Python's lock.
        """

    def submit(self, step: SchedulerOutput) -> StepHandle:
        """Start to compute a step whose page operations were applied. Errors are raised by `collect`.

        Pending tokens are those that the step submitted before samples, which is not collected yet.
        """

    def settle(self) -> None:
        """Have the steps submitted so far computed before anything reads or changes their pages. Called before page
        operations and reads."""

    def take_part(self, seconds: float) -> None:
        """Let the calling thread compute for about so long with those that compute the steps submitted; nothing where
        another device does."""

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for a step, in the order of submission, and return its output.

        Raises:
            Exception: the step could not be computed. After `recover` it may be submitted again; those behind it must
                be.
            EngineDead: what computes elsewhere has gone; nothing can be computed any more.
        """

    def apply_page_ops(self, ops: Sequence[PageOp]) -> int:
        """Copy and swap pages in order.

        Returns:
            The bytes copied to or from host memory.
        Raises:
            Exception: an operation failed; those before it were done.
            EngineDead: as `collect`.
        """

    def recover(self) -> bool:
        """Clean up after a failed step; return whether the device can still be used."""

    def close(self) -> None:
        """End what computes elsewhere. Nothing is submitted afterwards."""


class InProcessExecutor:
    """Compute each step when it is collected, in the calling thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    @property
    def lost(self) -> str | None:
        return None

    @property
    def silence(self) -> str | None:
        return None

    def exit_when_lost(self, tell: Callable[[str], None]) -> None:
        """Do nothing: nothing computes elsewhere."""

    @property
    def depth(self) -> int:
        return 1

    @property
    def share_hidden(self) -> float:
        return 1.0

    @property
    def profile(self) -> StepProfile:
        return self.runner.profile

    @property
    def num_late_kernels(self) -> int:
        return self.runner.num_late_kernels

    @property
    def write_adapter(self) -> WriteAdapter:
        return self.runner.write_adapter

    @property
    def read_pages(self) -> ReadPages:
        return self.runner.read_pages

    @property
    def write_pages(self) -> WritePages:
        return self.runner.write_pages

    def commit_pages(self, slab: int, first_page: int, num_pages: int) -> None:
        self.runner.commit_pages(slab, first_page, num_pages)

    def bind_thread(self, before_pass: BeforePass = do_nothing) -> None:
        self.runner.bind_thread(before_pass)

    def submit(self, step: SchedulerOutput) -> StepHandle:
        return StepHandle(step)

    def settle(self) -> None:
        """Do nothing: a step is collected before the next one's operations."""

    def take_part(self, seconds: float) -> None:
        """Do nothing: nothing is computed before it is collected."""

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        return self.runner.run(handle.step)

    def apply_page_ops(self, ops: Sequence[PageOp]) -> int:
        return self.runner.apply_page_ops(ops)

    def recover(self) -> bool:
        return self.runner.recover()

    def close(self) -> None:
        self.runner.close()


@dataclass(eq=False, slots=True)
class _PreparedHandle(StepHandle):
    prepared: PreparedStep | None = None
    has_begun: bool = False
    error: Exception | None = None


class ThreadedExecutor(InProcessExecutor):
    """Compute a step in other threads while the calling one plans the next step.

    The next step begins as soon as `collect` knows the tokens of the one before. With a single thread, each step is
    computed when it is collected.
    """

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        # Submitted and not collected: the first is computed, the second ready.
        self._submitted: list[_PreparedHandle] = []

    @property
    def depth(self) -> int:
        return 2 if self.runner.num_threads > 1 else 1

    @property
    def share_hidden(self) -> float:
        threads = self.runner.num_threads
        return (threads - 1) / threads

    def submit(self, step: SchedulerOutput) -> StepHandle:
        if self.depth == 1:
            return super().submit(step)
        handle = _PreparedHandle(step)
        self._submitted.append(handle)
        with self._errors_of(handle):
            handle.prepared = self.runner.prepare(step)
        if len(self._submitted) == 1:
            self._begin(NO_TOKENS)
        return handle

    def take_part(self, seconds: float) -> None:
        self.runner.take_part(seconds)

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        if not isinstance(handle, _PreparedHandle):
            return super().collect(handle)
        if handle.error is not None:
            raise handle.error
        if handle.prepared is None or not handle.has_begun:
            raise RuntimeError("the step before was not collected, so the tokens of this one are not known")
        try:
            output = self.runner.complete(handle.prepared)
            handle.pass_ended_s = self.runner.ended_s
        finally:
            self._submitted.remove(handle)
        self._begin(output.sampled)
        return output

    def settle(self) -> None:
        for handle in self._submitted[:1]:
            with self._errors_of(handle):
                self.runner.settle()

    def recover(self) -> bool:
        """See `Executor`; what was submitted is dropped."""
        self.runner.wait()
        self._submitted.clear()
        return self.runner.recover()

    def close(self) -> None:
        """Wait for what is computed."""
        self.runner.wait()
        super().close()

    def __del__(self) -> None:
        # Helpers read and write the runner's memory.
        self.close()

    def _begin(self, tokens: Mapping[RequestId, Sequence[int]]) -> None:
        """Begin with the step that is ready, if one is."""
        for handle in self._submitted:
            with self._errors_of(handle):
                if handle.prepared is not None:
                    handle.has_begun = True
                    self.runner.begin(handle.prepared, tokens)

    @contextmanager
    def _errors_of(self, handle: _PreparedHandle) -> Iterator[None]:
        """Keep an error for the time when the step is collected."""
        try:
            yield
        except Exception as error:
            handle.error = error


@dataclass(eq=False, slots=True)
class _LaunchedHandle(StepHandle):
    launched: LaunchedStep | ModelRunnerOutput | None = None
    error: Exception | None = None


class LaunchingExecutor(InProcessExecutor):
    """Launch each step on a GPU when it is submitted, so that the device has the next one in its queue while the host
    reads the tokens of the last and plans."""

    @property
    def depth(self) -> int:
        return 2

    def submit(self, step: SchedulerOutput) -> StepHandle:
        handle = _LaunchedHandle(step)
        try:
            handle.launched = self.runner.launch(step)
        except Exception as error:
            handle.error = error
        return handle

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        assert isinstance(handle, _LaunchedHandle)
        if handle.error is not None:
            raise handle.error
        assert handle.launched is not None
        return self.runner.finish(handle.launched)
