"""The store's folder: made if it is not there, and locked, so that two servers never share it; which base it is for."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from adapter_store.errors import StoreLocked, StoreUnusable
from adapter_store.storage.blobs import disk_errors, fsync_directory


@contextlib.contextmanager
def opening(root: Path) -> Iterator[None]:
    """Errors met while opening name the folder: they are for whoever gave it."""
    try:
        with disk_errors("opening"):
            yield
    except StoreUnusable as error:
        raise StoreUnusable(f"store {root} cannot be used: {error}") from error


def lock_root(root: Path) -> int:
    """Create the folder and take its lock; the file descriptor holds it, and a dead server's lock goes with it."""
    _make_durably(root)
    fd = os.open(root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StoreLocked(f"store {root} is in use by another server; stop it, or choose another --store") from None
    return fd


def _make_durably(root: Path) -> None:
    """Make the folder and those above it, one by one, each durable before the next."""
    missing = [path for path in (root, *root.parents) if not path.exists()]
    # The last one that is there may be of a server that was killed before it made that durable.
    there = missing[-1].parent if missing else root
    with contextlib.suppress(PermissionError):
        fsync_directory(there.parent)
    for path in reversed(missing):
        path.mkdir(mode=0o700 if path == root else 0o777, exist_ok=True)
        fsync_directory(path.parent)
