"""What becomes of requests when a step fails: those that it cannot be computed for end with an error, the others go on.

Where a step can fail:

- while it is planned, or its results are entered: our own bookkeeping is wrong. Those that run (then, if that was not
  enough, all) end; if the accounts of the pool do not add up after that, or a third plan in a row fails, the engine
  ends too: a wrong page would be a wrong token.
- while pages are arranged: a request whose pages did not get to host memory or back is computed again.
- while it is computed: `step_attempts` has found who cannot be.
"""

import logging
from collections.abc import Iterable, Mapping

from lorasrv.engine.poison_requests import PoisonGuard
from lorasrv.engine.step_retry import is_out_of_memory
from lorasrv.outputs import EngineOutput, Refusal, RequestId
from lorasrv.request import Request
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.scheduler_output import SchedulerOutput

_LOG = logging.getLogger(__name__)
MAX_PLANS_FAILED = 3
FAILED = "a step of the engine failed, and this request was in it; the server's log says how"
TOO_LARGE = "the machine has too little memory left to compute this request, even alone; try again later"


class StepFailureHandler:
    """Ends requests. For the engine's thread. `total` counts requests that were ended so."""

    def __init__(self, scheduler: Scheduler, poison: PoisonGuard) -> None:
        self._scheduler = scheduler
        self._poison = poison
        self._plans_failed = 0
        self.total = 0

    def on_scheduled(self) -> None:
        """A step was planned to its end."""
        self._plans_failed = 0

    def on_schedule_error(self, error: Exception) -> list[EngineOutput]:
        """It was not. Raises: the error, if no other plan is to be expected; AssertionError: the accounts are wrong."""
        self._plans_failed += 1
        if self._plans_failed >= MAX_PLANS_FAILED:
            raise error
        _LOG.error("a step could not be planned", exc_info=error)
        requests = self._scheduler.requests()
        if self._plans_failed == 1:
            requests = requests[: self._scheduler.num_running]
        self._end(requests, Refusal.STEP, FAILED)
        self._scheduler.check_integrity()
        return self._scheduler.take_outputs()

    def on_compute_error(self, failed: Mapping[RequestId, Exception]) -> None:
        """These cannot be, each alone. Raises: AssertionError: the accounts are wrong."""
        requests = [request for request in self._scheduler.requests() if request.request_id in failed]
        large = [request for request in requests if is_out_of_memory(failed[request.request_id])]
        self._end(large, Refusal.MEMORY, TOO_LARGE)
        self._end([request for request in requests if request not in large], Refusal.STEP, FAILED)

    def on_update_error(self, step: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        """The results of a step were not, or not all. Raises: AssertionError: the accounts are wrong."""
        _LOG.error("the results of a step could not be entered", exc_info=error)
        self._scheduler.discard(step)
        names = {share.request_id for share in step.scheduled}
        self._end([r for r in self._scheduler.requests() if r.request_id in names], Refusal.STEP, FAILED)
        self._scheduler.check_integrity()
        return self._scheduler.take_outputs()

    def _end(self, requests: Iterable[Request], refusal: Refusal, why: str) -> None:
        """Raises: AssertionError: what one of them holds could not be taken back."""
        ended = list(requests)
        if refusal is Refusal.STEP:
            # Not those that memory was short for: that passes.
            self._poison.record(request.message for request in ended)
        for request in ended:
            try:
                self._scheduler.fail(request.request_id, why, refusal)
            except Exception as error:
                raise AssertionError(f"request {request.request_id} could not be ended") from error
        self.total += len(ended)
