"""Tell errors of a full disk from other errors of files and databases."""

import errno
import sqlite3

_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full(error: OSError | sqlite3.Error) -> bool:
    """Return whether an error says that the disk, or the user's quota of it, has no room.

    SQLite says so where it writes. Where it opens a database of a full disk, the first error is that the `-shm` file
    beside it cannot grow.
    """
    if isinstance(error, OSError):
        return error.errno in _ERRNOS
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE
