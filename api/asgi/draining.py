"""How a server comes to its end: not ready at once, no new requests, those that it has go on for a while.

The listener stays open meanwhile, so that clients and load balancers that do not know yet are told, instead of being
refused a connection.
"""

import time
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import describe_at
from lorasrv.errors import ServerStopping

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"})
"""What is answered to the end: whoever watches wants to see it."""


class Draining:
    """Whether the server is ending, and until when requests may go on. Set by a signal, read by the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: float | None = None

    @property
    def is_on(self) -> bool:
        """No new requests."""
        return self._until_s is not None

    @property
    def is_over(self) -> bool:
        """Nor old ones."""
        return self._until_s is not None and self._clock() >= self._until_s

    def begin(self, seconds: float) -> None:
        """Requests may go on for so long. What was said before is not made longer."""
        until_s = self._clock() + seconds
        self._until_s = until_s if self._until_s is None else min(self._until_s, until_s)


class DrainMiddleware:
    """Refuses requests once draining is on, and asks clients to close their connections."""

    def __init__(self, app: ASGIApp, draining: Draining) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self._draining.is_on:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if self._draining.is_on and scope["path"] not in OPEN_PATHS:
            error = ServerStopping("the server is shutting down and takes no new requests")
            await describe_at(scope["path"], error).response()(scope, receive, send_and_close)
        else:
            await self._app(scope, receive, send_and_close)
