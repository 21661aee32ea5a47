"""Run a whole server inside a Ray actor: in a thread, on its own port. No request goes through Ray."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from api.config.lora_module_path import ModulesRefused
from api.server import Ready, Running, bind, serve_on

if TYPE_CHECKING:
    from api.config.settings import ServerSettings

_LOG = logging.getLogger(__name__)
LEFT_S = 5.0
"""Time that a server has to end after `--drain-s`."""


class HostedServer:
    """Start a server in the constructor, which returns when the server is ready.

    Args:
        name: written into each line of its log.
        host: address of this machine, as others reach it.
        log: file that log lines go to; None: stderr of this process.
        computes: whether it has an engine.

    Raises:
        LorasrvError, AdapterError, OSError: the server does not start.
    """

    def __init__(
        self,
        settings: "ServerSettings",
        name: str,
        host: str,
        port: int = 0,
        log: str | None = None,
        *,
        computes: bool = True,
    ) -> None:
        self.settings, self.name = settings, name
        self._running: Running | None = None
        self._ended = False
        started: Future[Running] = Future()
        self._thread = threading.Thread(target=self._serve, args=(host, port, log, computes, started), name="server")
        self._thread.start()
        self._running = started.result()

    def _serve(self, host: str, port: int, log: str | None, computes: bool, started: "Future[Running]") -> None:
        settings = self.settings
        try:
            with logged(settings, self.name, log), bind(host, port) as listener:
                _start_children_from_any_loop()
                begun = time.monotonic()
                serve_on(listener, settings, _no_progress, started.set_result, begun, computes=computes)
        except ModulesRefused as error:
            started.set_exception(ValueError("; ".join([str(error), *error.reasons])))
        except BaseException as error:
            if started.done():
                _LOG.exception("the server ended")
            else:
                started.set_exception(error)
        finally:
            self._ended = True

    @property
    def running(self) -> Running:
        """Return the running server."""
        assert self._running is not None
        return self._running

    def check_health(self) -> None:
        """Do nothing while the server is healthy.

        Raises:
            RuntimeError: it is not healthy, for the given reason; Serve then starts another.
        """
        if self._ended:
            raise RuntimeError("the server ended")
        if problem := self.running.services.health_problem:
            raise RuntimeError(problem)

    @property
    def is_ready(self) -> bool:
        """Return whether it should get requests."""
        return not self._ended and self.running.services.ready_problem is None

    def ready(self) -> Ready:
        """Return the description that the server gave when it started."""
        return self.running.ready

    def close(self) -> None:
        """Drain the server and wait for its end; do nothing if it never started."""
        if self._running is not None:
            self._running.stop()
            self._thread.join(self.settings.drain_s + LEFT_S)


def _start_children_from_any_loop() -> None:
    """Restore asyncio's own event loop policy: under uvloop's, which Ray sets, asyncio's loops cannot start processes.

    The server's loop is asyncio's, and it starts the grammar compiler as a process. From Python 3.14 on, policies have
    no effect here.
    """
    if sys.version_info < (3, 14):
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())


@contextmanager
def logged(settings: "ServerSettings", name: str, path: str | None) -> Iterator[None]:
    """Write the log to a file, each line with this name; to stderr if the file cannot be opened."""
    from api.observability.logs import written

    def record(*parts: Any, **named: Any) -> logging.LogRecord:
        made = logging.LogRecord(*parts, **named)
        made.replica = name
        return made

    # Ray's own record factory would add the time a second time.
    logging.setLogRecordFactory(record)
    with ExitStack() as opened:
        stream: TextIO = sys.stderr
        if path is not None:
            with suppress(OSError):
                stream = opened.enter_context(open(path, "a", buffering=1, encoding="utf-8"))
        opened.enter_context(written(settings.log_format, settings.log_level, stream))
        yield


def _no_progress(what: str, share: float) -> None:
    """Show nothing: the command that starts the replicas shows how many are ready."""
