"""Weights on disk, named by their digest: written once, and visible only when complete.

    root/blobs/sha256/<64 hex digits>
    root/tmp/<uuid>                      uploads in progress; removed when the store opens

Order of an upload: temporary file, verify, fsync, rename, fsync of the folder. Every change of the disk is one call
of an `os` function, so that a test can fail or kill each of them.
"""

import contextlib
import hashlib
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from adapter_store.errors import BlobLengthMismatch, BlobNotFound, DigestMismatch, StoreFull, StoreUnusable
from adapter_store.storage.full_disk import is_full

UNREFERENCED_BLOB_AGE_S = 24 * 3600.0
UNREFERENCED_BYTES = 1 << 30
"""Bytes of unreferenced blobs above which the oldest are removed before that age."""
REGISTRATION_S = 600.0
"""Time after an upload during which it is not removed, however many bytes are unreferenced."""
NUM_LOCKS = 64
PROBE_BYTES = 16 << 20
"""Room that an upload may need; a disk with less counts as full."""
NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn an OSError into StoreFull or StoreUnusable, without its path."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise StoreFull(
                f"no room on the store's disk while {doing}; nothing changed. Free some and retry"
            ) from error
        raise StoreUnusable(f"the store failed while {doing}: {error.strerror or type(error).__name__}") from error


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """Count what a sweep removed: blobs, their bytes, and unfinished uploads."""

    num_blobs: int
    num_bytes: int
    num_unfinished: int = 0


@dataclass(frozen=True, slots=True)
class BlobFile:
    """Describe a file in the folder of blobs."""

    name: str
    nbytes: int
    # Seconds since it was written last.
    age_s: float


class BlobUpload:
    """Receive one blob; leaving the `with` block without `commit` drops it.

    One thread at a time may write. Any thread may abort the upload, which waits for the call in progress.

    Args:
        directory: where the blob goes.
        digest: SHA-256 of the bytes to come.
        length: number of bytes to come.
        on_stored: called with the digest once the blob is visible.
    """

    def __init__(
        self,
        directory: "BlobDirectory",
        digest: str,
        length: int,
        on_stored: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._directory = directory
        self._digest = digest
        self.length = length
        self._on_stored = on_stored
        self._received = 0
        self._lock = threading.RLock()
        self._hasher = hashlib.sha256()
        self._path = directory.new_temporary_path()
        with disk_errors("starting an upload"):
            self._fd: int | None = os.open(self._path, NEW_FILE, 0o600)
        directory.on_upload_started(self._path, digest, length)

    @property
    def is_closed(self) -> bool:
        """Return whether the upload was committed or dropped."""
        return self._fd is None

    def __enter__(self) -> "BlobUpload":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes.

        Raises:
            BlobLengthMismatch: more than announced; the upload is dropped.
            StoreFull, StoreUnusable: the disk refused them; the upload is dropped.
        """
        view = memoryview(data)
        with self._lock:
            fd = self._open_fd()
            if self._received + view.nbytes > self.length:
                self.abort()
                raise BlobLengthMismatch(self.length, self._received + view.nbytes)
            try:
                with disk_errors("writing an upload"):
                    write_all(fd, view)
            except Exception:
                self.abort()
                raise
            self._hasher.update(view)
            self._received += view.nbytes

    def commit(self) -> None:
        """Make the blob visible, durably.

        Raises:
            BlobLengthMismatch: fewer bytes than announced.
            DigestMismatch: the bytes do not match the announced digest.
            StoreFull, StoreUnusable: the disk refused. After any error the blob is not visible.
        """
        with self._lock:
            fd = self._open_fd()
            try:
                with disk_errors("finishing an upload"):
                    self._verify()
                    os.fsync(fd)
                    self._close()
                    self._directory.adopt(self._path, self._digest)
                self._on_stored(self._digest)
            finally:
                self.abort()

    def abort(self) -> None:
        """Drop the upload; do nothing after a commit or another abort."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._directory.on_upload_ended(self._path)

    def _verify(self) -> None:
        if self._received != self.length:
            raise BlobLengthMismatch(self.length, self._received)
        if (actual := self._hasher.hexdigest()) != self._digest:
            raise DigestMismatch(self._digest, actual)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ValueError("the upload is closed")
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def write_all(fd: int, view: memoryview) -> None:
    view = view.cast("B")
    while view:
        view = view[os.write(fd, view) :]


class BlobDirectory:
    """Manage the folders `blobs/sha256` and `tmp` under the store's root.

    All state is on disk, except the names that are not durable yet and the announced lengths of uploads in progress.
    Operations on one digest are serialized: a failing upload must not remove a blob that another has just stored, and a
    removal must not delete a file that was replaced after it was examined.
    """

    def __init__(self, root: Path) -> None:
        self._not_durable: set[str] = set()
        self._in_progress: dict[Path, tuple[str, int]] = {}
        self._locks = tuple(threading.Lock() for _ in range(NUM_LOCKS))
        self._blobs = root / "blobs" / "sha256"
        self._temporary = root / "tmp"
        for directory in (self._blobs, self._temporary):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (self._blobs, self._blobs.parent, root):
            fsync_directory(directory)

    def check_writable(self) -> None:
        """Check that uploads can be written, by allocating a file of `PROBE_BYTES`.

        Raises:
            StoreFull, StoreUnusable.
        """
        path = self.new_temporary_path()
        with disk_errors(f"reserving the {PROBE_BYTES >> 20} MiB that an upload may need"):
            fd = os.open(path, NEW_FILE, 0o600)
            try:
                os.posix_fallocate(fd, 0, PROBE_BYTES)
            finally:
                os.close(fd)
                os.unlink(path)

    def new_temporary_path(self) -> Path:
        """Return a fresh path for an upload."""
        return self._temporary / uuid.uuid4().hex

    def on_upload_started(self, temporary: Path, digest: str, length: int) -> None:
        """Record an upload of `length` bytes."""
        self._in_progress[temporary] = digest, length

    def on_upload_ended(self, temporary: Path) -> None:
        """Forget an upload that was dropped, or completed and passed to `on_stored`."""
        self._in_progress.pop(temporary, None)

    def in_progress(self) -> tuple[tuple[str, int], ...]:
        """Return digests and lengths of uploads in progress."""
        return tuple(self._in_progress.values())

    def exists(self, digest: str) -> bool:
        """Return whether a blob exists durably: a name that a power failure could remove does not count."""
        with disk_errors("looking for weights"):
            return digest not in self._not_durable and (self._blobs / digest).is_file()

    def path(self, digest: str) -> Path:
        """Return a blob's path, for another process to read; the file is removed when nothing refers to the blob."""
        return self._blobs / digest

    def open(self, digest: str) -> BufferedReader:
        """Open a blob for reading.

        Raises:
            BlobNotFound: it does not exist.
        """
        try:
            with disk_errors("opening weights"):
                return os.fdopen(os.open(self._blobs / digest, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb")
        except StoreUnusable as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise BlobNotFound(digest) from None
            raise

    def keep_room(self) -> None:
        """Remove blobs that can be fetched again while the disk is full. Here, no blob can be: do nothing."""

    def drop_damaged(self, digest: str) -> bool:
        """Remove a blob that was read back damaged if it can be fetched again; return whether it was removed."""
        return False

    def adopt(self, temporary: Path, digest: str) -> None:
        """Rename a complete file into place and make its name durable.

        An existing file of the digest is replaced, so that another upload repairs damaged weights.
        """
        target = self._blobs / digest
        with self._lock_for(digest):
            is_new = not target.exists()
            if is_new:
                # Until its name is durable, `exists` must not find the blob, or a version could refer to it.
                self._not_durable.add(digest)
            try:
                os.replace(temporary, target)
                try:
                    fsync_directory(self._blobs)
                except OSError:
                    if is_new:
                        os.unlink(target)
                    raise
            finally:
                self._not_durable.discard(digest)

    def remove(self, digests: Iterable[str], is_needed: Callable[[str], bool] = lambda _: False) -> None:
        """Delete blobs durably, with one fsync for all, except needed ones; a missing blob is no error.

        Raises:
            StoreFull, StoreUnusable: the disk refused to delete one; the others are deleted nevertheless.
        """
        removed, refused = False, None
        with disk_errors("removing weights"):
            for digest in digests:
                with self._lock_for(digest):
                    if is_needed(digest):
                        continue
                    try:
                        os.unlink(self._blobs / digest)
                        removed = True
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        refused = error
            if removed:
                fsync_directory(self._blobs)
            if refused is not None:
                raise refused

    def names(self) -> set[str]:
        """Return the digests of blobs, and the names of foreign files in their folder."""
        with disk_errors("listing weights"):
            return set(os.listdir(self._blobs))

    def size(self, name: str) -> int:
        """Return the bytes of a blob, or of a foreign file; 0 if there is none."""
        with disk_errors("looking for weights"), contextlib.suppress(FileNotFoundError):
            facts = (self._blobs / name).lstat()
            return facts.st_size if stat.S_ISREG(facts.st_mode) else 0
        return 0

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each blob by digest, and of each foreign file by name."""
        with disk_errors("listing weights"):
            return {path.name: facts.st_size for path, facts in sorted(_files(self._blobs))}

    def foreign_paths(self) -> list[Path]:
        """Return the paths in the store's folders that are not regular files; the store never touches them."""
        with disk_errors("listing weights"):
            folders = (self._blobs, self._temporary)
            return sorted({path for folder in folders for path in folder.iterdir()}.difference(*map(_paths, folders)))

    def sweep(self, referenced: Collection[str], age_s: float = UNREFERENCED_BLOB_AGE_S) -> SweepSummary:
        """Remove unfinished uploads, and unreferenced blobs older than `age_s`.

        The age keeps blobs that are yet to be registered, also after a restart. Only the holder of the store's lock
        file may call this, before it accepts uploads.
        """
        with disk_errors("removing unfinished uploads"):
            unfinished = _paths(self._temporary)
            for path in unfinished:
                os.unlink(path)
        old = {file.name for file in self.oldest_first() if file.age_s > age_s}
        swept = self.remove_old(old.difference(referenced), age_s)
        return SweepSummary(swept.num_blobs, swept.num_bytes, len(unfinished))

    def oldest_first(self) -> list[BlobFile]:
        """Return all files, those written longest ago first."""
        now_s = time.time()
        with disk_errors("listing weights"):
            files = [BlobFile(path.name, facts.st_size, now_s - facts.st_mtime) for path, facts in _files(self._blobs)]
        return sorted(files, key=lambda file: -file.age_s)

    def remove_old(self, names: Collection[str], age_s: float) -> SweepSummary:
        """Remove the files among these that are older than `age_s`; a file that was uploaded again meanwhile stays."""
        num_blobs = num_bytes = 0
        with disk_errors("removing weights"):
            for name in sorted(names):
                path = self._blobs / name
                with self._lock_for(name), contextlib.suppress(FileNotFoundError):
                    facts = path.stat()
                    if time.time() - facts.st_mtime > age_s:
                        os.unlink(path)
                        num_blobs, num_bytes = num_blobs + 1, num_bytes + facts.st_size
            if num_blobs:
                fsync_directory(self._blobs)
        return SweepSummary(num_blobs, num_bytes)

    def _lock_for(self, name: str) -> threading.Lock:
        """Return the lock that serializes operations on a file."""
        return self._locks[hash(name) % NUM_LOCKS]


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the regular files of a folder. Others are not the store's; they must not keep it from opening."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            facts = path.lstat()
            if stat.S_ISREG(facts.st_mode):
                yield path, facts


def _paths(folder: Path) -> list[Path]:
    return [path for path, _ in _files(folder)]


def fsync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
