"""Snapshots on disk: the keys and values of a version's fixed prompt, as bytes that only this machine can use.

    root/snapshots/<version>-<digest>        complete
    root/snapshots/<uuid>.part               being written; removed when the store opens

A file is its head, one line of JSON, and the bytes. The head has the facts that the bytes depend on, and the SHA-256 of
each piece of `PIECE_BYTES`; pieces are read and hashed in parallel. The digest in the name is that of the facts. A file
is valid if it is complete and its head and bytes match; otherwise it is removed. Order of a write: temporary file,
fsync, rename, fsync of the folder. Older snapshots are removed after it, so that a failed write loses none.
"""

import contextlib
import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from adapter_store.errors import StoreFull
from adapter_store.spec import AdapterId
from adapter_store.storage.blobs import NEW_FILE, disk_errors, fsync_directory, write_all

PIECE_BYTES = 1 << 20
MAX_THREADS = 4
"""Most threads that hash; also at most half the processors, because an adapter is loaded at the same time."""
_PART = ".part"
Facts = Mapping[str, Any]
"""The facts that the bytes of a snapshot depend on, as plain JSON values."""


class SnapshotDamaged(Exception):
    """Report that a file's contents do not match its name; the file was removed."""


class VersionGone(Exception):
    """Report that a snapshot's version was deleted while the snapshot was written; the snapshot was removed."""


class SnapshotName(NamedTuple):
    """Name a snapshot: its version, as `owner_of` writes it, and a digest of its facts."""

    owner: str
    digest: str

    @property
    def file(self) -> str:
        """Return the name of its file."""
        return f"{self.owner}-{self.digest}"


@dataclass(frozen=True, slots=True)
class Stored:
    """Describe a snapshot that was written."""

    nbytes: int
    # Snapshots that were removed to make room for it.
    removed: tuple[SnapshotName, ...] = ()


def owner_of(adapter_id: str, version: int) -> str:
    """Return a version as written in file names; no other version ever gets the same text."""
    return f"{hashlib.sha256(adapter_id.encode()).hexdigest()[:32]}.{version}"


def differing(own: Facts, other: Facts) -> list[str]:
    """Return the names of the facts that differ."""
    return sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))


def digest_of(facts: Facts) -> str:
    """Return the digest of a snapshot's facts."""
    return hashlib.sha256(_line(facts)).hexdigest()[:32]


class SnapshotFiles:
    """Manage the folder `snapshots` under the store's root. Any thread may call.

    Args:
        owners: returns the versions that the store has, as `owner_of` writes them; snapshots of others are removed.
    """

    def __init__(self, root: Path, owners: Callable[[], Collection[str]]) -> None:
        self._folder = root / "snapshots"
        self._owners = owners
        # Snapshots that were removed with their versions.
        self._removed: SimpleQueue[SnapshotName] = SimpleQueue()
        # Held from listing the folder until it is changed.
        self._lock = threading.Lock()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._sweep()

    def sizes(self) -> dict[SnapshotName, int]:
        """Return the bytes of every snapshot, the least recently used first."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                owner, dash, digest = entry.name.partition("-")
                # The file may be removed meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if not dash or not entry.is_file(follow_symlinks=False):
                        continue
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, SnapshotName(owner, digest), status.st_size))
        return {name: nbytes for _, name, nbytes in sorted(found)}

    def read(self, name: SnapshotName, facts: Facts, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the `nbytes` bytes of a snapshot. Their memory is not zeroed first, which would hold the GIL.

        Raises:
            SnapshotDamaged: the file does not match its name or the facts; it is removed.
            FileNotFoundError: there is no such snapshot.
            OSError: the disk failed.
        """
        path = self._folder / name.file
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            head = file.read(len(_head(facts, ["0" * 64] * -(-nbytes // PIECE_BYTES))))
            data = np.empty(nbytes, np.uint8)
            is_whole = os.fstat(file.fileno()).st_size == len(head) + nbytes

            def read(at: int, piece: memoryview) -> str:
                return _sha256(piece) if os.preadv(file.fileno(), [piece], len(head) + at) == len(piece) else ""

            is_right = is_whole and head == _head(facts, _of_pieces(read, data.data))
        if not is_right:
            self.remove(name)
            raise SnapshotDamaged(f"{name.file} does not hold what its name says")
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def write(self, name: SnapshotName, facts: Facts, data: memoryview, max_bytes: int) -> Stored:
        """Store a snapshot; remove others of its version, and the least recently used ones beyond `max_bytes`.

        Raises:
            StoreFull, StoreUnusable: the disk refused, or the snapshot exceeds `max_bytes`; an existing snapshot of
                that name stays as it was.
            VersionGone: its version was deleted meanwhile.
        """
        head = _head(facts, _of_pieces(lambda _, piece: _sha256(piece), data))
        nbytes = len(head) + data.nbytes
        if nbytes > max_bytes:
            raise StoreFull(f"a snapshot of {nbytes} bytes is larger than all of them may be, {max_bytes} bytes")
        temporary = self._folder / f"{uuid.uuid4().hex}{_PART}"
        try:
            with disk_errors("writing a snapshot"):
                fd = os.open(temporary, NEW_FILE, 0o600)
                try:
                    write_all(fd, memoryview(head))
                    write_all(fd, data)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(temporary, self._folder / name.file)
                fsync_directory(self._folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        removed = self._make_room(max_bytes, name, nbytes)
        if name.owner not in self._owners():
            self.remove(name)
            raise VersionGone("its version was deleted meanwhile")
        return Stored(nbytes, removed)

    def trim(self, max_bytes: int) -> None:
        """Remove the least recently used snapshots beyond `max_bytes`."""
        self._make_room(max_bytes)

    def remove(self, name: SnapshotName) -> None:
        """Remove a snapshot; do nothing if there is none or the disk refuses."""
        with contextlib.suppress(OSError):
            os.unlink(self._folder / name.file)

    def remove_versions(self, adapter_id: AdapterId, versions: frozenset[int]) -> None:
        """Remove the snapshots of deleted versions."""
        owners = {owner_of(adapter_id, version) for version in versions}
        with contextlib.suppress(OSError):
            for name in [name for name in self.sizes() if name.owner in owners]:
                self.remove(name)
                self._removed.put(name)

    def take_removed(self) -> list[SnapshotName]:
        """Return the snapshots that were removed with their versions since the last call."""
        return [self._removed.get_nowait() for _ in range(self._removed.qsize())]

    def _make_room(self, max_bytes: int, new: SnapshotName | None = None, nbytes: int = 0) -> tuple[SnapshotName, ...]:
        """Remove the least recently used snapshots beyond `max_bytes`, counting `nbytes` for a `new` one, and all other
        snapshots of the new one's version.
        """
        with self._lock:
            sizes = self.sizes()
            if new is not None:
                sizes.pop(new, None)
            doomed = [other for other in sizes if new is not None and other.owner == new.owner]
            left = sum(sizes.values()) - sum(sizes[other] for other in doomed)
            for other in sizes:
                if left + nbytes > max_bytes and other not in doomed:
                    doomed.append(other)
                    left -= sizes[other]
            for other in doomed:
                self.remove(other)
            return tuple(doomed)

    def _sweep(self) -> None:
        """Remove unfinished files of a killed process, and snapshots of versions that are gone."""
        for path in self._folder.glob(f"*{_PART}"):
            with contextlib.suppress(OSError):
                path.unlink()
        owners = self._owners()
        for name in self.sizes():
            if name.owner not in owners:
                self.remove(name)


def _head(facts: Facts, digests: Sequence[str]) -> bytes:
    return _line({**facts, "sha256": digests})


def _of_pieces(compute: Callable[[int, memoryview], str], data: memoryview) -> list[str]:
    """Call `compute` with the offset and the bytes of each piece, several in parallel; return the results in order."""
    places = range(0, data.nbytes, PIECE_BYTES)
    with ThreadPoolExecutor(min(MAX_THREADS, -(-(os.cpu_count() or 1) // 2))) as threads:
        return list(threads.map(compute, places, (data[at : at + PIECE_BYTES] for at in places)))


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _line(facts: Facts) -> bytes:
    return json.dumps(facts, sort_keys=True).encode() + b"\n"
