"""Give each replica of a machine its own folder, which its successor takes over with its contents."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path


@contextmanager
def free_folder(parent: Path) -> Iterator[Path]:
    """Lock the first folder below `parent` that no process holds while the block runs; create one if all are held.

    Raises:
        OSError: no folder can be created.
    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in count():
        lock = os.open(parent / f"{number}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        try:
            folder = parent / str(number)
            folder.mkdir(mode=0o700, exist_ok=True)
            yield folder
        finally:
            os.close(lock)
        return
