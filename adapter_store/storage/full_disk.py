"""Tell errors of a full disk from other errors of files and databases."""

import errno
import sqlite3

_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full(error: OSError | sqlite3.Error) -> bool:
    """Return whether an error means that the disk, or the user's quota on it, is full.

    SQLite reports a full disk when it writes. When it opens a database on a full disk, the first error is that the
    `-shm` file beside it cannot grow.
    """
    if isinstance(error, OSError):
        return error.errno in _ERRNOS
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE
