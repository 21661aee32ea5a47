"""Drain the server before shutdown: first report not ready, then refuse new requests while the running ones finish.

The listener stays open until then, so that clients and load balancers get a response instead of a refused connection.
"""

import asyncio
import time
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import describe_at
from lorasrv.errors import ServerStopping

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics", "/v1/replica"})
"""Served until the end, for monitoring and edges."""
PEER_PATHS = "/v1/pages/"
"""Prefix of the paths by which another server takes pages of requests that run here; served while draining, too."""


class Draining:
    """Hold the shutdown state and the deadline of running requests. Set by a signal, read by the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: float | None = None

    @property
    def is_on(self) -> bool:
        """Return whether new requests are refused."""
        return self._until_s is not None

    @property
    def is_over(self) -> bool:
        """Return whether the time of running requests is over, too."""
        return self._until_s is not None and self._clock() >= self._until_s

    def begin(self, seconds: float) -> None:
        """Start draining, with `seconds` for running requests; a later call can only shorten the time."""
        until_s = self._clock() + seconds
        self._until_s = until_s if self._until_s is None else min(self._until_s, until_s)


class DrainMiddleware:
    """Refuse requests while draining, and ask clients to close their connections.

    At the end of the drain, requests are cancelled: those without an answer yet are refused, and an answer that has
    begun is cut off.
    """

    def __init__(self, app: ASGIApp, draining: Draining) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        path, has_begun = scope["path"], False

        async def send_and_close(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                if self._draining.is_on:
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        async def refuse(why: str) -> None:
            await describe_at(path, ServerStopping(why)).response()(scope, receive, send_and_close)

        if self._draining.is_on and path not in OPEN_PATHS and not path.startswith(PEER_PATHS):
            await refuse("the server is shutting down and takes no new requests")
            return
        try:
            await self._app(scope, receive, send_and_close)
        except asyncio.CancelledError:
            if not self._draining.is_over:
                raise
            if not has_begun:
                await refuse("the server has shut down before the request was done")
