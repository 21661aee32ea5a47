"""Executor: the interface between the engine and the worker that computes steps.

An executor acts in the order of its calls: after `settle`, page operations are executed after all steps submitted
before them and before all steps submitted later. Loader threads write adapters at the same time, to pages that no step
in flight reads.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from lorasrv.errors import DeviceLost, EngineDead
from lorasrv.metrics.step_stats import StepProfile
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import ModelRunnerOutput, PageOp, SchedulerOutput
from lorasrv.worker.adapter_loader import WriteAdapter
from lorasrv.worker.launched_step import LaunchedStep
from lorasrv.worker.model_runner import NO_TOKENS, BeforePass, ModelRunner, PreparedStep, do_nothing
from lorasrv.worker.snapshot_loader import ReadPages, WritePages

_LOG = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class StepHandle:
    """Identify a submitted step. Collect it at most once; a step that is not collected is dropped."""

    step: SchedulerOutput
    # When its pass was complete, by `time.perf_counter`; None until it is collected, or if not known.
    pass_ended_s: float | None = None


class Executor(Protocol):
    """Compute steps. For the engine thread, except `write_adapter`."""

    @property
    def depth(self) -> int:
        """Return how many steps may be in flight together; 1: each step is collected before the next is planned."""

    @property
    def share_hidden(self) -> float:
        """Return the share of the planning time that planning a step ahead saves: less than 1 if the planning thread
        would otherwise compute."""

    @property
    def profile(self) -> StepProfile:
        """Return where the time of steps was spent."""

    @property
    def num_late_kernels(self) -> int:
        """Return how many kernels steps have waited for despite the warm-up."""

    @property
    def write_adapter(self) -> WriteAdapter:
        """Return the function that fills an adapter's pages, for loader threads."""

    @property
    def read_pages(self) -> ReadPages:
        """Return the function that reads pages. The engine's thread calls it after `settle`, and reads the pages as the
        steps submitted so far leave them. Other threads may call it at any time, if no step changes the pages."""

    @property
    def write_pages(self) -> WritePages:
        """Return the function that fills pages, for loader threads."""

    def commit_pages(self, slab: int, first_page: int, num_pages: int) -> None:
        """Have the system commit memory for pages of a slab."""

    @property
    def lost(self) -> str | None:
        """Return why another process of the model has ended, so that no step can be computed; None if none has."""

    @property
    def silence(self) -> str | None:
        """Return which other process of the model has sent nothing for seconds; None if there is none."""

    def exit_when_lost(self, tell: Callable[[str], None]) -> None:
        """Have this process exit when another process of the model ends, seconds after `tell` is called with the reason
        in any thread. Without this call, only later calls of the executor raise."""

    def bind_thread(self, before_pass: BeforePass = do_nothing) -> None:
        """Prepare the calling thread, which submits steps from then on.

        Args:
            before_pass: called in this thread just before it computes a collected step without the GIL.
        """

    def rehearse(self) -> None:
        """Compute small steps, so that no request waits for what happens once; before any request uses the pool, in the
        bound thread. A step that fails is logged.

        Raises:
            DeviceLost: after such a step, the device cannot be used any more.
            EngineDead: as for `collect`.
        """

    def submit(self, step: SchedulerOutput) -> StepHandle:
        """Start to compute a step whose page operations were applied. `collect` raises its errors.

        The previous step, which is not collected yet, samples the pending tokens.
        """

    def settle(self) -> None:
        """Wait for the steps submitted so far, before anything reads or changes their pages. Called before page
        operations and reads."""

    def take_part(self, seconds: float) -> None:
        """Let the calling thread help to compute the submitted steps for about so long; do nothing if another device
        computes them."""

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for a step, in the order of submission, and return its output.

        Raises:
            Exception: the step could not be computed. After `recover` it may be submitted again; later steps must be.
            EngineDead: another process of the model has ended; nothing can be computed any more.
        """

    def apply_page_ops(self, ops: Sequence[PageOp]) -> int:
        """Copy and swap pages in order.

        Returns:
            The bytes copied to or from host memory.
        Raises:
            Exception: an operation failed; those before it were executed.
            EngineDead: as for `collect`.
        """

    def recover(self) -> bool:
        """Clean up after a failed step; return whether the device can still be used."""

    def close(self) -> None:
        """Stop other threads and processes that compute. Submit nothing afterwards."""


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
        """Do nothing: no other process computes."""

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

    def rehearse(self) -> None:
        for step in self.runner.rehearsal():
            try:
                self.apply_page_ops(step.page_ops)
                self.collect(self.submit(step))
            except EngineDead:
                raise
            except Exception as error:
                _LOG.exception("a step before the first request failed; requests of its kind may fail, too")
                if not self.recover():
                    raise DeviceLost(f"the device cannot be used any more: {type(error).__name__}") from error
        # The first steps take longer than those of requests.
        self.profile.clear()

    def submit(self, step: SchedulerOutput) -> StepHandle:
        return StepHandle(step)

    def settle(self) -> None:
        """Do nothing: a step is collected before the next step's page operations."""

    def take_part(self, seconds: float) -> None:
        """Do nothing: a step is computed only when it is collected."""

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

    The next step begins as soon as `collect` knows the tokens of the previous one. With a single thread, each step is
    computed when it is collected.
    """

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        # Steps that are not collected yet: the first is being computed, the second is ready.
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
        """See `Executor`; submitted steps are dropped."""
        self.runner.wait()
        self._submitted.clear()
        return self.runner.recover()

    def close(self) -> None:
        """Wait for the step that is being computed."""
        self.runner.wait()
        super().close()

    def __del__(self) -> None:
        # Wait first: helper threads read and write the runner's memory.
        self.close()

    def _begin(self, tokens: Mapping[RequestId, Sequence[int]]) -> None:
        """Begin the step that is ready, if there is one."""
        for handle in self._submitted:
            with self._errors_of(handle):
                if handle.prepared is not None:
                    handle.has_begun = True
                    self.runner.begin(handle.prepared, tokens)

    @contextmanager
    def _errors_of(self, handle: _PreparedHandle) -> Iterator[None]:
        """Keep an error until the step is collected."""
        try:
            yield
        except Exception as error:
            handle.error = error


@dataclass(eq=False, slots=True)
class _LaunchedHandle(StepHandle):
    launched: LaunchedStep | ModelRunnerOutput | None = None
    error: Exception | None = None


class LaunchingExecutor(InProcessExecutor):
    """Launch each step on a GPU when it is submitted, so that the device has the next step in its queue while the host
    reads the tokens of the last step and plans."""

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
