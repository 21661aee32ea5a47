"""Create and lock the store's folder, so that two servers never share it."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from adapter_store.errors import StoreFull, StoreLocked, StoreUnusable
from adapter_store.storage.blobs import disk_errors, fsync_directory

LOCKS = Path("/proc/locks")
_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@contextlib.contextmanager
def opening_errors(root: Path) -> Iterator[None]:
    """Add the folder's path to errors raised while opening the store; only the operator sees these errors."""
    try:
        with disk_errors("opening"):
            yield
    except StoreUnusable as error:
        cause = error.__cause__
        is_shut = isinstance(cause, OSError) and cause.errno in _NOT_WRITABLE
        fix = "; its folder must be writable, even for commands that only read it" if is_shut else ""
        raise StoreUnusable(f"store {root} cannot be used: {error}{fix}") from error
    except StoreFull as error:
        raise StoreFull(f"store {root}: {error}") from error


def lock_root(root: Path) -> int:
    """Create the folder and take its lock.

    Returns:
        The file descriptor that holds the lock; the lock ends with the process.

    Raises:
        StoreLocked: another server holds it.
    """
    _create_durably(root)
    fd = os.open(root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        error = in_use(root, fd)
        os.close(fd)
        raise error from None
    return fd


def in_use(root: Path, fd: int) -> StoreLocked:
    """Return the error for a store whose lock another process holds.

    Args:
        fd: the lock file.
    """
    pid = _holder(fd)
    server = f"another server{f', process {pid}' if pid else ''}"
    return StoreLocked(f"store {root} is in use by {server}; stop it, or choose another --store")


def _holder(fd: int) -> str:
    """Return text with the id of the process that has locked a file, or "" if Linux does not report it."""
    file = os.fstat(fd)
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with contextlib.suppress(OSError):
        for line in LOCKS.read_text().splitlines():
            # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF, with "->" before FLOCK if the process waits for the lock.
            _, kind, _, _, pid, file_of_it, *_ = line.split()
            # Process id 0 means a process of another container.
            if (kind, file_of_it) == ("FLOCK", place) and pid != "0":
                return pid
    return ""


def _create_durably(root: Path) -> None:
    """Create the folder and its missing parents one by one, each durable before the next."""
    missing = [path for path in (root, *root.parents) if not path.exists()]
    # A server may have created the deepest existing folder and died before its name was durable.
    existing = missing[-1].parent if missing else root
    with contextlib.suppress(PermissionError):
        fsync_directory(existing.parent)
    for path in reversed(missing):
        path.mkdir(mode=0o700 if path == root else 0o777, exist_ok=True)
        fsync_directory(path.parent)
