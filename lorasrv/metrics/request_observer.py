"""Observers of requests, for everything that keeps records of them: statistics, traces, queue bounds. No torch.

Everything here belongs to the event loop's thread. For each accepted request, `on_finished` is called exactly once,
after its last `on_output`, however it ends. A request that was aborted ends when the engine has finished it.
"""

import logging
from collections.abc import Sequence

from lorasrv.errors import EngineDead, ServerStopping, name_of
from lorasrv.outputs import RequestId, RequestOutput
from lorasrv.request import EngineCoreRequest

_LOG = logging.getLogger(__name__)
ENGINE_ENDED = frozenset({name_of(EngineDead), name_of(ServerStopping)})
"""Reasons of requests that ended because their engine ended, by itself or because the server stops."""


class RequestObserver:
    """Observe the requests of one engine. Methods do nothing unless they are overridden."""

    def on_accepted(self, requests: Sequence[EngineCoreRequest], arrived_s: float) -> None:
        """Note the choices of one request, which are on their way to the engine.

        Args:
            arrived_s: arrival time of the request, in monotonic seconds.
        """

    def on_output(self, request_id: RequestId, output: RequestOutput) -> None:
        """Note an output of the engine, also one that comes after an abort. If the engine does not die, the last one
        is finished."""

    def on_finished(self, request_id: RequestId, why: str = "") -> None:
        """Forget a request. Unknown ids are ignored.

        Args:
            why: why it was aborted: `client`, or an error as `name_of` spells it. The engine may have finished it for
                another reason, which its last output tells.
        """

    def on_refused(self, error: BaseException) -> None:
        """Note that a request was not accepted. A cancellation means that the client has left."""


class RequestObservers(RequestObserver):
    """Pass each event on to several observers. If one fails, the others still get the event, and the client its
    output."""

    def __init__(self, observers: Sequence[RequestObserver]) -> None:
        self._observers = tuple(observers)

    def on_accepted(self, requests: Sequence[EngineCoreRequest], arrived_s: float) -> None:
        for observer in self._observers:
            try:
                observer.on_accepted(requests, arrived_s)
            except Exception:
                _LOG.exception("an accepted request was not recorded")

    def on_output(self, request_id: RequestId, output: RequestOutput) -> None:
        for observer in self._observers:
            try:
                observer.on_output(request_id, output)
            except Exception:
                _LOG.exception("an output of request %s was not recorded", request_id)

    def on_finished(self, request_id: RequestId, why: str = "") -> None:
        for observer in self._observers:
            try:
                observer.on_finished(request_id, why)
            except Exception:
                _LOG.exception("the end of request %s was not recorded", request_id)

    def on_refused(self, error: BaseException) -> None:
        for observer in self._observers:
            try:
                observer.on_refused(error)
            except Exception:
                _LOG.exception("a refused request was not recorded")
