"""Pulse: notice within seconds that a process of the replica has died or stopped, whatever the others wait for.

Every rank sends a byte a second from a thread of its own. Rank 0 sees the connection end when the process does, and a
process that is stopped or stuck by its silence. Either way the whole replica ends, with code 70: a part of it cannot
serve, and a supervisor starts it again.
"""

import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

_LOG = logging.getLogger(__name__)
EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h, as the watchdog's."""
PERIOD_S = 1.0
SILENCE_S = 8.0
"""Silence after which a rank counts as dead; with the second look, less than ten seconds after it has stopped."""
LOADING_S = 120.0
"""The same while a rank imports and loads, when a thread of its may wait long for the interpreter."""


def end_process(why: str) -> None:
    """Exit at once: another thread may wait for a rank that will not answer. The store is consistent at any moment."""
    _LOG.critical("%s; the server exits with code %d", why, EXIT_CODE)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(EXIT_CODE)


class PulseMonitor:
    """Watch the ranks from rank 0, in a thread.

    Args:
        pulses: connection of each rank.
        end: called once, with the reason, when one is dead.
    """

    def __init__(self, pulses: Mapping[int, socket.socket], end: Callable[[str], None] = end_process) -> None:
        self._pulses, self._end = dict(pulses), end
        self._allowed_s = LOADING_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-pulses", daemon=True)
        self._thread.start()

    def loaded(self) -> None:
        """Note that all ranks serve, so that silence is short from now on."""
        self._allowed_s = SILENCE_S

    def close(self) -> None:
        """Stop watching: the ranks are to end."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        heard = dict.fromkeys(self._pulses, time.monotonic())
        suspects: set[int] = set()
        while not self._closed.is_set():
            ready, _, _ = select.select(list(self._pulses.values()), [], [], PERIOD_S / 4)
            for rank, pulse in self._pulses.items():
                if pulse in ready:
                    if not _read(pulse):
                        self._tell(f"rank {rank} has ended")
                        return
                    heard[rank] = time.monotonic()
            # Twice: after the whole machine was stopped for a while, the ranks must be able to send first.
            silent = {rank for rank, at in heard.items() if time.monotonic() - at > self._allowed_s}
            if stopped := silent & suspects:
                self._tell(f"rank {min(stopped)} has not answered for {self._allowed_s:g} s")
                return
            suspects = silent

    def _tell(self, why: str) -> None:
        if not self._closed.is_set():
            self._end(why)


def beat(pulse: socket.socket, ended: Callable[[], None]) -> None:
    """Send pulses until the other end closes; then call `ended`. For a thread of a rank."""
    while True:
        ready, _, _ = select.select([pulse], [], [], PERIOD_S)
        try:
            if ready and not pulse.recv(1):
                break
            pulse.send(b".")
        except OSError:
            break
    ended()


def _read(pulse: socket.socket) -> bool:
    """Return whether the other end is still there."""
    try:
        return bool(pulse.recv(256))
    except OSError:
        return False
