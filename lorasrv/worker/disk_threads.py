"""Threads for reads of a disk that may hang: a read that takes too long is abandoned, with its thread.

Nothing can interrupt a thread that waits for a disk. It is replaced, at most `MAX_REPLACED` at a time, and resumes work
if its read returns after all. The threads are daemons, so that they do not delay the end of the process.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lorasrv.errors import AdapterLoadTimeout

T = TypeVar("T")
DISK = "the disk"
MAX_REPLACED = 8
CLOSE_WAIT_S = 2.0
"""Seconds that `close` waits for reads under way; reads that still hang are abandoned."""
_CLOSED = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class DiskReadStats:
    """Count abandoned reads: all of them, and those that have not returned."""

    num_given_up: int = 0
    num_hung: int = 0


@dataclass(slots=True, eq=False)
class _Read:
    key: Hashable
    work: Callable[[], Any]
    on_late: Callable[[Any], None]
    result: "Future[Any]" = field(default_factory=Future)
    until_s: float = 0.0
    is_given_up: bool = False

    def fail(self, why: str) -> None:
        """Fail the result, unless its owner has cancelled it."""
        with contextlib.suppress(InvalidStateError):
            self.result.set_exception(AdapterLoadTimeout(why))


class DiskThreads:
    """Run reads in threads, those of the same key one after another. Any thread may call it.

    A read that has not returned `timeout_s` after its start is abandoned: its future and those queued behind it for the
    same key raise AdapterLoadTimeout, and so does every later read of the key until the read returns. Once
    `MAX_REPLACED` threads are replaced and all others hang too, every read raises it at once, until one returns.

    Args:
        num_threads: most reads at a time, not counting abandoned ones.
        name: name of the threads.
        timeout_s: None sets no limit.
        prepare: called first by every thread.
        place: where the data is read from, for messages.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        timeout_s: float | None,
        prepare: Callable[[], None] = lambda: None,
        place: str = DISK,
    ) -> None:
        self._place = place
        self._most, self._name, self._timeout_s, self._prepare = num_threads, name, timeout_s, prepare
        self._lock = threading.Lock()
        self._has_work, self._has_begun, self._has_ended = (threading.Condition(self._lock) for _ in range(3))
        self._ready: deque[_Read] = deque()
        # In the order of their starts.
        self._running: dict[_Read, None] = {}
        # Key of every read that is ready or running -> the reads queued behind it.
        self._behind: dict[Hashable, deque[_Read]] = {}
        self._hung: set[Hashable] = set()
        self._num_threads = self._num_idle = self._num_given_up = 0
        self._is_closed = self._is_watched = False

    def submit(
        self, key: Hashable, work: Callable[[], T], on_late: Callable[[T], None] = lambda _: None
    ) -> "Future[T]":
        """Begin a read as soon as a thread is free.

        Args:
            on_late: called with the result of a read that returned after it was abandoned.
        Returns: the future result; AdapterLoadTimeout if the read was abandoned, or not begun because the disk hangs or
            after `close`.
        """
        read = _Read(key, work, on_late)
        with self._lock:
            if self._is_closed:
                read.fail(_CLOSED)
            elif key in self._hung:
                read.fail(f"an earlier read of the adapter has not returned from {self._place}")
            elif self._is_exhausted:
                read.fail(f"{self._place} does not return adapters; none is read until it does")
            elif key in self._behind:
                self._behind[key].append(read)
            else:
                self._behind[key] = deque()
                self._add(read)
        return read.result

    def stats(self) -> DiskReadStats:
        """Return the counts of abandoned reads."""
        with self._lock:
            return DiskReadStats(self._num_given_up, len(self._hung))

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Fail the queued reads, and those that do not return in time."""
        with self._lock:
            self._is_closed = True
            failed = [*self._ready, *(read for behind in self._behind.values() for read in behind)]
            self._ready.clear()
            self._behind = {read.key: deque() for read in self._running}
            for condition in (self._has_work, self._has_begun, self._has_ended):
                condition.notify_all()
            self._has_ended.wait_for(lambda: not self._running, wait_s)
            failed += [read for running in list(self._running) for read in self._give_up(running)]
        for read in failed:
            read.fail(_CLOSED)

    @property
    def _is_exhausted(self) -> bool:
        """Return whether all threads hang and no more may be replaced."""
        return len(self._hung) == self._num_threads >= self._most + MAX_REPLACED

    @property
    def _num_usable(self) -> int:
        return self._num_threads - len(self._hung)

    def _add(self, read: _Read) -> None:
        self._ready.append(read)
        if len(self._ready) > self._num_idle:
            self._start_thread()
        self._has_work.notify()

    def _start_thread(self) -> None:
        """Start one more thread, if allowed."""
        if self._num_usable < self._most and self._num_threads < self._most + MAX_REPLACED:
            self._num_threads += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        if not self._is_watched and self._timeout_s is not None:
            self._is_watched = True
            threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True).start()

    # The threads.

    def _run(self) -> None:
        self._prepare()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next read; return False at the end. Keep no reference to it, as it holds an adapter in the store."""
        read = self._next()
        if read is None:
            return False
        try:
            result = read.work()
        except BaseException as error:
            if self._end(read):
                read.result.set_exception(error)
        else:
            if self._end(read):
                read.result.set_result(result)
            else:
                read.on_late(result)
        # An error's traceback has this frame, and would keep the read alive, which has the error.
        del read
        return True

    def _next(self) -> _Read | None:
        """Begin the next read and return it; None if the thread is no longer needed."""
        with self._lock:
            while True:
                self._num_idle += 1
                self._has_work.wait_for(lambda: self._ready or self._is_closed or self._num_usable > self._most)
                self._num_idle -= 1
                if not self._ready or self._num_usable > self._most:
                    self._num_threads -= 1
                    return None
                read = self._ready.popleft()
                if read.result.set_running_or_notify_cancel():
                    read.until_s = time.monotonic() + (self._timeout_s or 0.0)
                    self._running[read] = None
                    self._has_begun.notify()
                    return read
                self._let_next(read.key)

    def _end(self, read: _Read) -> bool:
        """Note that a read has returned; return whether its result is still wanted."""
        with self._lock:
            if read.is_given_up:
                self._hung.discard(read.key)
            else:
                del self._running[read]
                self._has_ended.notify_all()
                self._let_next(read.key)
            return not read.is_given_up

    def _let_next(self, key: Hashable) -> None:
        """Make the next read of a key ready."""
        behind = self._behind[key]
        if behind:
            self._add(behind.popleft())
        else:
            del self._behind[key]

    def _watch(self) -> None:
        while self._watch_oldest():
            pass

    def _watch_oldest(self) -> bool:
        """Abandon the oldest read when its time is over; return False at the end. Keep no reference to it."""
        with self._lock:
            self._has_begun.wait_for(lambda: self._running or self._is_closed)
            if self._is_closed:
                return False
            left_s = next(iter(self._running)).until_s - time.monotonic()
            if left_s > 0:
                self._has_ended.wait(left_s)
                return True
            failed = self._give_up(next(iter(self._running)))
        for read in failed:
            read.fail(f"{self._place} did not return the adapter within {self._timeout_s:g} s (--load-timeout-s)")
        return True

    def _give_up(self, read: _Read) -> list[_Read]:
        """Abandon a read and replace its thread; return the reads that fail with it."""
        del self._running[read]
        read.is_given_up = True
        self._hung.add(read.key)
        self._num_given_up += 1
        failed = [read, *self._behind.pop(read.key)]
        if self._ready:
            self._start_thread()
        if self._is_exhausted:
            failed += [one for waiting in self._ready for one in (waiting, *self._behind.pop(waiting.key))]
            self._ready.clear()
        return failed
