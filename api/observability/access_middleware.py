"""Observe each HTTP request for metrics, logs and spans: route, status, times; contents only on request.

Plain ASGI, and the outermost middleware, so that it sees the responses of all other layers.
"""

import logging
import re
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.asgi.sse import CHUNKS
from api.auth.principal import PREFIX, caller_of
from api.errors import ERROR_CAUSE, ERROR_CODE
from api.observability.logs import CURRENT
from lorasrv.metrics.request_stats import REQUEST_LISTENER, FinishedRequestStats

_LOG = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
NO_ROUTE = "none"
MAX_KEPT_BYTES = 2048
MAX_ANSWERS = 1024
MAX_PATH_BYTES = 200
_SECRET = re.compile(f"({PREFIX})\\w+".encode())
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestInfo:
    """Describe one HTTP request.

    Attributes:
        answers: finished engine requests, in the order in which they ended.
        broken: whether something failed after the response had begun. A stream whose answer fails keeps its status.
        began_s, began_ns: start in monotonic seconds, and in Unix nanoseconds.
        received, sent: first bytes of both bodies, if they are kept.
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
        self._open: set[str] = set()
        self._when_over: Callable[[], object] | None = None

    @property
    def method(self) -> str:
        method = str(self._scope["method"])
        return method if method in _METHODS else "other"

    @property
    def route(self) -> str:
        """Return the matched template, such as `/v1/adapters/{adapter_id}`; never the client's text."""
        return str(getattr(self._scope.get("route"), "path_format", NO_ROUTE))

    @property
    def path(self) -> str:
        """Return the beginning of the path as the client sent it, with escapes, without query and API keys."""
        path = self._scope.get("raw_path") or self._scope["path"].encode("utf-8", "surrogateescape")
        path = _SECRET.sub(rb"\1********", path)
        return bytes(path[:MAX_PATH_BYTES]).decode("ascii", "backslashreplace")

    @property
    def request_id(self) -> str:
        return str(self._scope.get("state", {}).get("request_id", ""))

    @property
    def error_code(self) -> str:
        """Return the code of the error response; "" if there was none."""
        return self._scope.get(ERROR_CODE) or ""

    @property
    def error_cause(self) -> str:
        """Return the error's details that the client was not told; "" if there are none."""
        return self._scope.get(ERROR_CAUSE) or ""

    @property
    def principal(self) -> str:
        """Return the principal of the request's key."""
        return caller_of(self._scope).principal

    def asked(self, name: str) -> str:
        """Return a request header; "" if missing."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self._scope["headers"] if key == wanted), "")

    @property
    def prompts(self) -> list[FinishedRequestStats]:
        """Return one answer per prompt, the first choice, so that a prompt with several choices counts once."""
        return [answer for answer in self.answers if not answer.is_further] or self.answers[:1]

    def on_request_accepted(self, request_id: str) -> None:
        """Note a request to the engine."""
        self._open.add(request_id)

    def on_request_finished(self, request: FinishedRequestStats) -> None:
        """Add a finished engine request."""
        self._open.discard(request.request_id)
        if len(self.answers) < MAX_ANSWERS:
            self.answers.append(request)
        self._end_if_over()

    def on_response_ended(self, when_over: Callable[[], object]) -> None:
        """Note that the response has been sent, or never will be.

        Args:
            when_over: called once all engine requests have finished, too. Those of a client that leaves finish within
                a step.
        """
        self.seconds = time.monotonic() - self.began_s
        self.status = self.status or CLIENT_CLOSED_REQUEST
        self._when_over = when_over
        self._end_if_over()

    def _end_if_over(self) -> None:
        """Call `when_over` once the response and all engine requests have ended."""
        if self._when_over is None or self._open:
            return
        self.broken |= self.status < 400 and any(answer.failed for answer in self.answers)
        when_over, self._when_over = self._when_over, None
        when_over()


Sink = Callable[[RequestInfo], None]


class AccessMiddleware:
    """Report each request to every sink once its response and its engine requests have ended; with `keeps_text`,
    including the beginnings of both bodies."""

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
        REQUEST_LISTENER.set(seen)

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

        if self._keeps_text:
            scope.get("extensions", {}).pop(CHUNKS, None)
        try:
            await self._app(scope, watched_receive if self._keeps_text else receive, watched_send)
        except BaseException:
            seen.broken = True
            raise
        finally:
            # In this context, so that log lines have the request's id.
            seen.on_response_ended(partial(copy_context().run, self._tell, seen))

    def _tell(self, seen: RequestInfo) -> None:
        for sink in self._sinks:
            try:
                sink(seen)
            except Exception:
                # A failing observer must not cost a client its response.
                _LOG.exception("observing request %s failed", seen.request_id)


def _keep(kept: bytearray, more: bytes) -> None:
    kept += more[: MAX_KEPT_BYTES - len(kept)]
