"""Simulate `ThreadedLoader`'s queues on an external clock: loads take time but move no bytes. Torch-free.

Up to `PARALLEL_LOADS` adapters are read in parallel and share the disk's bandwidth; copies run one after another. Host
memory is the real `HostCache`, so its bound, pins and evictions are the server's.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey
from lorasrv.config import PARALLEL_LOADS
from lorasrv.offline.planner.machine_profile import MachineProfile

EPSILON_S = 1e-6
"""Events within a microsecond have ended: a clock of years has no finer steps."""


class LoadPart(Enum):
    """Name the subject of a report."""

    LOADED = "loaded"
    COPIED = "copied"


@dataclass(slots=True, eq=False)
class _SimJob:
    """Track the loading of an adapter."""

    key: AdapterKey
    nbytes: int
    # Seconds and bytes left to read.
    setup_s: float
    bytes_left: float
    is_ordered: bool = True
    is_pinned: bool = False


class SimLoader:
    """Simulate a loader; only the replay calls it, with times that never decrease.

    Args:
        cache: host memory; its values are numbers of bytes.
        size_of: bytes of an adapter.
    """

    def __init__(self, costs: MachineProfile, cache: HostCache[int], size_of: Callable[[AdapterKey], int]) -> None:
        self._costs = costs
        self._cache = cache
        self._size_of = size_of
        self._now = 0.0
        self._jobs: dict[AdapterKey, _SimJob] = {}
        self._queue: deque[_SimJob] = deque()
        self._reading: list[_SimJob] = []
        self._copies: deque[_SimJob] = deque()
        self._copy_ends_s = 0.0
        self._stall_s = 0.0
        self._reports: list[tuple[AdapterKey, LoadPart]] = []
        self._read_ahead: set[AdapterKey] = set()
        self.num_from_disk = 0
        self.num_from_host = 0

    def take_stall_s(self) -> float:
        """Return the time that loads which ended since the last call take from the step that ran meanwhile."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    @property
    def has_reports(self) -> bool:
        """Return whether a load or copy has ended that `poll` has not returned."""
        return bool(self._reports)

    def next_event_s(self) -> float:
        """Predict when the next load or copy ends; infinity if none is in progress."""
        times = [self._now + self._seconds_left(job) for job in self._reading]
        if self._copies:
            times.append(self._copy_ends_s)
        return min(times, default=math.inf)

    def advance(self, now_s: float) -> None:
        """Move the clock, at most to the next event."""
        self._read_for(now_s - self._now)
        self._now = now_s
        while self._copies and self._copy_ends_s <= now_s + EPSILON_S:
            self._end_copy(self._copies.popleft())
        for job in [job for job in self._reading if self._seconds_left(job) <= EPSILON_S]:
            self._reading.remove(job)
            self.num_from_disk += 1
            self._stall_s += self._costs.stall_s + job.nbytes * self._costs.stall_byte_s
            self._cache.put_pinned(job.key, job.nbytes, job.nbytes)
            self._read(job)
        self._begin()

    # Same interface as `ThreadedLoader`.

    def prefetch(self, key: AdapterKey) -> None:
        if key not in self._cache and key not in self._jobs and len(self._jobs) < PARALLEL_LOADS:
            self._enqueue(key, is_ordered=False)

    def load(self, key: AdapterKey) -> None:
        if key in self._jobs:
            self._jobs[key].is_ordered = True
        else:
            self._enqueue(key, is_ordered=True)

    def copy(self, key: AdapterKey) -> None:
        self._copies.append(self._jobs[key])
        if len(self._copies) == 1:
            self._begin_copy()

    def cancel(self, key: AdapterKey) -> None:
        job = self._jobs.pop(key)
        self._reports = [report for report in self._reports if report[0] != key]
        if job in self._reading:
            self._reading.remove(job)
        elif job in self._queue:
            self._queue.remove(job)
        if job.is_pinned:
            self._cache.unpin(key)
        self._begin()

    def poll(self) -> list[tuple[AdapterKey, LoadPart]]:
        """Return what has ended since the last call."""
        reports, self._reports = self._reports, []
        return reports

    # Reading.

    def _enqueue(self, key: AdapterKey, *, is_ordered: bool) -> None:
        nbytes = self._size_of(key)
        self._jobs[key] = job = _SimJob(key, nbytes, self._costs.load_s, float(nbytes), is_ordered)
        self._queue.append(job)
        self._begin()

    def _begin(self) -> None:
        while self._queue and len(self._reading) < PARALLEL_LOADS:
            job = self._queue.popleft()
            if self._cache.get_pinned(job.key) is None:
                self._reading.append(job)
            else:
                # Adapters that were prefetched have been counted already.
                self.num_from_host += job.key not in self._read_ahead
                self._read_ahead.discard(job.key)
                self._read(job)

    def _read(self, job: _SimJob) -> None:
        """Finish reading: the adapter's bytes are in host memory, pinned."""
        if job.is_ordered:
            job.is_pinned = True
            self._reports.append((job.key, LoadPart.LOADED))
        else:
            del self._jobs[job.key]
            self._read_ahead.add(job.key)
            self._cache.unpin(job.key)

    def _seconds_left(self, job: _SimJob) -> float:
        """Return the remaining seconds if the other reads go on."""
        return job.setup_s + job.bytes_left * self._costs.load_byte_s * len(self._reading)

    def _read_for(self, seconds: float) -> None:
        share = len(self._reading)
        for job in self._reading:
            setup = min(job.setup_s, seconds)
            job.setup_s -= setup
            rate = self._costs.load_byte_s * share
            job.bytes_left = max(0.0, job.bytes_left - (seconds - setup) / rate) if rate else 0.0

    # Copying.

    def _begin_copy(self) -> None:
        job = self._copies[0]
        self._copy_ends_s = self._now + self._costs.copy_s + job.nbytes * self._costs.copy_byte_s

    def _end_copy(self, job: _SimJob) -> None:
        del self._jobs[job.key]
        self._cache.unpin(job.key)
        self._reports.append((job.key, LoadPart.COPIED))
        if self._copies:
            self._begin_copy()
