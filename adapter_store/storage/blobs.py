"""Weights on disk, named by their digest: written once, complete or not there at all.

    root/blobs/sha256/<64 hex digits>
    root/tmp/<uuid>                      uploads under way; wiped when the store opens

Order of an upload: temporary file, verify, fsync, rename, fsync of the folder. Every change of the disk goes through
`os` functions one by one, so that a test can fail or kill each of them.
"""

import contextlib
import errno
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

UNREFERENCED_BLOB_AGE_S = 24 * 3600.0
NUM_TURNS = 64
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn what the disk says into StoreFull or StoreUnusable, without its path."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(
                f"no room on the store's disk while {doing}; nothing changed. Free some and retry"
            ) from error
        raise StoreUnusable(f"the store failed while {doing}: {error.strerror or type(error).__name__}") from error


@dataclass(frozen=True, slots=True)
class Swept:
    """What sweeping removed: blobs, their bytes, and unfinished uploads."""

    num_blobs: int
    num_bytes: int
    num_unfinished: int = 0


class BlobUpload:
    """One blob on its way in; leaving the `with` block without `commit` drops it. Written by one thread at a time; any
    may abort it, and then waits for what is being done.

    `on_stored` is told the digest once the blob is visible.
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
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        with disk_errors("starting an upload"):
            self._fd: int | None = os.open(self._path, flags, 0o600)
        directory.begins(self._path, digest, length)

    @property
    def is_over(self) -> bool:
        """Nothing more can be written."""
        return self._fd is None

    def __enter__(self) -> "BlobUpload":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes.

        Raises:
            BlobLengthMismatch: more than announced; the upload is dropped at once.
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
                    _write_all(fd, view)
            except Exception:
                self.abort()
                raise
            self._hasher.update(view)
            self._received += view.nbytes

    def commit(self) -> None:
        """Make the blob visible, durably.

        Raises:
            BlobLengthMismatch: fewer bytes than announced.
            DigestMismatch: other bytes than announced.
            StoreFull, StoreUnusable: the disk refused. In every case nothing is visible.
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
        """Drop the upload; nothing happens after a commit or another abort."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._directory.ends(self._path)

    def _verify(self) -> None:
        if self._received != self.length:
            raise BlobLengthMismatch(self.length, self._received)
        if (actual := self._hasher.hexdigest()) != self._digest:
            raise DigestMismatch(self._digest, actual)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ValueError("the upload is over")
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def _write_all(fd: int, view: memoryview) -> None:
    view = view.cast("B")
    while view:
        view = view[os.write(fd, view) :]


class BlobDirectory:
    """The folders `blobs/sha256` and `tmp` under the store's root. The disk is the state, but for which names are not
    durable yet and how long uploads under way will be.

    Of one digest one thing is done at a time: an upload that fails must not take away what another has just brought,
    nor a removal what has replaced the file that it looked at.
    """

    def __init__(self, root: Path) -> None:
        self._not_durable: set[str] = set()
        self._under_way: dict[Path, tuple[str, int]] = {}
        self._turns = tuple(threading.Lock() for _ in range(NUM_TURNS))
        self._blobs = root / "blobs" / "sha256"
        self._temporary = root / "tmp"
        for directory in (self._blobs, self._temporary):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (self._blobs, self._blobs.parent, root):
            fsync_directory(directory)

    @property
    def is_writable(self) -> bool:
        return os.access(self._temporary, os.W_OK | os.X_OK)

    def new_temporary_path(self) -> Path:
        return self._temporary / uuid.uuid4().hex

    def begins(self, temporary: Path, digest: str, length: int) -> None:
        """An upload of so many bytes."""
        self._under_way[temporary] = digest, length

    def ends(self, temporary: Path) -> None:
        """It is dropped, or complete and whoever is told of that knows it."""
        self._under_way.pop(temporary, None)

    def under_way(self) -> tuple[tuple[str, int], ...]:
        """Digests and lengths of uploads that have not ended."""
        return tuple(self._under_way.values())

    def exists(self, digest: str) -> bool:
        """Whether a blob is there for good: a name that a power loss could take away does not count."""
        with disk_errors("looking for weights"):
            return digest not in self._not_durable and (self._blobs / digest).is_file()

    def path(self, digest: str) -> Path:
        """Where a blob lies, for another process to read; it goes when nothing names it."""
        return self._blobs / digest

    def open(self, digest: str) -> BufferedReader:
        """Open a blob for reading. Raises: BlobNotFound."""
        try:
            with disk_errors("opening weights"):
                return os.fdopen(os.open(self._blobs / digest, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb")
        except StoreUnusable as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise BlobNotFound(digest) from None
            raise

    def adopt(self, temporary: Path, digest: str) -> None:
        """Rename a complete file into place and make the name durable. An old file of the digest is replaced:
        uploading again repairs damaged weights."""
        target = self._blobs / digest
        with self._turn(digest):
            is_new = not target.exists()
            if is_new:
                # A name that may not survive a power loss must not be found by `exists`, or a version could name it.
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
        """Delete blobs unless they are needed, durably, with one fsync for all of them; one that is gone already is no
        error.

        Raises: StoreFull, StoreUnusable: the disk refused one; the others are gone all the same.
        """
        removed, refused = False, None
        with disk_errors("removing weights"):
            for digest in digests:
                with self._turn(digest):
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

    def sizes(self) -> dict[str, int]:
        """Every blob's bytes by its digest, and those of files that do not belong here by their name."""
        with disk_errors("listing weights"):
            return {path.name: facts.st_size for path, facts in sorted(_files(self._blobs))}

    def strangers(self) -> list[Path]:
        """What lies among blobs and unfinished uploads and is no plain file: never touched."""
        with disk_errors("listing weights"):
            folders = (self._blobs, self._temporary)
            return sorted({path for folder in folders for path in folder.iterdir()}.difference(*map(_paths, folders)))

    def sweep(self, referenced: Collection[str], age_s: float = UNREFERENCED_BLOB_AGE_S) -> Swept:
        """Remove unfinished uploads, and blobs that nothing names and that are older than `age_s`, which spares one
        whose registration is still to come, also if the server stopped meanwhile.

        Only for the holder of the store's lock file, before it takes uploads.
        """
        with disk_errors("removing unfinished uploads"):
            unfinished = _paths(self._temporary)
            for path in unfinished:
                os.unlink(path)
        swept = self.remove_old(self.older_than(age_s).difference(referenced), age_s)
        return Swept(swept.num_blobs, swept.num_bytes, len(unfinished))

    def older_than(self, age_s: float) -> set[str]:
        """Names of all files that were written longer ago than this."""
        with disk_errors("listing weights"):
            return {path.name for path, facts in _files(self._blobs) if time.time() - facts.st_mtime > age_s}

    def remove_old(self, names: Collection[str], age_s: float) -> Swept:
        """Remove those of these files that are still that old: one that was uploaded again meanwhile stays."""
        num_blobs = num_bytes = 0
        with disk_errors("removing weights"):
            for name in sorted(names):
                path = self._blobs / name
                with self._turn(name), contextlib.suppress(FileNotFoundError):
                    facts = path.stat()
                    if time.time() - facts.st_mtime > age_s:
                        os.unlink(path)
                        num_blobs, num_bytes = num_blobs + 1, num_bytes + facts.st_size
            if num_blobs:
                fsync_directory(self._blobs)
        return Swept(num_blobs, num_bytes)

    def _turn(self, name: str) -> threading.Lock:
        """What is held while something is done to a file."""
        return self._turns[hash(name) % NUM_TURNS]


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Plain files: whoever put anything else there may want it back, and it is no reason not to start."""
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
