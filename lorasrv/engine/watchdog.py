"""Watchdog: notice an engine that is stuck, end all streams, and exit so that a supervisor can restart the process.

The engine thread *beats* whenever it makes progress: before each part of a step, and between steps. While it waits for
work it *rests*, for any time. A busy engine is not stuck: a long prompt is computed in chunks, each with a beat. The
first step may compile, so it may take five times as long.

The event loop watches the engine. A timer of the interpreter (`faulthandler`), which needs neither loop nor GIL,
watches the event loop: unless the loop postpones it, it writes all stacks and ends the process.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

_LOG = logging.getLogger(__name__)
EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h. The timer exits with 1 instead: faulthandler allows no other code."""
FIRST_STEP_FACTOR = 5.0
LAST_RESORT_FACTOR = 2.0
LAST_WORDS_S = 2.0
"""Time in which error events and /health can still be read."""
CHECKS = 20
"""Number of checks per limit."""
STDERR = 2


class Heartbeat:
    """Hold when the engine thread last made progress: written by that thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._has_computed = False

    def beat(self) -> None:
        """Note that the engine makes progress."""
        self._since_s = self._clock()

    def rest(self) -> None:
        """Note that the engine has nothing to do."""
        self._since_s = None

    def on_step_computed(self) -> None:
        """Note that a step is done, so everything is compiled."""
        self._has_computed = True

    @property
    def still_s(self) -> float:
        """Return the seconds since the last beat; 0 while the engine rests."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s

    def allowed_s(self, limit_s: float) -> float:
        """Return how long the current step may take: `limit_s`, or more for the first step."""
        return limit_s if self._has_computed else FIRST_STEP_FACTOR * limit_s

    def is_stuck(self, limit_s: float) -> bool:
        """Return whether the last beat is too long ago; never with a limit of 0."""
        return 0 < self.allowed_s(limit_s) < self.still_s


class WatchedEngine(Protocol):
    """Provide what the watchdog needs from an engine."""

    heartbeat: Heartbeat

    @property
    def is_alive(self) -> bool: ...

    def abort_all(self, why: str) -> None:
        """End every stream with an error and accept no more requests."""


class Watchdog:
    """Watch one engine from the event loop. With a limit of 0 seconds do nothing.

    Args:
        end: called with the exit code; does not return.
    """

    def __init__(self, engine: WatchedEngine, limit_s: float, end: Callable[[int], None] | None = None) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._end = end or end_now
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start watching, in the event loop."""
        if self._limit_s:
            self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Stop watching the engine, because it is being shut down. The timer keeps running: the shutdown must finish
        in time."""
        if self._task is not None:
            self._task.cancel()
            self._reset_timer()

    @staticmethod
    def disarm() -> None:
        """Stop the timer; do nothing if it does not run."""
        faulthandler.cancel_dump_traceback_later()

    async def _watch(self) -> None:
        was_stuck = False
        while True:
            self._reset_timer()
            await asyncio.sleep(min(1.0, self._limit_s / CHECKS))
            if not self._engine.is_alive:
                await self._terminate("the engine has ended")
            # Require two checks in a row: after a pause of the whole process, the engine must get a chance to beat.
            is_stuck = self._engine.heartbeat.is_stuck(self._limit_s)
            if is_stuck and was_stuck:
                seconds = self._engine.heartbeat.still_s
                await self._terminate(f"the engine is stuck: its step has taken {seconds:.1f} s so far")
            was_stuck = is_stuck

    async def _terminate(self, why: str) -> None:
        _LOG.critical("%s; every request ends with an error, then the server exits with code %d", why, EXIT_CODE)
        faulthandler.dump_traceback(STDERR, all_threads=True)
        self._engine.abort_all(why)
        await asyncio.sleep(LAST_WORDS_S)
        self._end(EXIT_CODE)

    def _reset_timer(self) -> None:
        seconds = LAST_RESORT_FACTOR * self._engine.heartbeat.allowed_s(self._limit_s) + LAST_WORDS_S
        faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


def end_now(code: int) -> None:
    """Exit without cleanup: a thread that hangs cannot be joined. The store is consistent at any moment."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
