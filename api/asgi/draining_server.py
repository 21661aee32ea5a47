"""Run an application in uvicorn, and drain before shutdown."""

import signal
import socket
from collections import Counter
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from api.asgi.draining import Draining
from api.asgi.limits import ConnectionLimits
from api.asgi.protocol import ACCEPTED_AT_ONCE, allow_connections, bounded

GRACE_S = 5
"""Most time for requests to finish after Ctrl-C, because a user waits at the terminal."""
WAITING = 2048
"""Most connections that wait in the kernel to be accepted."""
LAST_WORDS_S = 2
"""Time that aborted requests have, after the drain, to send their last response."""


class DrainingServer(uvicorn.Server):
    """Extend uvicorn: report readiness, and drain before shutdown.

    In the main thread, SIGINT and SIGTERM start the drain; other threads call `handle_exit`. Unlike uvicorn's server,
    this one does not raise the signal again after its shutdown: `run` returns.

    Args:
        draining: state shared with the application, whose middleware refuses requests by it.
        drain_s: seconds for running requests to finish.
        on_started: called when the server listens.
        cuts: counts closed connections by cause.
    """

    def __init__(
        self,
        app: ASGIApp,
        bounds: ConnectionLimits,
        draining: Draining,
        drain_s: float,
        on_started: Callable[[], None],
        cuts: Counter[str] | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=bounded(allow_connections(bounds), cuts),
            backlog=ACCEPTED_AT_ONCE,
            # By default, uvicorn would use uvloop if it happens to be installed.
            loop="asyncio",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
        super().__init__(config)
        self._draining = draining
        self._drain_s = drain_s
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio limits the kernel's queue to the number that it accepts at once; other clients would retry.
            listener.listen(WAITING)
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        draining = self._draining
        if draining.is_over:
            self.force_exit = self.should_exit = True
        seconds = min(self._drain_s, GRACE_S) if sig == signal.SIGINT else self._drain_s
        draining.begin(0.0 if draining.is_on else seconds)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down; called ten times a second."""
        if await super().on_tick(counter):
            return True
        if not self._draining.is_on:
            return False
        self.on_drain()
        return self._draining.is_over or not self.server_state.tasks

    def on_drain(self) -> None:
        """Stop work that would not end by itself; called at each tick while draining."""
