"""Step failures: end the requests that make a step fail, and continue with the others.

Where a step can fail:

- Planning it, or recording its results: the scheduler's bookkeeping is wrong. The running requests end; if that does
  not help, all end. If the accounts of the pool are inconsistent then, or a third plan in a row fails, the engine ends
  too, because a wrong page would give wrong tokens.
- Swapping pages: a request whose pages could not be swapped out or in is computed again.
- Computing it: `StepRetrier` has found the requests that cannot be computed.
"""

import logging
from collections.abc import Iterable, Mapping

from lorasrv.engine.poison_requests import PoisonGuard
from lorasrv.outputs import EngineOutput, Refusal, RequestId
from lorasrv.request import Request
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.scheduler_output import SchedulerOutput
from lorasrv.worker.device import is_out_of_memory

_LOG = logging.getLogger(__name__)
MAX_PLANS_FAILED = 3
FAILED = "a step of the engine failed, and this request was in it; the server's log has the error"
TOO_LARGE = "the machine has too little memory left to compute this request, even alone; try again later"


class StepFailureHandler:
    """End the requests of failed steps; `total` counts them. For the engine thread."""

    def __init__(self, scheduler: Scheduler, poison: PoisonGuard) -> None:
        self._scheduler = scheduler
        self._poison = poison
        self._plans_failed = 0
        self.total = 0

    def on_scheduled(self) -> None:
        """Note that a step was planned without an error."""
        self._plans_failed = 0

    def on_schedule_error(self, error: Exception) -> list[EngineOutput]:
        """End the running requests, or all, after planning failed.

        Returns:
            The outputs of the ended requests.
        Raises:
            Exception: `error`, after `MAX_PLANS_FAILED` failures in a row.
            AssertionError: the accounts are inconsistent.
        """
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
        """End the requests that cannot be computed even alone.

        Raises:
            AssertionError: the accounts are inconsistent.
        """
        requests = [request for request in self._scheduler.requests() if request.request_id in failed]
        large = [request for request in requests if is_out_of_memory(failed[request.request_id])]
        self._end(large, Refusal.MEMORY, TOO_LARGE)
        self._end([request for request in requests if request not in large], Refusal.STEP, FAILED)

    def on_update_error(self, step: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        """End the requests of a step whose results could not be recorded, or only in part.

        Returns:
            The outputs of the ended requests.
        Raises:
            AssertionError: the accounts are inconsistent.
        """
        _LOG.error("the results of a step could not be entered", exc_info=error)
        self._scheduler.discard(step)
        names = {s.request_id for s in step.requests}
        self._end([r for r in self._scheduler.requests() if r.request_id in names], Refusal.STEP, FAILED)
        self._scheduler.check_integrity()
        return self._scheduler.take_outputs()

    def _end(self, requests: Iterable[Request], refusal: Refusal, why: str) -> None:
        """Fail requests.

        Raises:
            AssertionError: resources of one of them could not be freed.
        """
        ended = list(requests)
        if refusal is Refusal.STEP:
            # A shortage of memory is temporary: such requests are not poison.
            self._poison.record(request.message for request in ended)
        for request in ended:
            try:
                self._scheduler.fail(request.request_id, why, refusal)
            except Exception as error:
                raise AssertionError(f"request {request.request_id} could not be ended") from error
        self.total += len(ended)
