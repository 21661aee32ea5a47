"""End a server that is still starting, at SIGINT or SIGTERM.

The handler ends the process by itself. An exception that a handler raises surfaces wherever the main thread is: an
extension module makes another error of it, and a destructor drops it. Imports nothing that takes time.
"""

import atexit
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 0}
_closers: list[Callable[[], None]] = []
_starting = False


def end_at_signals() -> None:
    """Let both signals end the process from now on, until `started`; for the main thread.

    A terminal that is closed then counts as SIGTERM, also later, unless SIGHUP is ignored (`nohup`).
    """
    global _starting
    _starting = True
    atexit.register(ignore_signals)
    for number in EXIT_CODES:
        signal.signal(number, handle)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _hung_up)


def _hung_up(*_: object) -> None:
    """Count once: a shell that ends tells its jobs, and then the system does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


def ignore_signals() -> None:
    """Let no signal change the exit code of a process that has nothing left to do: Python ends with the system's own
    handlers in place of those that it has."""
    for number in (*EXIT_CODES, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def started() -> None:
    """Leave signals to the server, which closes by itself: those that come while it does change nothing."""
    global _starting
    _starting = False


@contextmanager
def closing(close: Callable[[], None]) -> Iterator[None]:
    """Have `close` called if the process ends within the block, before whatever was registered earlier.

    The main thread may hold any lock then, so `close` must take none.
    """
    _closers.append(close)
    try:
        yield
    finally:
        _closers.remove(close)


def handle(number: int, _: FrameType | None) -> None:
    """End the process if the server is starting."""
    if not _starting:
        return
    for close in reversed(_closers):
        with suppress(Exception):
            close()
    os._exit(EXIT_CODES[signal.Signals(number)])
