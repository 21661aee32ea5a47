"""Team: the threads that compute kernels on the CPU together, while the calling thread may do other work.

A *region* is a list of launches that all threads of a team run in order, each launch together
(`cpu_kernels.program`). The thread that opens a region may take part in it: it may leave after a launch and come back,
while the others continue. Idle threads spin for a moment, since waking one takes longer than a small launch, and then
sleep.

torch's OpenMP team cannot do this: it computes only while the thread that has started it waits.
"""

import atexit
import ctypes
import os
import threading
import time
from functools import cache

import numpy as np
import torch

from sgmv_kernels.cpu_arguments.block import COUNTERS
from sgmv_kernels.cpu_arguments.team import (
    HELPERS,
    ITEM_WORDS,
    NEVER,
    NEW_CLOCK,
    NEW_COUNT,
    NEW_ITEMS,
    SLEEPER_WORDS,
    SLEEPERS,
    STATE,
    STOP,
    TICKS,
)
from sgmv_kernels.cpu_runtime.kernel_cache import address_of

Arguments = ctypes.Array[ctypes.c_int64]
_SEMAPHORE_BYTES = 64
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def arguments(*args: int) -> Arguments:
    """Return a kernel's `args`, the two counters first; elements may be changed between runs."""
    return (ctypes.c_int64 * (len(args) + COUNTERS))(0, 0, *args)


def team_size() -> int:
    """Return the threads that the calling thread may use: torch's setting."""
    return torch.get_num_threads()


class Team:
    """Hold a team of `threads`, including the thread that opens regions.

    Raises:
        OSError: the system has no semaphores between threads of one process.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._words = _aligned(SLEEPERS + SLEEPER_WORDS * threads)
        self._semaphores = (ctypes.c_byte * (_SEMAPHORE_BYTES * threads))()
        self._compute, self._help = (_KERNEL(address_of("program", entry)) for entry in ("compute", "help"))
        self._block = arguments(self._words.ctypes.data, 0, 0, 0, 0)
        # The words of a single launch, and its clock.
        self._item, self._clock = np.zeros(ITEM_WORDS, dtype=np.int64), np.zeros(2, dtype=np.int64)
        self._in_use = threading.Lock()
        self._helpers = [
            threading.Thread(
                target=self._help,
                args=(arguments(self._words.ctypes.data, number),),
                name=f"kernels-{number}",
                daemon=True,
            )
            for number in range(1, threads)
        ]
        self._words[HELPERS] = len(self._helpers)
        for number, helper in enumerate(self._helpers, 1):
            if _libc().sem_init(self._semaphore(number), 0, 0):
                raise OSError("kernels need sem_init, which this system lacks; set OMP_NUM_THREADS=1")
            self._words[SLEEPERS + SLEEPER_WORDS * number + 1] = self._semaphore(number).value or 0
            helper.start()

    def take(self) -> bool:
        """Reserve the team for the calling thread; return False if it is in use."""
        return self._in_use.acquire(blocking=False)

    def give_back(self) -> None:
        """Let other threads use the team."""
        self._in_use.release()

    @property
    def is_open(self) -> bool:
        """Return whether a region was opened and is not complete yet."""
        # Its `OPEN` is a large number.
        return bool(self._words[STATE] > 1 << 32)

    def open(self, items: int, count: int, clock: int) -> None:
        """Let the other threads begin a region of `count` launches.

        Args:
            items: address of the launches, see `ITEM_WORDS`; they must be valid until `complete` has returned.
            clock: address of the words for ticks, see `cpu_kernels.program`.
        """
        self._run(items, count, clock, 0)

    def take_part(self, ticks: int) -> None:
        """Compute with the others until the region is complete, or leave it after `ticks` of the processor."""
        self._run(0, 0, 0, max(1, ticks))

    def complete(self) -> None:
        """Compute with the others, and wait for the end of the region."""
        self._run(0, 0, 0, NEVER)

    def launch(self, kernel: int, block: Arguments) -> None:
        """Run one kernel."""
        self._item[:2] = kernel, ctypes.addressof(block)
        self._run(self._item.ctypes.data, 1, self._clock.ctypes.data, NEVER)

    def close(self) -> None:
        """End the other threads once an open region is complete. No region may be opened afterwards."""
        while self._helpers and self.is_open:
            time.sleep(1e-3)
        self._words[STOP] = 1
        for number, helper in enumerate(self._helpers, 1):
            _libc().sem_post(self._semaphore(number))
            helper.join()
        self._helpers.clear()

    def _run(self, items: int, count: int, clock: int, ticks: int) -> None:
        block = self._block
        block[NEW_ITEMS], block[NEW_COUNT], block[NEW_CLOCK], block[TICKS] = items, count, clock, ticks
        self._compute(block)

    def _semaphore(self, number: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self._semaphores) + _SEMAPHORE_BYTES * number)


class _Shared:
    """Keep the shared team of this process, of the size that was last requested."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._team: Team | None = None

    def take(self, threads: int) -> Team | None:
        """Return the team for the calling thread, which must give it back; None if another thread uses it."""
        with self._lock:
            team = self._team
            if team is not None and not team.take():
                return None
            if team is None or team.threads != threads:
                self._team = None
                if team is not None:
                    team.close()
                team = self._team = Team(threads)
                team.take()
            return team

    def close(self) -> None:
        """End the team's threads: they may not outlive the interpreter."""
        with self._lock:
            if self._team is not None:
                self._team.close()

    def forget(self) -> None:
        """Drop the team in a forked process, which does not have its threads."""
        self._lock, self._team = threading.Lock(), None


class _Alone(threading.local):
    """Keep a team for the exclusive use of the calling thread."""

    team: Team | None = None


_shared, _alone = _Shared(), _Alone()
atexit.register(_shared.close)
os.register_at_fork(after_in_child=_shared.forget)


def take_team(threads: int) -> Team:
    """Return a team of `threads` for the calling thread, which must give it back: the process's shared team, or one for
    this thread only if another thread uses that."""
    team = _shared.take(threads) if threads > 1 else None
    if team is None:
        team = _alone.team
        # A pass that this thread has begun may be using it.
        if team is None or not team.take():
            team = _alone.team = Team(1)
            team.take()
    return team


def run(kernel: int, block: Arguments, threads: int, tasks: int) -> None:
    """Run a kernel over `tasks` tasks and wait: in a team of `threads`, or in this thread if there is one task or
    another thread uses the team."""
    block[0] = block[1] = 0
    team = _shared.take(threads) if threads > 1 and tasks > 1 else None
    if team is None:
        _KERNEL(kernel)(block)
        return
    try:
        team.launch(kernel, block)
    finally:
        team.give_back()


def _aligned(words: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return zeros that begin at a cache line."""
    held = np.zeros(words + 8, dtype=np.int64)
    first = -held.ctypes.data % 64 // 8
    return held[first : first + words]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
