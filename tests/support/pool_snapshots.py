"""A `SnapshotLoader` for `pool_world.py`: what it was ordered to do ends when the test says so, or fails. Snapshots are
rows of the tags that the world's pages hold."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from adapter_store.storage.snapshots import SnapshotName
from lorasrv.scheduler_output import PeerSnapshot, SnapshotFile, SnapshotOrders
from lorasrv.worker.snapshot_loader import (
    Copies,
    SnapshotCopied,
    SnapshotFailed,
    SnapshotLoaded,
    SnapshotRemoved,
    SnapshotReport,
    SnapshotSaved,
)

Rows: TypeAlias = npt.NDArray[np.int64]
MAX_FILES = 3


class TagLoader:
    """Reads, copies and writes snapshots.

    Args:
        units: tags of the pool, int64 [P, units of a page].
        peer_rows: returns the pages that a peer answers with.
        files: what is on the disk.
        layout: number of the layout of pages, which a file must have to be read.
    """

    def __init__(
        self, units: Rows, peer_rows: Callable[[PeerSnapshot], Rows], files: dict[SnapshotName, Rows], layout: int
    ) -> None:
        self._units, self._peer_rows, self.files, self._layout = units, peer_rows, files, layout
        # Files that are gone, which the next load finds.
        self._lost: set[SnapshotName] = set()
        self.loading: dict[SnapshotName, SnapshotFile | PeerSnapshot] = {}
        self.filling: dict[SnapshotName, tuple[Rows, Copies]] = {}
        self.saving: dict[SnapshotName, Rows] = {}
        self._host: dict[SnapshotName, Rows] = {}
        self._reports: list[SnapshotReport] = []

    def under_way(self) -> list[SnapshotName]:
        """Return the snapshots for which something is to end."""
        return sorted({*self.loading, *self.filling, *self.saving})

    def send(self, orders: SnapshotOrders) -> None:
        for name in orders.cancels:
            assert (name in self.loading) != (name in self._host), "nothing can be cancelled"
            self.loading.pop(name, None)
            self._host.pop(name, None)
        self.loading |= {source.name: source for source in orders.loads}
        self.filling |= {name: (self._host.pop(name), copies) for name, copies in orders.copies}
        self.saving |= {file.name: self._units[list(pages)] for file, pages in orders.saves}

    def poll(self) -> list[SnapshotReport]:
        reports, self._reports = self._reports, []
        return reports

    def end(self, name: SnapshotName, count: int) -> None:
        """End what is under way for a snapshot; a peer sends at most `count` pages. 0: it fails."""
        if name in self.loading:
            self._reports.append(self._load(self.loading.pop(name), count))
        elif name in self.filling:
            rows, copies = self.filling.pop(name)
            for place, page in copies if count else ():
                self._units[page] = rows[place]
            self._reports.append(SnapshotCopied(name, 1e-6) if count else SnapshotFailed(name, "copy", ""))
        else:
            self._reports.append(self._save(name, self.saving.pop(name), fails=not count))

    def remove(self, name: SnapshotName, *, is_told: bool) -> None:
        """Remove a file: with its version, which is reported, or by damage, which the next load finds."""
        del self.files[name]
        if is_told:
            self._reports.append(SnapshotRemoved(name))
        else:
            self._lost.add(name)

    def check_files(self, known: Mapping[SnapshotName, int]) -> None:
        """Compare the files with what is known of them when all reports have been taken."""
        sizes = {name: rows.nbytes for name, rows in self.files.items()}
        assert sizes.items() <= known.items(), "a file is not known"
        assert known.keys() <= sizes.keys() | self._lost, "a file is known that is not there"

    def _load(self, source: SnapshotFile | PeerSnapshot, count: int) -> SnapshotReport:
        rows = self._peer_rows(source)[:count] if isinstance(source, PeerSnapshot) else self._read(source.name)
        if rows is None or not count:
            return SnapshotFailed(source.name, "cut", "", is_gone=rows is None)
        self._host[source.name] = rows
        return SnapshotLoaded(source.name, 1e-6, len(rows))

    def _read(self, name: SnapshotName) -> Rows | None:
        self._lost.discard(name)
        return None if (rows := self.files.get(name)) is None else rows ^ self._layout

    def _save(self, name: SnapshotName, rows: Rows, *, fails: bool) -> SnapshotReport:
        if fails:
            return SnapshotFailed(name, "disk", "", is_save=True)
        others = [other for other in self.files if other.owner != name.owner]
        removed = tuple(other for other in self.files if other not in others[1 - MAX_FILES :])
        for other in removed:
            del self.files[other]
        self.files[name] = rows ^ self._layout
        return SnapshotSaved(name, rows.nbytes, removed)
