"""Make files of the store unreadable to other users of the machine, whatever their folder allows."""

import contextlib
import errno
import logging
import os
import stat
from pathlib import Path

_LOG = logging.getLogger(__name__)


def make_private(path: Path) -> None:
    """Create the file if missing and make it readable by its owner only; SQLite's other files get the same mode.

    An existing file is not opened here: closing it would drop the locks of this process's other connections (POSIX).

    Raises:
        OSError: it is a link or not a file, or it cannot be created or changed.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if stat.S_IMODE(status.st_mode) & 0o077:
        _LOG.warning("%s was accessible to other users; its mode is now 0600", path)
        path.chmod(0o600)
    folder = path.parent.stat()
    if os.geteuid() == 0 and status.st_uid != folder.st_uid:
        # Another user's server must be able to read a file that `sudo lorasrv key create` made.
        os.chown(path, folder.st_uid, folder.st_gid)
