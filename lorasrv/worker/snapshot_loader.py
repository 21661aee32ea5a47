"""Snapshot loader: pages of prefixes between disk or peers, host memory and the pool, in threads.

The engine gives orders and polls for reports; it never waits. Reading, copying and writing have their own threads, so
that a slow disk or peer delays no copy. A load that does not return in time fails, and the prefix is computed. A load
that is no longer wanted is stopped and never reported.
"""

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapter_store.errors import AdapterError, StoreFull
from adapter_store.storage.snapshots import SnapshotDamaged, SnapshotFiles, SnapshotName, VersionGone
from lorasrv.errors import PeerFailed
from lorasrv.memory.snapshots import MAX_ARRIVING
from lorasrv.scheduler_output import PeerSnapshot, SnapshotFile, SnapshotOrders
from lorasrv.worker.device import compute_alone
from lorasrv.worker.disk_threads import DiskThreads

_LOG = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 5.0
"""A read that takes longer, or begins later, is not worth it: most prompts are computed by then."""
Copies = tuple[tuple[int, int], ...]
ReadPages = Callable[[tuple[int, ...]], Tensor]
"""Return pages as uint8 [P, bytes] in host memory; called between two steps, in the engine's thread."""
WritePages = Callable[[Tensor, Copies], None]
"""Fill pages from uint8 [P, bytes] by (row, page) pairs; return once they may be read."""
FETCH_TIMEOUT_S = 90.0
"""A fetch ends by itself before this time; otherwise its thread is abandoned."""


class FetchPages(Protocol):
    """Read pages from a peer, in a thread."""

    def __call__(self, wanted: PeerSnapshot, page_bytes: int, is_wanted: Callable[[], bool]) -> npt.NDArray[np.uint8]:
        """Return the first of the wanted pages as uint8 [P * page_bytes], as many as arrived in time and undamaged.

        Args:
            is_wanted: returns whether to continue; called between pieces.
        Raises:
            PeerFailed: no page arrived.
        """


@dataclass(frozen=True, slots=True)
class SnapshotLoaded:
    """Report a snapshot in host memory."""

    name: SnapshotName
    seconds: float
    # Number of leading pages that were loaded.
    num_pages: int


@dataclass(frozen=True, slots=True)
class SnapshotCopied:
    """Report a snapshot in the pool."""

    name: SnapshotName
    seconds: float


@dataclass(frozen=True, slots=True)
class SnapshotSaved:
    """Report a snapshot on the disk, and the snapshots that were removed for it."""

    name: SnapshotName
    nbytes: int
    removed: tuple[SnapshotName, ...]


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """Report a load, a copy or a save that failed."""

    name: SnapshotName
    # One word, for the counters.
    reason: str
    # Text for a person.
    error: str
    is_save: bool = False
    # Whether it is no longer on the disk.
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotRemoved:
    """Report a snapshot that was removed with its version."""

    name: SnapshotName


SnapshotReport = SnapshotLoaded | SnapshotCopied | SnapshotSaved | SnapshotFailed | SnapshotRemoved


@dataclass(slots=True, eq=False)
class _OrderedLoad:
    """Hold a load that was ordered."""

    # The loading thread reads it.
    is_wanted: bool = True


class SnapshotLoader:
    """Execute the orders of `SnapshotManager`; call `on_ready` from threads whenever a report can be polled. For the
    engine's thread.

    Args:
        files: files on the disk; None: no snapshot is kept there.
        fetch: reads from peers; None: there are no peers.
        page_bytes: bytes of a page in all slabs.
        max_bytes: most bytes of all snapshots on the disk.
    """

    def __init__(
        self,
        files: SnapshotFiles | None,
        page_bytes: int,
        max_bytes: int,
        read: ReadPages,
        write: WritePages,
        on_ready: Callable[[], None],
        load_timeout_s: float | None = LOAD_TIMEOUT_S,
        fetch: FetchPages | None = None,
    ) -> None:
        self._files, self._fetch = files, fetch
        self._page_bytes, self._max_bytes = page_bytes, max_bytes
        self._read, self._write = read, write
        self._on_ready = on_ready
        self._loads: dict[SnapshotName, _OrderedLoad] = {}
        self._host: dict[SnapshotName, Tensor] = {}
        # Each report with its load, and the pages that the load has read.
        self._reports: queue.SimpleQueue[tuple[SnapshotReport, _OrderedLoad, Tensor | None]] = queue.SimpleQueue()
        self._timeout_s = LOAD_TIMEOUT_S if load_timeout_s is None else min(LOAD_TIMEOUT_S, load_timeout_s)
        self._load_threads = DiskThreads(1, "snapshot-load", self._timeout_s, compute_alone)
        self._fetch_threads = DiskThreads(MAX_ARRIVING, "page-fetch", FETCH_TIMEOUT_S, compute_alone)
        self._copy_thread = ThreadPoolExecutor(1, "snapshot-copy", initializer=compute_alone)
        self._save_thread = ThreadPoolExecutor(1, "snapshot-save", initializer=compute_alone)

    def send(self, orders: SnapshotOrders) -> None:
        """Begin to execute orders. Pages to be saved are read at once."""
        for name in orders.cancels:
            if (unwanted := self._loads.pop(name, None)) is not None:
                unwanted.is_wanted = False
            self._host.pop(name, None)
        ordered = time.perf_counter()
        for source in orders.loads:
            load = self._loads[source.name] = _OrderedLoad()
            threads = self._load_threads if isinstance(source, SnapshotFile) else self._fetch_threads
            read = threads.submit(source.name, partial(self._run_load, source, ordered, load))
            read.add_done_callback(partial(self._loaded, source.name, load))
        for name, copies in orders.copies:
            self._copy_thread.submit(self._run_copy, name, self._host.pop(name), copies)
        for file, pages in orders.saves:
            try:
                data = self._read(pages)
            except Exception as error:
                # Out of memory on the host or the device: a snapshot can wait, the engine's thread must go on.
                _LOG.warning("reading the pages of snapshot %s failed, so it is not kept: %s", file.name.file, error)
                self._report(SnapshotFailed(file.name, "memory", type(error).__name__, is_save=True))
            else:
                self._save_thread.submit(self._run_save, file, data)

    def poll(self) -> list[SnapshotReport]:
        """Return the reports since the last call; never waits."""
        gone = self._files.take_removed() if self._files is not None else ()
        reports: list[SnapshotReport] = [SnapshotRemoved(name) for name in gone]
        for _ in range(self._reports.qsize()):
            report, load, data = self._reports.get_nowait()
            if not load.is_wanted:
                continue
            if data is not None:
                self._host[report.name] = data
            if self._loads.get(report.name) is load:
                del self._loads[report.name]
            reports.append(report)
        return reports

    def close(self) -> None:
        """Begin no more work; a copy or a save under way is finished."""
        for load in self._loads.values():
            load.is_wanted = False
        self._load_threads.close()
        self._fetch_threads.close()
        for threads in (self._copy_thread, self._save_thread):
            threads.shutdown(wait=True, cancel_futures=True)

    def _run_load(
        self, source: SnapshotFile | PeerSnapshot, ordered: float, load: _OrderedLoad
    ) -> tuple[SnapshotReport, Tensor]:
        begun = time.perf_counter()
        if isinstance(source, PeerSnapshot):
            assert self._fetch is not None, "a peer is asked without a way to"
            data = self._fetch(source, self._page_bytes, lambda: load.is_wanted)
        elif begun - ordered > self._timeout_s:
            raise TimeoutError(f"others took {self._timeout_s:g} s before it")
        else:
            assert self._files is not None, "a snapshot is read without a disk"
            data = self._files.read(source.name, source.facts, source.num_pages * self._page_bytes)
        rows = torch.from_numpy(data).view(-1, self._page_bytes)
        return SnapshotLoaded(source.name, time.perf_counter() - begun, len(rows)), rows

    def _loaded(self, name: SnapshotName, load: _OrderedLoad, read: "Future[tuple[SnapshotReport, Tensor]]") -> None:
        error = read.exception()
        if error is None:
            report, data = read.result()
            self._report(report, load, data)
        else:
            self._report(_why_not_loaded(name, error) if load.is_wanted else _unwanted(name), load)

    def _report(self, report: SnapshotReport, load: _OrderedLoad | None = None, data: Tensor | None = None) -> None:
        self._reports.put((report, load or _OrderedLoad(), data))
        self._on_ready()

    def _run_copy(self, name: SnapshotName, data: Tensor, copies: Copies) -> None:
        begun = time.perf_counter()
        report: SnapshotReport
        try:
            self._write(data, copies)
            report = SnapshotCopied(name, time.perf_counter() - begun)
        except Exception as error:
            # A thread that has died would stall every later restore, and the requests that wait for it.
            _LOG.exception("copying snapshot %s into the pool failed", name.file)
            report = SnapshotFailed(name, "copy", str(error))
        self._report(report)

    def _run_save(self, file: SnapshotFile, data: Tensor) -> None:
        report: SnapshotReport
        try:
            assert self._files is not None, "a snapshot is kept without a disk"
            stored = self._files.write(file.name, file.facts, memoryview(data.numpy().data).cast("B"), self._max_bytes)
            report = SnapshotSaved(file.name, stored.nbytes, stored.removed)
        except VersionGone as error:
            report = SnapshotFailed(file.name, "unneeded", str(error), is_save=True)
        except AdapterError as error:
            _LOG.warning("snapshot %s was not kept: %s", file.name.file, error)
            report = SnapshotFailed(file.name, "full" if isinstance(error, StoreFull) else "disk", str(error), True)
        except Exception as error:
            _LOG.exception("writing snapshot %s failed", file.name.file)
            report = SnapshotFailed(file.name, "disk", type(error).__name__, is_save=True)
        self._report(report)


def _unwanted(name: SnapshotName) -> SnapshotFailed:
    return SnapshotFailed(name, "unneeded", "it is not wanted any more")


def _why_not_loaded(name: SnapshotName, error: BaseException) -> SnapshotFailed:
    match error:
        case PeerFailed():
            _LOG.warning("%s; the prompt is computed", error)
            return SnapshotFailed(name, error.reason, str(error))
        case SnapshotDamaged():
            _LOG.warning("%s; it was removed, and the prompt is computed", error)
            return SnapshotFailed(name, "damaged", str(error), is_gone=True)
        case FileNotFoundError():
            return SnapshotFailed(name, "missing", "it was removed", is_gone=True)
        case _:
            _LOG.warning("reading snapshot %s failed, so the prompt is computed: %s", name.file, error)
            return SnapshotFailed(name, "disk", str(error))
