"""Adapter loader: disk -> host memory -> pool, inline for offline use, in threads for a server.

The engine gives orders and polls for reports; it never waits. A failure is a report like any other, with the reason.
Loads have their own threads, so a slow disk delays no copies, and up to `PARALLEL_LOADS` slow loads delay no other
loads. A load that the disk does not return in time fails (`disk_threads.py`).
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

from adapter_store.errors import AdapterCorrupt, AdapterError, LoadCancelled
from adapter_store.spec import AdapterKey
from lorasrv.config import PARALLEL_LOADS
from lorasrv.errors import name_of
from lorasrv.outputs import Refusal
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.adapter_source import HostAdapterStore
from lorasrv.worker.device import compute_alone, is_out_of_memory
from lorasrv.worker.disk_threads import DISK, DiskReadStats, DiskThreads
from sgmv_kernels.formats.adapter_panels import PlacedAdapter

_LOG = logging.getLogger(__name__)
MAX_REMEMBERED = 256
TOO_LITTLE = "the machine has too little memory left to load the adapter; try again later"
WriteAdapter = Callable[[PackedAdapter, PlacedAdapter], None]
"""Fill an adapter's pages; return once they may be read."""


class Done(Enum):
    """Name the event that a report is about."""

    LOADED = "loaded"
    COPIED = "copied"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """Report the end of a load or a copy."""

    key: AdapterKey
    done: Done
    seconds: float = 0.0
    nbytes: int = 0
    # Whether a load had to read the disk.
    from_disk: bool = False
    # Why it failed, as text for clients.
    error: str = ""
    # Refusal of the requests that wait, if there is a code for the failure.
    refusal: Refusal | None = None
    # Why it failed, in one word for the counters.
    reason: str = "other"


class Loader(Protocol):
    """Read adapters into host memory and copy them into the pool, on `AdapterManager`'s orders.

    A host copy is pinned in the host cache from the end of its load until its copy has ended or is cancelled. A loader
    owns its work queues and the keys that it has pinned; `AdapterManager` owns where each adapter is.
    """

    def load(self, key: AdapterKey) -> None:
        """Begin to read an adapter into host memory."""

    def copy(self, key: AdapterKey, placed: PlacedAdapter) -> None:
        """Begin to fill the pages of an adapter that was reported LOADED."""

    def cancel(self, key: AdapterKey) -> None:
        """Stop a load, or unpin its host copy. No report follows."""

    def poll(self) -> list[LoaderReport]:
        """Return the reports since the last call; never waits."""

    def close(self) -> None:
        """Begin no more work, drop what is queued and unpin every host copy."""


class InlineLoader:
    """Execute the orders in `poll`, in the caller's thread. Work that Ctrl-C interrupts is done again."""

    def __init__(self, source: HostAdapterStore, write: WriteAdapter) -> None:
        self._source = source
        self._write = write
        self._work: dict[AdapterKey, Callable[[], LoaderReport]] = {}
        self._reports: list[LoaderReport] = []
        self._pinned: set[AdapterKey] = set()

    def load(self, key: AdapterKey) -> None:
        self._work[key] = partial(_load, self._source, key)

    def copy(self, key: AdapterKey, placed: PlacedAdapter) -> None:
        self._work[key] = partial(self._copy_pinned, key, placed)

    def cancel(self, key: AdapterKey) -> None:
        self._work.pop(key, None)
        self._reports = [report for report in self._reports if report.key != key]
        if key in self._pinned:
            self._pinned.remove(key)
            self._source.unpin(key)

    def poll(self) -> list[LoaderReport]:
        while self._work:
            key = next(iter(self._work))
            report = self._work[key]()
            del self._work[key]
            self._reports.append(report)
            if report.done is Done.LOADED:
                self._pinned.add(key)
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        self._work.clear()
        while self._pinned:
            self._source.unpin(self._pinned.pop())

    def _copy_pinned(self, key: AdapterKey, placed: PlacedAdapter) -> LoaderReport:
        if key not in self._pinned:
            # The copy was interrupted, which has unpinned it.
            report = _load(self._source, key)
            if report.done is not Done.LOADED:
                return report
        self._pinned.discard(key)
        return _copy(self._source, self._write, key, placed)


@dataclass(slots=True, eq=False)
class _Load:
    """Hold an entry of the load queue: waiting for a thread, being read, or read and not polled yet."""

    key: AdapterKey
    # Whether the engine ordered it; otherwise it is a prefetch, which is not reported.
    is_requested: bool = True
    is_cancelled: bool = False
    # Whether it took too long; it then stops at the next piece that the disk returns.
    is_given_up: bool = False
    # The report of the prefetch, which replaces that of a load that finds its adapter.
    prefetched: LoaderReport | None = None
    report: LoaderReport | None = None


class ThreadedLoader:
    """Load and copy in threads; call `on_ready` from them whenever a report can be polled.

    `prefetch` and `read_stats` may be called from any thread, everything else only from the engine's.

    Args:
        load_timeout_s: a load that takes longer fails; None sets no limit.
        place: as for `DiskThreads`.
    """

    def __init__(
        self,
        source: HostAdapterStore,
        write: WriteAdapter,
        on_ready: Callable[[], None],
        load_timeout_s: float | None = None,
        place: str = DISK,
    ) -> None:
        self._source = source
        self._write = write
        self._on_ready = on_ready
        # Reentrant: a load that is refused at once calls back within `submit`.
        self._lock = threading.RLock()
        self._is_closed = False
        self._loads: dict[AdapterKey, _Load] = {}
        self._pinned: set[AdapterKey] = set()
        self._copies: dict[AdapterKey, Future[None]] = {}
        self._prefetched: dict[AdapterKey, LoaderReport] = {}
        self._reports: queue.SimpleQueue[tuple[_Load | None, LoaderReport]] = queue.SimpleQueue()
        self._load_threads = DiskThreads(PARALLEL_LOADS, "adapter-load", load_timeout_s, compute_alone, place)
        self._copy_thread = ThreadPoolExecutor(1, "adapter-copy", initializer=compute_alone)

    def prefetch(self, key: AdapterKey) -> None:
        """Begin to read an adapter into the host cache, for a request on its way to the engine.

        The adapter is neither pinned nor reported, unless `load` is called meanwhile. Do nothing if the queue is full.
        """
        if self._source.is_on_host(key):
            return
        with self._lock:
            if not self._is_closed and key not in self._loads and len(self._loads) < PARALLEL_LOADS:
                self._submit(_Load(key, is_requested=False))

    def load(self, key: AdapterKey) -> None:
        with self._lock:
            load = self._loads.get(key)
            if load is None:
                self._submit(_Load(key, prefetched=self._prefetched.pop(key, None)))
            else:
                assert not load.is_requested, f"adapter {key} is being loaded"
                load.is_requested = True

    def copy(self, key: AdapterKey, placed: PlacedAdapter) -> None:
        self._pinned.remove(key)
        self._copies[key] = self._copy_thread.submit(self._run_copy, key, placed)

    def cancel(self, key: AdapterKey) -> None:
        with self._lock:
            load = self._loads.pop(key, None)
            if load is not None:
                load.is_cancelled = True  # a load that still runs unpins its host copy itself
            was_read = load is not None and load.report is not None and load.report.done is Done.LOADED
        if was_read or key in self._pinned:
            self._pinned.discard(key)
            self._source.unpin(key)

    def poll(self) -> list[LoaderReport]:
        reports = []
        for _ in range(self._reports.qsize()):
            load, report = self._reports.get_nowait()
            if load is None:
                del self._copies[report.key]
            elif load.is_cancelled:
                continue
            else:
                with self._lock:
                    del self._loads[report.key]
                if report.done is Done.LOADED:
                    self._pinned.add(report.key)
                    report = load.prefetched or report
            reports.append(report)
        return reports

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for load in self._loads.values():
                load.is_cancelled = load.report is None
        self._load_threads.close()
        self._copy_thread.shutdown(wait=True, cancel_futures=True)
        self._pinned |= {key for key, copy in self._copies.items() if copy.cancelled()}
        self.poll()
        while self._pinned:
            self._source.unpin(self._pinned.pop())

    def read_stats(self) -> DiskReadStats:
        """Return the counts of abandoned loads."""
        return self._load_threads.stats()

    def _submit(self, load: _Load) -> None:
        self._loads[load.key] = load
        read = partial(_load, self._source, load.key, lambda: load.is_cancelled or load.is_given_up)
        self._load_threads.submit(load.key, read, self._unpin_late).add_done_callback(partial(self._ended, load))

    def _unpin_late(self, report: LoaderReport) -> None:
        if report.done is Done.LOADED:
            self._source.unpin(report.key)

    def _ended(self, load: _Load, read: "Future[LoaderReport]") -> None:
        error = read.exception()
        if error is None:
            report = read.result()
        else:
            report = LoaderReport(load.key, Done.FAILED, error=str(error), reason=name_of(type(error)))
        with self._lock:
            load.is_given_up = error is not None
            is_reported = load.is_requested and not load.is_cancelled
            if is_reported:
                load.report = report
                self._reports.put((load, report))
            elif not load.is_cancelled:
                del self._loads[load.key]
                self._remember(report)
        if is_reported:
            self._on_ready()
        elif report.done is Done.LOADED:
            self._source.unpin(load.key)

    def _run_copy(self, key: AdapterKey, placed: PlacedAdapter) -> None:
        self._reports.put((None, _copy(self._source, self._write, key, placed)))
        self._on_ready()

    def _remember(self, report: LoaderReport) -> None:
        """Keep the report of a prefetch for the load that follows. That load finds the adapter in host memory, but it
        came from disk."""
        if report.done is Done.LOADED and report.from_disk:
            self._prefetched[report.key] = report
            if len(self._prefetched) > MAX_REMEMBERED:
                del self._prefetched[next(iter(self._prefetched))]


def _load(source: HostAdapterStore, key: AdapterKey, is_cancelled: Callable[[], bool] = lambda: False) -> LoaderReport:
    """Read an adapter into host memory and pin it there."""
    begun = time.perf_counter()

    def read() -> LoaderReport:
        if is_cancelled():
            raise LoadCancelled("cancelled before it began")
        packed, from_disk = source.fetch_pinned(key, is_cancelled)
        return LoaderReport(key, Done.LOADED, time.perf_counter() - begun, packed.nbytes, from_disk)

    return _reported(key, read)


def _copy(source: HostAdapterStore, write: WriteAdapter, key: AdapterKey, placed: PlacedAdapter) -> LoaderReport:
    """Fill an adapter's pages from its pinned host copy, and unpin the copy."""
    begun = time.perf_counter()

    def fill() -> LoaderReport:
        packed = source.pinned(key)
        write(packed, placed)
        return LoaderReport(key, Done.COPIED, time.perf_counter() - begun, packed.nbytes)

    try:
        return _reported(key, fill)
    finally:
        source.unpin(key)


def _reported(key: AdapterKey, work: Callable[[], LoaderReport]) -> LoaderReport:
    try:
        return work()
    except LoadCancelled:
        return LoaderReport(key, Done.FAILED, error="cancelled")
    except AdapterError as error:
        refusal = Refusal.CORRUPT if isinstance(error, AdapterCorrupt) else None
        return LoaderReport(key, Done.FAILED, error=str(error), refusal=refusal, reason=name_of(type(error)))
    except OSError as error:
        _LOG.exception("reading adapter %s failed", key)
        return LoaderReport(key, Done.FAILED, error=f"reading the adapter failed: {error.strerror}", reason="disk")
    except Exception as error:
        # A bad adapter must not end a loader thread and with it every later load; the log has the trace.
        _LOG.exception("loading adapter %s failed", key)
        if is_out_of_memory(error):
            return LoaderReport(key, Done.FAILED, error=TOO_LITTLE, refusal=Refusal.MEMORY, reason="memory")
        return LoaderReport(key, Done.FAILED, error="loading the adapter failed; the server's log says why")
