"""End a server that is still starting, at SIGINT or SIGTERM.

The handler ends the process itself, because a handler's exception surfaces wherever the main thread is: an extension
module may turn it into another error, and a destructor drops it. Imports nothing that takes time.
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

    From now on, and also after `started`, SIGHUP (a closed terminal) counts as SIGTERM, unless it is ignored (`nohup`).
    """
    global _starting
    _starting = True
    atexit.register(ignore_signals)
    for number in EXIT_CODES:
        signal.signal(number, handle)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _hung_up)


def _hung_up(*_: object) -> None:
    """Treat the first SIGHUP as SIGTERM, and ignore others: when a shell ends, it sends one, and so does the system."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


def ignore_signals() -> None:
    """Ignore signals, so that none changes the exit code of a process that has nothing left to do: at its end, Python
    restores the system's default handlers in place of its own."""
    for number in (*EXIT_CODES, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def started() -> None:
    """Leave signals to the server from now on: it closes by itself, and `handle` does nothing."""
    global _starting
    _starting = False


@contextmanager
def closing(close: Callable[[], None]) -> Iterator[None]:
    """Call `close` if a signal ends the process within the block, before functions that were registered earlier.

    The main thread may hold any lock at that moment, so `close` must take none.
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
