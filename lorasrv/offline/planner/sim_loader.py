"""Simulate `ThreadedLoader`'s queues on an external clock: loads take time but move no bytes. Torch-free.

Up to `PARALLEL_LOADS` adapters are read in parallel and share the bandwidth of the disk, or of a storage that is shared
with other loaders; copies run one after another. Host memory is the real `HostCache`, so its bound, pins and evictions
are the server's.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey
from lorasrv.config import PARALLEL_LOADS
from lorasrv.offline.planner.machine_profile import MachineProfile

EPSILON_S = 1e-6
"""Events within a microsecond count as ended: a clock that covers years has no finer resolution."""


class LoadPart(Enum):
    """Name the subject of a report."""

    LOADED = "loaded"
    COPIED = "copied"


class Storage(Protocol):
    """Slow the reads of several loaders; see `SharedStorage`."""

    @property
    def read_byte_s(self) -> float: ...

    def attach(self, settle: Callable[[float], None]) -> None: ...

    def detach(self, settle: Callable[[float], None]) -> None: ...

    def change(self, now_s: float, reads: int) -> None: ...


@dataclass(slots=True, eq=False)
class _SimLoad:
    """Hold an entry of the load queue."""

    key: AdapterKey
    nbytes: int
    # Seconds and bytes left to read.
    setup_s: float
    bytes_left: float
    # Whether the engine ordered it; otherwise it is a prefetch.
    is_requested: bool


class SimLoader:
    """Simulate a loader; only the replay calls it, with times that never decrease.

    Args:
        cache: host memory; its values are numbers of bytes.
        size_of: returns the bytes of an adapter.
        storage: where the files are; None: on its own disk.
    """

    def __init__(
        self,
        costs: MachineProfile,
        cache: HostCache[int],
        size_of: Callable[[AdapterKey], int],
        storage: Storage | None = None,
    ) -> None:
        self._costs = costs
        self._cache = cache
        self._size_of = size_of
        self._now = 0.0
        self._loads: dict[AdapterKey, _SimLoad] = {}
        self._queue: deque[_SimLoad] = deque()
        self._reading: list[_SimLoad] = []
        self._copies: deque[AdapterKey] = deque()
        self._copy_ends_s = 0.0
        self._stall_s = 0.0
        self._reports: list[tuple[AdapterKey, LoadPart]] = []
        self._prefetched: set[AdapterKey] = set()
        self._storage = storage
        if storage is not None:
            storage.attach(self.settle)
        self.num_from_disk = 0
        self.num_from_host = 0

    def take_stall_s(self) -> float:
        """Return by how long the loads that ended since the last call delay the step that ran meanwhile."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    @property
    def has_reports(self) -> bool:
        """Return whether a load or copy has ended that `poll` has not returned."""
        return bool(self._reports)

    def next_event_s(self) -> float:
        """Predict when the next load or copy ends; infinity if none is in progress."""
        times = [self._now + self._seconds_left(load) for load in self._reading]
        if self._copies:
            times.append(self._copy_ends_s)
        return min(times, default=math.inf)

    def advance(self, now_s: float) -> None:
        """Move the clock, at most to the next event."""
        self.settle(now_s)
        while self._copies and self._copy_ends_s <= now_s + EPSILON_S:
            self._end_copy(self._copies.popleft())
        for load in [load for load in self._reading if self._seconds_left(load) <= EPSILON_S]:
            self._end_read(load)
            self.num_from_disk += 1
            self._stall_s += self._costs.stall_s + load.nbytes * self._costs.stall_byte_s
            self._cache.put_pinned(load.key, load.nbytes, load.nbytes)
            self._end_load(load)
        self._begin()

    def settle(self, now_s: float) -> None:
        """Count the bytes read until now at the current rate, without ending a load."""
        self._read_for(now_s - self._now)
        self._now = now_s

    def stop(self) -> None:
        """Stop reading, like a machine that fails."""
        if self._storage is not None:
            self._storage.change(self._now, -len(self._reading))
            self._storage.detach(self.settle)
        self._reading.clear()

    # Same interface as `ThreadedLoader`.

    def prefetch(self, key: AdapterKey) -> None:
        if key not in self._cache and key not in self._loads and len(self._loads) < PARALLEL_LOADS:
            self._enqueue(key, is_requested=False)

    def load(self, key: AdapterKey) -> None:
        if key in self._loads:
            self._loads[key].is_requested = True
        else:
            self._enqueue(key, is_requested=True)

    def copy(self, key: AdapterKey) -> None:
        self._copies.append(key)
        if len(self._copies) == 1:
            self._begin_copy()

    def cancel(self, key: AdapterKey) -> None:
        self._reports = [report for report in self._reports if report[0] != key]
        load = self._loads.pop(key, None)
        if load is None:
            self._cache.unpin(key)
        else:
            if load in self._reading:
                self._end_read(load)
            else:
                self._queue.remove(load)
            self._begin()

    def poll(self) -> list[tuple[AdapterKey, LoadPart]]:
        """Return the loads and copies that have ended since the last call."""
        reports, self._reports = self._reports, []
        return reports

    # Reading.

    def _enqueue(self, key: AdapterKey, *, is_requested: bool) -> None:
        nbytes = self._size_of(key)
        self._loads[key] = load = _SimLoad(key, nbytes, self._costs.load_s, float(nbytes), is_requested)
        self._queue.append(load)
        self._begin()

    def _begin(self) -> None:
        while self._queue and len(self._reading) < PARALLEL_LOADS:
            load = self._queue.popleft()
            if self._cache.get_pinned(load.key) is None:
                if self._storage is not None:
                    self._storage.change(self._now, 1)
                self._reading.append(load)
            else:
                # A prefetched adapter has been counted already.
                self.num_from_host += load.key not in self._prefetched
                self._prefetched.discard(load.key)
                self._end_load(load)

    def _end_read(self, load: _SimLoad) -> None:
        if self._storage is not None:
            self._storage.change(self._now, -1)
        self._reading.remove(load)

    def _end_load(self, load: _SimLoad) -> None:
        """Report an adapter that is in host memory and pinned; unpin it after a prefetch."""
        del self._loads[load.key]
        if load.is_requested:
            self._reports.append((load.key, LoadPart.LOADED))
        else:
            self._prefetched.add(load.key)
            self._cache.unpin(load.key)

    @property
    def is_reading(self) -> bool:
        """Return whether a file is being read."""
        return bool(self._reading)

    @property
    def _byte_s(self) -> float:
        """Return the seconds per byte of each load now."""
        own_s = self._costs.load_byte_s * len(self._reading)
        return own_s if self._storage is None else max(own_s, self._storage.read_byte_s)

    def _seconds_left(self, load: _SimLoad) -> float:
        """Predict when a load ends if the other loads go on meanwhile."""
        return load.setup_s + load.bytes_left * self._byte_s

    def _read_for(self, seconds: float) -> None:
        byte_s = self._byte_s
        for load in self._reading:
            setup = min(load.setup_s, seconds)
            load.setup_s -= setup
            load.bytes_left = max(0.0, load.bytes_left - (seconds - setup) / byte_s) if byte_s else 0.0

    # Copying.

    def _begin_copy(self) -> None:
        nbytes = self._size_of(self._copies[0])
        self._copy_ends_s = self._now + self._costs.copy_s + nbytes * self._costs.copy_byte_s

    def _end_copy(self, key: AdapterKey) -> None:
        self._cache.unpin(key)
        self._reports.append((key, LoadPart.COPIED))
        if self._copies:
            self._begin_copy()
