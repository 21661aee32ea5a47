"""Copy the log lines of replicas to the stderr of the command that started them.

Each line is one write below the size that the system keeps atomic (4096 bytes), so replicas' lines do not mix.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PIECE_BYTES = 64 << 10


@contextmanager
def log_pipe(path: Path) -> Iterator[None]:
    """Make a named pipe for the block, and copy what is written to it to stderr.

    Raises:
        OSError: the pipe cannot be made.
    """
    os.mkfifo(path, mode=0o600)
    # With our own writer open, the reader sees no end of file before the end of the block.
    reader, writer = (
        os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC),
        os.open(path, os.O_WRONLY | os.O_CLOEXEC),
    )
    os.set_blocking(reader, True)
    copying = threading.Thread(target=_copy, args=(reader,), name="log lines", daemon=True)
    copying.start()
    try:
        yield
    finally:
        os.close(writer)
        path.unlink()
        # Replicas that are still alive hold the pipe open.
        copying.join(1.0)


def _copy(reader: int) -> None:
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while piece := pipe.read(PIECE_BYTES):
            with suppress(ValueError, OSError):
                sys.stderr.write(piece.decode("utf-8", "replace"))
                sys.stderr.flush()
