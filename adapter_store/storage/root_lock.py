"""Create and lock the store's folder, so that two servers never share it."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from adapter_store.errors import StoreLocked, StoreUnusable
from adapter_store.storage.blobs import disk_errors, fsync_directory


@contextlib.contextmanager
def opening_errors(root: Path) -> Iterator[None]:
    """Add the folder's path to errors raised while opening the store, which only the operator sees."""
    try:
        with disk_errors("opening"):
            yield
    except StoreUnusable as error:
        raise StoreUnusable(f"store {root} cannot be used: {error}") from error


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
        os.close(fd)
        raise StoreLocked(f"store {root} is in use by another server; stop it, or choose another --store") from None
    return fd


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
