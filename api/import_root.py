"""The one folder of the server from which a request may import adapters by path: `--lora-import-root`.

Paths are taken as the disk has them, links followed, before they are compared: a link that leads out of the folder is
outside, whoever put it there. What is outside is answered alike whether it exists or not, and no answer holds a path.
"""

import os
import stat
from io import BufferedReader
from pathlib import Path

from adapter_store.peft_dir import CONFIG_NAME, MLX_WEIGHTS_NAME, WEIGHTS_NAME
from api.errors import ApiError


class ImportRoot:
    """A folder below which requests may name others. `root` exists, its links resolved."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def folder(self, path: str) -> Path:
        """The adapter's folder that a request names, absolute or below the root, resolved.

        Raises:
            ApiError: 403, it or a file of an adapter in it is outside; 404, there is no such folder.
        """
        found = self._resolved(self._root / path)
        try:
            if not found.is_dir():
                raise _not_there()
            for folder in (found, *(file.parent for file in found.glob(f"*/{CONFIG_NAME}"))):
                for name in (CONFIG_NAME, WEIGHTS_NAME, MLX_WEIGHTS_NAME):
                    self._resolved(folder / name)
        except (OSError, ValueError):
            raise _not_there() from None
        return found

    def open(self, path: Path) -> BufferedReader:
        """Open a file and check where it is afterwards: a link that was changed meanwhile leads nowhere.

        Raises:
            ApiError: 403, what has been opened is outside, or no regular file.
            OSError: it cannot be opened.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            place = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if not place.is_relative_to(self._root) or not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _outside()
            return os.fdopen(fd, "rb")
        except BaseException:
            os.close(fd)
            raise

    def _resolved(self, path: Path) -> Path:
        try:
            found = path.resolve()
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
            raise _not_there() from None
        if not found.is_relative_to(self._root):
            raise _outside()
        return found


def _outside() -> ApiError:
    message = "lora_path must lie below the folder that the server was given as --lora-import-root, links followed"
    return ApiError(403, message, code="path_not_allowed", param="lora_path")


def _not_there() -> ApiError:
    message = "there is no such folder below the server's import root (names of a hub are not fetched)"
    return ApiError(404, message, code="adapter_not_found", param="lora_path")
