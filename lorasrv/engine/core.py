"""Engine core: the synchronous engine, with `add_request`, `abort`, utility calls and `step`. No asyncio, threads or
text.

Everything here belongs to the one thread that calls `step`, except loads, which the `Loader` runs.
"""

import logging
import math
import time
from collections import deque
from dataclasses import dataclass

from lorasrv.engine.engine_counters import CoreCounters, describe_engine
from lorasrv.engine.messages import (
    FindSnapshot,
    MakeSnapshot,
    OfferPages,
    UtilityRequest,
    UtilityResult,
)
from lorasrv.engine.parts import EngineParts
from lorasrv.engine.snapshot_keeper import SnapshotKeeper
from lorasrv.engine.step_failures import StepFailureHandler
from lorasrv.engine.step_retry import StepResult, StepRetrier
from lorasrv.engine.utility_calls import UtilityCalls
from lorasrv.engine.watchdog import Heartbeat
from lorasrv.errors import DeviceLost, EngineDead
from lorasrv.memory.cost_model import StepShape
from lorasrv.metrics.engine_stats import EngineMetrics
from lorasrv.metrics.step_stats import StepProfile, StepStats
from lorasrv.outputs import EngineOutput, RequestId, not_loaded
from lorasrv.request import EngineCoreRequest, RequestStatus
from lorasrv.scheduler_output import (
    AdapterOrders,
    DropSwap,
    PageOp,
    SchedulerOutput,
    SwapIn,
    SwapOut,
)
from lorasrv.worker.adapter_loader import Done, Loader, LoaderReport
from lorasrv.worker.executor import StepHandle
from lorasrv.worker.model_runner import BeforePass, do_nothing
from lorasrv.worker.rehearsal import WARM_UP_STEP
from lorasrv.worker.snapshot_loader import SnapshotLoader

_LOG = logging.getLogger(__name__)
_NOTHING = SchedulerOutput((), {}, (), AdapterOrders(), 0)


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """Hold a planned step."""

    step: SchedulerOutput
    shape: StepShape
    # Collects the step. None: the step was too large to submit whole; it runs in parts once it is the oldest.
    handle: StepHandle | None


class EngineCore:
    """Run one model on one pool, batch after batch."""

    def __init__(
        self, parts: EngineParts, loader: Loader | None, snapshot_loader: SnapshotLoader | None = None
    ) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._memory = parts.memory
        self._loader = loader
        self._calls = UtilityCalls(parts.memory, parts.scheduler)
        self._snapshots = SnapshotKeeper(parts.memory.snapshots, snapshot_loader, self._calls.complete)
        self.heartbeat = Heartbeat()
        executor = self._executor = parts.executor
        self.retrier = StepRetrier(
            lambda step: executor.collect(executor.submit(step)), executor.recover, self.heartbeat.beat
        )
        self._faults = StepFailureHandler(parts.scheduler, parts.poison)
        self._pending_ops: deque[PageOp] = deque()
        self._in_flight: deque[_InFlightStep] = deque()
        self._is_serial = False
        # Why no step can be computed any more; empty while it can.
        self._lost = ""
        # When the step in flight began, and when to plan the next one.
        self._begun_s = self._plan_at_s = 0.0
        self._counters = CoreCounters()
        self.step_stats = StepStats()
        self._made_progress = False
        self._wake_s: float | None = None
        self.metrics = EngineMetrics(describe_engine(parts, self._counters))

    @property
    def has_requests(self) -> bool:
        """Return whether any request is not finished."""
        return self._scheduler.has_requests or bool(self._in_flight)

    @property
    def made_progress(self) -> bool:
        """Return whether the last step changed anything; if not, the next one does so only after a message, the end of
        a load, or some time."""
        return self._made_progress

    @property
    def idle_s(self) -> float:
        """Return the seconds until the engine has something to do without an event; infinite if nothing is
        scheduled."""
        return math.inf if self._wake_s is None else max(0.0, self._wake_s - self._memory.clock())

    @property
    def profile(self) -> StepProfile:
        """Return where the time of steps was spent."""
        return self._executor.profile

    def bind_thread(self, before_pass: BeforePass = do_nothing) -> None:
        """Prepare the calling thread, which will call `step`, and the device.

        Args:
            before_pass: called within `step` just before it computes without the GIL.
        """
        self._executor.bind_thread(before_pass)
        self._executor.rehearse()

    def compute_first_step(self) -> None:
        """Compute a step without any request.

        The first one after a start takes a quarter of a second longer: the system commits memory for weights and pages
        on first use, and kernels are recorded.
        """
        self._executor.collect(self._executor.submit(WARM_UP_STEP))

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request that `InputProcessor` has made.

        Raises:
            EngineDead: no step can be computed any more.
        """
        if lost := self._lost or self._executor.lost:
            raise EngineDead(f"{lost}; load the model again")
        self._counters.arrived += 1
        self._scheduler.add(message)

    def abort(self, request_id: RequestId) -> None:
        """Finish a request before the next step; do nothing if it has finished."""
        self._scheduler.finish(request_id, RequestStatus.FINISHED_ABORTED)

    def stop(self, request_id: RequestId) -> None:
        """Finish a request whose text contains a stop string; do nothing if it has finished."""
        self._scheduler.finish(request_id, RequestStatus.FINISHED_STOPPED)

    def call_utility(self, number: int, request: UtilityRequest) -> None:
        """Start a utility call. `take_utility_results` returns its result under this number, at once or when the
        adapter is resident."""
        if isinstance(request, MakeSnapshot | FindSnapshot):
            self._snapshots.call(number, request)
            return
        if isinstance(request, OfferPages):
            self._apply_left_ops()
        self._calls.call(number, request)

    def cancel_utility_call(self, number: int) -> None:
        """Drop a utility call whose caller does not wait any more."""
        self._calls.cancel(number)
        self._snapshots.cancel(number)

    def take_utility_results(self) -> list[UtilityResult]:
        """Return the results of utility calls since the last call."""
        return self._calls.take_results()

    def take_outputs(self) -> list[EngineOutput]:
        """Return the last outputs of requests that have finished since the last step."""
        return self._scheduler.take_outputs()

    @property
    def is_computing(self) -> bool:
        """Return whether a step is in flight."""
        return bool(self._in_flight)

    def compute(self) -> None:
        """Compute the step in flight, if this thread takes part in that, until it is time to plan the next one.

        The next one is planned late, to include requests that arrive meanwhile, but before the step in flight is done.
        `step` also calls this.
        """
        if self._in_flight:
            self._executor.take_part(self._plan_at_s - time.perf_counter())

    def commit_ahead(self) -> bool:
        """Have the system commit memory for a few pages that will be used soon; return whether any lacked it.

        Raises:
            EngineDead: a process that computes a part of the model has ended.
        """
        piece = self._memory.ahead.take()
        if piece is not None:
            self._executor.commit_pages(*piece)
        return piece is not None

    def step(self) -> list[EngineOutput]:
        """Submit one batch and return the outputs of the oldest batches in flight; if a batch fails, some requests
        end with an error. An executor of depth 1 computes every batch in the step that plans it.

        Raises:
            DeviceLost: the device cannot be used any more.
            EngineDead: a process that computes a part of the model has gone.
            AssertionError: the accounts of the pool are inconsistent.
            KeyboardInterrupt: raised in the thread of an `LLM`; all requests must be aborted then.
        """
        try:
            return self._step()
        except KeyboardInterrupt:
            can_go_on = self._executor.recover()
            self._drop_steps("" if can_go_on else "Ctrl-C has ended a step in its middle, which cannot be repeated")
            raise
        except (DeviceLost, EngineDead) as error:
            self._drop_steps(str(error))
            raise

    def _drop_steps(self, lost: str) -> None:
        """Drop the steps in flight. If no further step can be computed, `lost` says why."""
        self._lost = lost
        self._in_flight.clear()
        self._scheduler.discard_all()
        if lost:
            # Ranks that wait in the middle of this pass would mistake data of the next pass for theirs.
            self._executor.close()

    def _step(self) -> list[EngineOutput]:
        if lost := self._executor.lost:
            raise EngineDead(lost)
        self.compute()
        planned_from = time.perf_counter()
        begun = self._begun_s if self._in_flight else planned_from
        self.heartbeat.beat()
        if self._in_flight and self._scheduler.expects_drafts():
            outputs = self._collect(begun)
            self._finish_step(self._wake_s, made_progress=True)
            return outputs
        with self.profile.span("scheduling"):
            self._take_reports()
            try:
                step = self._scheduler.schedule(ahead=self._executor.depth > 1 and not self._is_serial)
            except Exception as error:
                self._made_progress = True
                return self._faults.on_schedule_error(error)
            self._faults.on_scheduled()
        settling_s = self._settle(step)
        has_tokens = bool(step.requests)  # before requests leave the step because their pages could not be swapped
        with self.profile.span("pages"):
            step = self._apply_page_ops(step)
            self._send_orders(step.orders)
            self._snapshots.send(step.snapshots)
        if step.requests:
            self._submit(step)
        else:
            self._scheduler.discard(step)
        outputs = self._scheduler.take_outputs()
        has_room = self._executor.depth > 1 and bool(step.requests) and not (self._is_serial or step.is_awaited)
        most, was_in_flight = self._executor.depth - 1 if has_room else 0, bool(self._in_flight)
        if has_room:
            planning_s = time.perf_counter() - planned_from - settling_s
            self._memory.costs.lead.observe(planning_s * self._executor.share_hidden, 1)
        while len(self._in_flight) > most:
            outputs += self._collect(begun)
            begun = time.perf_counter()
        with self.profile.span("scheduling"):
            self._finish_step(step.wake_s, made_progress=has_tokens or was_in_flight or step.num_preempted > 0)
        return outputs

    def check_integrity(self) -> None:
        """Compare every page and pin with its holder.

        Raises:
            AssertionError: they differ.
        """
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Stop the loaders, then the executor, through which they fill pages."""
        if self._loader is not None:
            self._loader.close()
        self._snapshots.close()
        self._executor.close()

    def _submit(self, step: SchedulerOutput) -> None:
        most = self.retrier.most_tokens
        fits = most is None or step.num_tokens <= most
        self._is_serial = self._is_serial or most is not None
        self._in_flight.append(_InFlightStep(step, StepShape.of(step), self._executor.submit(step) if fits else None))

    def _collect(self, begun: float) -> list[EngineOutput]:
        """Collect the oldest step in flight and return its outputs."""
        oldest = self._in_flight.popleft()
        step, handle = oldest.step, oldest.handle
        collect = None if handle is None else lambda: self._executor.collect(handle)
        if collect is not None and self._in_flight:
            try:
                result = self.retrier.collect(step, collect)
            except Exception as error:
                return self._replan(step, error)
        else:
            result = self.retrier.run(self._scheduler.resolve(step), collect)
            self._is_serial = False
        with self.profile.span("scheduling"):
            outputs = self._update(step, result)
            seconds = time.perf_counter() - begun
            computing_s = seconds - sum(drafted.seconds for drafted in result.output.drafted.values())
            if step.is_awaited:
                computing_s = max(0.0, computing_s - self._memory.costs.lead.seconds)
            if result.num_runs == 1:
                # If no step was planned behind this one, its pass may have begun later, after its own planning.
                if self._in_flight and handle is not None and handle.pass_ended_s is not None:
                    late_s = handle.pass_ended_s - begun - self._memory.costs.step.seconds(oldest.shape)
                    self._memory.costs.lateness.observe(late_s, 1)
                self._memory.costs.observe_step(oldest.shape, computing_s)
            self.heartbeat.on_step_computed()
            self.step_stats.on_step_computed(step, seconds)
            self._counters.steps += 1
        return outputs

    def _replan(self, step: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        """Drop a failed step and later ones, which may read what it did not write. Their tokens are planned again, one
        step at a time, to find out which request fails.

        Raises:
            DeviceLost: the device cannot be used any more.
        """
        _LOG.error(
            "a step failed; planning %d steps again: %s", 1 + len(self._in_flight), type(error).__name__, exc_info=error
        )
        if not self._executor.recover():
            raise DeviceLost(f"the device cannot be used any more: {type(error).__name__}") from error
        for lost in (step, *(later.step for later in self._in_flight)):
            self._scheduler.discard(lost)
        self._in_flight.clear()
        self._is_serial = True
        return self._scheduler.take_outputs()

    def _update(self, step: SchedulerOutput, result: StepResult) -> list[EngineOutput]:
        if result.failed:
            self._faults.on_compute_error(result.failed)
        try:
            outputs = self._scheduler.update_from_output(step, result.output)
        except Exception as error:
            return self._faults.on_update_error(step, error)
        if result.failed:
            self._scheduler.check_integrity()
        return outputs

    # Adapter loads and pages.
    def _take_reports(self) -> None:
        self._snapshots.take_reports()
        for report in self._loader.poll() if self._loader is not None else ():
            match report.done:
                case Done.LOADED:
                    self._count_load(report)
                    self._memory.adapter_manager.on_loaded(report.key)
                case Done.COPIED:
                    self._memory.costs.copy.observe(report.seconds, report.nbytes)
                    self.step_stats.on_adapter_copied(report.key, report.seconds, report.nbytes)
                    self._scheduler.on_adapter_copied(report.key)
                    self._calls.on_adapter_ready(report.key)
                case Done.FAILED:
                    self._counters.load_failures += 1
                    self.step_stats.on_load_failed(report.reason)
                    self._scheduler.on_adapter_failed(report.key, report.error, report.refusal)
                    self._calls.on_adapter_ready(report.key, not_loaded(report.error, report.refusal))

    def _count_load(self, report: LoaderReport) -> None:
        self._counters.load_seconds += report.seconds
        if report.from_disk:
            self._counters.loads_from_disk += 1
            self._memory.costs.load.observe(report.seconds, report.nbytes)
            self.step_stats.on_adapter_loaded(report.key, report.seconds, report.nbytes)
        else:
            self._counters.loads_from_host += 1

    def _settle(self, step: SchedulerOutput) -> float:
        """Wait for the step in flight before its pages are moved, swapped or read for a file; return the seconds that
        this took."""
        begun = time.perf_counter()
        if step.page_ops or self._pending_ops or step.snapshots.saves:
            self._executor.settle()
        return time.perf_counter() - begun

    def _apply_page_ops(self, step: SchedulerOutput) -> SchedulerOutput:
        """Apply the pending page operations in order, beginning with those left over after an exception. A request
        whose pages could not be swapped is removed from the step."""
        self._pending_ops += step.page_ops
        begun, swapped = time.perf_counter(), 0
        while self._pending_ops:
            op = self._pending_ops[0]
            try:
                swapped += self._executor.apply_page_ops((op,))
            except Exception as error:
                if isinstance(error, EngineDead) or not isinstance(op, SwapOut | SwapIn):
                    raise
                _LOG.warning(
                    "swapping the pages of request %s failed, so it is computed again: %s", op.request_id, error
                )
                self._pending_ops.insert(1, DropSwap(op.request_id))
                step = self._scheduler.on_swap_failed(op.request_id, step)
            self._pending_ops.popleft()
        self._executor.apply_page_ops(())
        self._memory.costs.page_copy.observe(time.perf_counter() - begun, swapped)
        return step

    def _apply_left_ops(self) -> None:
        """Apply the page operations of a step whose planning failed, so that the pages match the accounts."""
        self._pending_ops += self._scheduler.take_page_ops()
        if self._pending_ops:
            self._executor.settle()
            self._apply_page_ops(_NOTHING)

    def _send_orders(self, orders: AdapterOrders) -> None:
        if self._loader is None:
            return
        for key in orders.cancels:
            self._loader.cancel(key)
        for key in orders.loads:
            self._loader.load(key)
        for key, placed in orders.copies:
            self._loader.copy(key, placed)

    # Statistics.
    def _finish_step(self, wake_s: float | None, *, made_progress: bool) -> None:
        self._wake_s = wake_s
        self._made_progress = made_progress
        self._counters.last_step_s = time.monotonic()
        self._counters.failed = self._faults.total
        self.metrics.publish(describe_engine(self._parts, self._counters))
        if self._in_flight:
            costs, self._begun_s = self._memory.costs, time.perf_counter()
            pass_s = costs.step.seconds(self._in_flight[0].shape) + costs.lateness.seconds
            # With two threads this is twice the planning time before the end, because predictions are not exact.
            # Planning too early costs little: a request that arrives meanwhile is in the step after the next.
            self._plan_at_s = self._begun_s + pass_s - 4 * costs.lead.seconds
