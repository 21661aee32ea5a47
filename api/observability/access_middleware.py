"""Around every request: what came, what went, how long it took, for whoever counts, logs or traces. No contents, unless
asked for. Plain ASGI, the outermost of all, so that what any other layer answers is seen.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.principal import caller_of
from lorasrv.metrics.request_stats import REQUEST_LISTENER, FinishedRequestStats

_LOG = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
NO_ROUTE = "none"
MAX_KEPT_BYTES = 2048
MAX_ANSWERS = 1024
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestInfo:
    """One HTTP request. `answers` are what the engine has computed for it, in the order of their ends; `broken`: its
    answer had begun when something failed. `began_s` is monotonic, `began_ns` Unix time. `sent` and `received` hold the
    first bytes of both bodies if they are to be kept.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.began_s = time.monotonic()
        self.began_ns = time.time_ns()
        self.seconds = 0.0
        self.status = 0
        self.broken = False
        self.headers: dict[str, str] = {}
        self.answers: list[FinishedRequestStats] = []
        self.received = bytearray()
        self.sent = bytearray()
        self._is_over = False

    @property
    def method(self) -> str:
        method = str(self._scope["method"])
        return method if method in _METHODS else "other"

    @property
    def route(self) -> str:
        """The template that matched, `/v1/adapters/{adapter_id}`; never what the client wrote."""
        return str(getattr(self._scope.get("route"), "path_format", NO_ROUTE))

    @property
    def request_id(self) -> str:
        return str(self._scope.get("state", {}).get("request_id", ""))

    @property
    def principal(self) -> str:
        """Whose key it was."""
        return caller_of(self._scope).principal

    def asked(self, name: str) -> str:
        """A header of the request; "" if it is not there."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self._scope["headers"] if key == wanted), "")

    def ended(self, request: FinishedRequestStats) -> None:
        """The engine is done with a part of it. Not told when it is over: a batch runs on in its context."""
        if not self._is_over and len(self.answers) < MAX_ANSWERS:
            self.answers.append(request)

    def over(self) -> None:
        """Its answer has been sent, or never will be."""
        self._is_over = True
        self.seconds = time.monotonic() - self.began_s
        self.status = self.status or CLIENT_CLOSED_REQUEST


CURRENT: ContextVar[RequestInfo | None] = ContextVar("current_request", default=None)
"""The request in whose context this runs, for log lines."""
Sink = Callable[[RequestInfo], None]


class AccessMiddleware:
    """Tells every sink of every request when it is over. `keeps_text`: with the beginnings of both bodies."""

    def __init__(self, app: ASGIApp, sinks: Sequence[Sink], keeps_text: bool = False) -> None:
        self._app = app
        self._sinks = sinks
        self._keeps_text = keeps_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = RequestInfo(scope)
        CURRENT.set(seen)
        REQUEST_LISTENER.set(seen.ended)

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                seen.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in message.get("headers", ())}
            elif self._keeps_text and message["type"] == "http.response.body":
                _keep(seen.sent, message.get("body", b""))
            await send(message)

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                _keep(seen.received, message.get("body", b""))
            return message

        try:
            await self._app(scope, watched_receive if self._keeps_text else receive, watched_send)
        except BaseException:
            seen.broken = True
            raise
        finally:
            seen.over()
            self._tell(seen)

    def _tell(self, seen: RequestInfo) -> None:
        for sink in self._sinks:
            try:
                sink(seen)
            except Exception:
                # Who only looks on must not cost a client its answer.
                _LOG.exception("seeing request %s failed", seen.request_id)


def _keep(kept: bytearray, more: bytes) -> None:
    kept += more[: MAX_KEPT_BYTES - len(kept)]
