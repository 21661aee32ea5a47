"""Pulse: notice within seconds that a process of the replica has died or stopped, whatever the others wait for.

Every rank sends one byte per second from its own thread. Rank 0 notices a process that ends because the connection
closes, and one that is stopped or stuck because no bytes arrive. In both cases all other ranks are killed, so that
everything that waits for them raises. A server then tells its clients and exits with code 70: it cannot serve with a
part of a replica, and a supervisor restarts it.
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
"""EX_SOFTWARE of sysexits.h, like the watchdog's exit code."""
PERIOD_S = 1.0
SILENCE_S = 8.0
"""Silence after which a rank counts as dead. With the second check, it is found less than ten seconds after it has
stopped."""
QUIET_S = 2.5
"""Silence after which a rank counts as silent: the server gets no new requests."""
LAST_WORDS_S = 2.0
"""Seconds in which clients can still read why the server ends."""
LOADING_S = 120.0
"""`SILENCE_S` while a rank imports and loads: its pulse thread may then wait long for the GIL."""


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
        end: called once, when a rank is dead; ends the others.
        exit_: ends this process, with the reason, if it serves.
        how: returns how a rank has ended, if known, as the end of a sentence.
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
        """Note that all ranks serve, so that the shorter limit of silence applies from now on."""
        self._allowed_s = SILENCE_S

    def exit_when_lost(self, tell: Callable[[str], None]) -> None:
        """Have this process exit when a rank is dead, `LAST_WORDS_S` after `tell` is called with the reason."""
        self._last_words = tell
        if self._why is not None:
            # The rank died before `tell` was known.
            self._exit(self._why)

    @property
    def lost(self) -> str | None:
        """Return why a rank is dead; None if all are alive."""
        return self._why

    def wait_lost(self, seconds: float) -> str | None:
        """Wait at most `seconds` until a rank is known to be dead, and return why."""
        self._is_known.wait(seconds)
        return self._why

    @property
    def silence(self) -> str | None:
        """Return which rank has been silent for `QUIET_S`, once all serve; None if none has."""
        if self._allowed_s != SILENCE_S:
            return None
        silent = self._silent_for(QUIET_S)
        return f"rank {min(silent)} is silent" if silent else None

    def close(self) -> None:
        """Stop watching, because the ranks are being ended."""
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
            # Check twice: after a pause of the whole machine, the ranks must get a chance to send.
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
    """Return whether the other end is still open."""
    try:
        return bool(pulse.recv(256))
    except OSError:
        return False
