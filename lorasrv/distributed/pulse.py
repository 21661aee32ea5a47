"""Pulse: notice within seconds that a process of the replica has died or stopped, whatever the others wait for.

Every rank sends a byte a second from a thread of its own. Rank 0 sees the connection end when the process does, and a
process that is stopped or stuck by its silence. Either way the other ranks are killed, so that whatever waits for them
raises. A server tells its clients and ends, with code 70: a part of a replica cannot serve, and a supervisor starts it
again.
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
QUIET_S = 2.5
"""Silence after which a rank counts as silent: the server gets no new requests."""
LAST_WORDS_S = 2.0
"""Time in which clients of a server that ends can still read why."""
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
        end: called once, when one is dead; ends the others.
        exit_: ends this process, with the reason, if it serves.
        how: returns how a rank has ended, as far as that is known; the end of a sentence.
    """

    def __init__(
        self,
        pulses: Mapping[int, socket.socket],
        end: Callable[[], None],
        exit_: Callable[[str], None] = end_process,
        how: Callable[[int], str] = lambda _: "",
    ) -> None:
        self._pulses, self._end, self._exit, self._how = dict(pulses), end, exit_, how
        self._heard = dict.fromkeys(self._pulses, time.monotonic())
        self._allowed_s = LOADING_S
        self._why: str | None = None
        self._is_known = threading.Event()
        self._last_words: Callable[[str], None] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-pulses", daemon=True)
        self._thread.start()

    def on_loaded(self) -> None:
        """Note that all ranks serve, so that silence is short from now on."""
        self._allowed_s = SILENCE_S

    def exit_when_lost(self, tell: Callable[[str], None]) -> None:
        """Have this process end when a rank is dead, `LAST_WORDS_S` after `tell` was called with the reason."""
        self._last_words = tell
        if self._why is not None:
            # It has died before there was anyone to tell.
            self._exit(self._why)

    @property
    def lost(self) -> str | None:
        """Return why a rank is dead; None while none is."""
        return self._why

    def wait_lost(self, seconds: float) -> str | None:
        """Wait until a rank is known to be dead, at most so long, and return why."""
        self._is_known.wait(seconds)
        return self._why

    @property
    def silence(self) -> str | None:
        """Return which rank has been silent for `QUIET_S` since all serve; None if none has."""
        if self._allowed_s != SILENCE_S:
            return None
        silent = self._silent_for(QUIET_S)
        return f"rank {min(silent)} is silent" if silent else None

    def close(self) -> None:
        """Stop watching: the ranks are to end."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        suspects: set[int] = set()
        while not self._closed.is_set():
            ready, _, _ = select.select(list(self._pulses.values()), [], [], PERIOD_S / 4)
            for rank, pulse in self._pulses.items():
                if pulse in ready:
                    if not _read(pulse):
                        self._tell(f"rank {rank} has ended{self._how(rank)}")
                        return
                    self._heard[rank] = time.monotonic()
            # Twice: after the whole machine was stopped for a while, the ranks must be able to send first.
            silent = self._silent_for(self._allowed_s)
            if stopped := silent & suspects:
                self._tell(f"rank {min(stopped)} has not answered for {self._allowed_s:g} s")
                return
            suspects = silent

    def _silent_for(self, seconds: float) -> set[int]:
        now = time.monotonic()
        return {rank for rank, at in self._heard.items() if now - at > seconds}

    def _tell(self, why: str) -> None:
        if self._closed.is_set():
            return
        self._why = why
        self._is_known.set()
        self._end()
        if (tell := self._last_words) is not None:
            tell(why)
            time.sleep(LAST_WORDS_S)
            self._exit(why)


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
