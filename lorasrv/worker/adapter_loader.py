"""The hands of `AdapterManager`: disk -> host memory -> pool, inline for offline use, in threads for a server.

The engine orders and polls; it never waits. What fails is a report like any other, with the reason. Loads have threads
of their own, so that a slow disk holds up neither copies nor, up to `PARALLEL_LOADS` of them, other loads.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from adapter_store.errors import AdapterCorrupt, AdapterError, LoadCancelled
from adapter_store.spec import AdapterKey
from lorasrv.config import PARALLEL_LOADS
from lorasrv.errors import name_of
from lorasrv.outputs import Refusal
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.adapter_source import HostAdapterStore
from lorasrv.worker.device import compute_alone
from sgmv_kernels.formats.adapter_panels import PlacedAdapter

_LOG = logging.getLogger(__name__)
MAX_REMEMBERED = 256
WriteAdapter = Callable[[PackedAdapter, PlacedAdapter], None]
"""Fills an adapter's pages; returns once they may be read."""


class Done(Enum):
    """What a report is about."""

    LOADED = "loaded"
    COPIED = "copied"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """A finished part of the way. `seconds` it took; `from_disk` tells whether a load had to read it. Of one that
    failed `error` says why, `reason` in a word for counting, and `refusal` what that is to those who wait for it, if
    there is a word for it."""

    key: AdapterKey
    done: Done
    seconds: float = 0.0
    nbytes: int = 0
    from_disk: bool = False
    error: str = ""
    refusal: Refusal | None = None
    reason: str = "other"


@dataclass(slots=True, eq=False)
class _Job:
    """One adapter's way, from its load to the end of its copy. The host copy is pinned in between. One that is not
    ordered is only read ahead.
    """

    key: AdapterKey
    is_ordered: bool = True
    read_ahead: LoaderReport | None = None
    is_reported: bool = False
    cancelled: bool = False
    packed: PackedAdapter | None = None


class Loader(Protocol):
    """Brings adapters to host memory and from there to the pool."""

    def load(self, key: AdapterKey) -> None:
        """Begin to bring an adapter to host memory, and keep it there until it is copied or cancelled."""

    def copy(self, key: AdapterKey, placed: PlacedAdapter) -> None:
        """Begin to fill its pages."""

    def cancel(self, key: AdapterKey) -> None:
        """Nobody wants it any more: no report will come."""

    def poll(self) -> list[LoaderReport]:
        """What has finished since the last call; never waits."""

    def close(self) -> None:
        """Begin nothing more and forget what is queued."""


class InlineLoader:
    """Does everything at once, in the caller's thread."""

    def __init__(self, source: HostAdapterStore, write: WriteAdapter) -> None:
        self._work = _Work(source, write)
        self._jobs: dict[AdapterKey, _Job] = {}
        self._reports: list[LoaderReport] = []

    def load(self, key: AdapterKey) -> None:
        job = self._jobs[key] = _Job(key)
        self._reports.append(self._work.load(job))

    def copy(self, key: AdapterKey, placed: PlacedAdapter) -> None:
        self._reports.append(self._work.copy(self._jobs.pop(key), placed))

    def cancel(self, key: AdapterKey) -> None:
        self._work.let_go(self._jobs.pop(key))
        self._reports = [report for report in self._reports if report.key != key]

    def poll(self) -> list[LoaderReport]:
        reports, self._reports = self._reports, []
        for report in reports:
            if report.done is Done.FAILED:
                self._jobs.pop(report.key, None)
        return reports

    def close(self) -> None:
        for job in self._jobs.values():
            self._work.let_go(job)
        self._jobs.clear()


class ThreadedLoader:
    """Works in threads; calls `on_ready` (from them) whenever a report can be polled.

    `prefetch` may be called from any thread; everything else but the work itself belongs to the engine's.
    """

    def __init__(self, source: HostAdapterStore, write: WriteAdapter, on_ready: Callable[[], None]) -> None:
        self._work = _Work(source, write)
        self._source = source
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._is_closed = False
        self._jobs: dict[AdapterKey, _Job] = {}
        self._read_ahead: dict[AdapterKey, LoaderReport] = {}
        self._reports: queue.SimpleQueue[tuple[_Job, LoaderReport]] = queue.SimpleQueue()
        self._load_threads = ThreadPoolExecutor(PARALLEL_LOADS, "adapter-load", initializer=compute_alone)
        self._copy_thread = ThreadPoolExecutor(1, "adapter-copy", initializer=compute_alone)

    def prefetch(self, key: AdapterKey) -> None:
        """Begin to read an adapter that a request on its way to the engine will order. Nothing comes of it but a host
        copy, unless it is ordered before it is read. Nothing happens if there is much to do already.
        """
        if self._source.is_on_host(key):
            return
        with self._lock:
            if self._is_closed or key in self._jobs or len(self._jobs) >= PARALLEL_LOADS:
                return
            self._begin(_Job(key, is_ordered=False))

    def load(self, key: AdapterKey) -> None:
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                self._begin(_Job(key, read_ahead=self._read_ahead.pop(key, None)))
            else:
                assert not job.is_ordered, f"adapter {key} is on its way"
                job.is_ordered = True

    def copy(self, key: AdapterKey, placed: PlacedAdapter) -> None:
        job = self._jobs[key]
        self._copy_thread.submit(self._run, job, lambda: self._work.copy(job, placed))

    def cancel(self, key: AdapterKey) -> None:
        with self._lock:
            job = self._jobs.pop(key)
            job.cancelled = True
        # A load that still runs lets go when its report is polled.
        if job.is_reported:
            self._work.let_go(job)

    def poll(self) -> list[LoaderReport]:
        reports = []
        for _ in range(self._reports.qsize()):
            job, report = self._reports.get_nowait()
            job.is_reported = True
            if job.cancelled:
                self._work.let_go(job)
                continue
            if report.done is not Done.LOADED:
                with self._lock:
                    del self._jobs[report.key]
            reports.append(job.read_ahead if report.done is Done.LOADED and job.read_ahead else report)
        return reports

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for job in self._jobs.values():
                job.cancelled = True
        for threads in (self._load_threads, self._copy_thread):
            threads.shutdown(wait=True, cancel_futures=True)
        self.poll()
        for job in self._jobs.values():
            self._work.let_go(job)

    def _begin(self, job: _Job) -> None:
        self._jobs[job.key] = job
        self._load_threads.submit(self._run, job, lambda: self._work.load(job))

    def _remember(self, report: LoaderReport) -> None:
        """What was read ahead came from disk, though whoever orders it next finds it in host memory."""
        if report.done is Done.LOADED and report.from_disk:
            self._read_ahead[report.key] = report
            if len(self._read_ahead) > MAX_REMEMBERED:
                del self._read_ahead[next(iter(self._read_ahead))]

    def _run(self, job: _Job, work: Callable[[], LoaderReport]) -> None:
        report = work()
        with self._lock:
            if not job.is_ordered:
                del self._jobs[job.key]
                self._remember(report)
        if job.is_ordered:
            self._reports.put((job, report))
            self._on_ready()
        else:
            self._work.let_go(job)


class _Work:
    """The two parts of the way, and the pin on the host copy between them."""

    def __init__(self, source: HostAdapterStore, write: WriteAdapter) -> None:
        self._source = source
        self._write = write

    def load(self, job: _Job) -> LoaderReport:
        begun = time.perf_counter()

        def read() -> LoaderReport:
            if job.cancelled:
                raise LoadCancelled("cancelled before it began")
            packed, from_disk = self._source.fetch_pinned(job.key, lambda: job.cancelled)
            job.packed = packed
            return LoaderReport(job.key, Done.LOADED, time.perf_counter() - begun, packed.nbytes, from_disk)

        return _reported(job.key, read)

    def copy(self, job: _Job, placed: PlacedAdapter) -> LoaderReport:
        begun = time.perf_counter()

        def write() -> LoaderReport:
            assert job.packed is not None, "an adapter is loaded before it is copied"
            self._write(job.packed, placed)
            return LoaderReport(job.key, Done.COPIED, time.perf_counter() - begun, job.packed.nbytes)

        try:
            return _reported(job.key, write)
        finally:
            self.let_go(job)

    def let_go(self, job: _Job) -> None:
        if job.packed is not None:
            self._source.unpin(job.key)
            job.packed = None


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
    except Exception:
        # A bad adapter must not take a loader thread and every later load with it; the log has the trace.
        _LOG.exception("loading adapter %s failed", key)
        return LoaderReport(key, Done.FAILED, error="loading the adapter failed; the server's log says why")
