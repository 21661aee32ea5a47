"""Everything that a program does to a folder, seen call by call: written down, counted, made to fail or to kill.

`os` functions are replaced while `DiskWatch.active` lasts; SQLite's files come through `sqlite_watch.py`. Each call is
a turn: `on_turn(number, kind)` may raise OSError, which the caller then gets instead, or end the process.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forgetful_disk import ForgetfulDisk, Op

_FDS_OF_WRITERS = os.O_WRONLY | os.O_RDWR
# Helpers of the store: an fsync belongs to whoever asked for it.
_NO_SITES = ("fsync_directory",)


class DiskWatch:
    """Watches what happens below `top`, from one thread.

    Attributes:
        ops: the changes so far, for `forgetful_disk.crash_states`.
        turns: how many calls there were.
        failures: what went wrong in here, not in what is watched.
    """

    def __init__(self, top: Path, on_turn: Callable[[int, str], None] = lambda number, kind: None) -> None:
        self.top = str(top)
        self.disk = ForgetfulDisk(top)
        self.ops: list[Op] = []
        self.turns = 0
        self.failures: list[BaseException] = []
        self._on_turn = on_turn
        self._paused = False
        self._fds: dict[int, int] = {}

    def turn(self, kind: str) -> None:
        """Count a call before it happens. Raises: OSError: it shall fail."""
        if not self._paused:
            self.turns += 1
            self._on_turn(self.turns - 1, kind)

    def note(self, kind: str, **fields: Any) -> None:
        """Write down a change that has happened."""
        op = Op(kind, **fields)
        self.disk.apply(op)
        self.ops.append(op)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Calls are not counted: a test looks around."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def acknowledge(self) -> None:
        """What was done so far has been promised to somebody."""
        self.note("ack")

    def inside(self, path: object) -> str | None:
        """A path below the top as the disk's model names it; None for any other."""
        if not isinstance(path, str | os.PathLike):
            return None
        text = os.path.abspath(os.fspath(path))
        if text == self.top:
            return "."
        return text[len(self.top) + 1 :] if text.startswith(self.top + "/") else None

    def synced(self, node: int, site: str) -> None:
        self.note("sync", node=node, site=site)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Replace the functions of `os`."""
        from sqlite_watch import watching

        names = [name[1:] for name in vars(DiskWatch) if name.startswith("_") and hasattr(os, name[1:])]
        real = {name: getattr(os, name) for name in names}
        self._real = real
        for name in names:
            setattr(os, name, getattr(self, f"_{name}"))
        try:
            with watching(self):
                yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)

    # -- the functions of `os`, by their names

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = self.inside(path)
        if name is None:
            fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            self._fds.pop(fd, None)
            return fd
        self.turn("open")
        fd = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        self._fds.pop(fd, None)
        if flags & os.O_CREAT and self.disk.node(name) is None:
            self.note("create", path=name)
        if flags & _FDS_OF_WRITERS or flags & os.O_DIRECTORY:
            node = self.disk.node(name)
            assert node is not None
            self._fds[fd] = node
        return fd

    def _write(self, fd: int, data: Any) -> int:
        if fd in self._fds:
            self.turn("write")
        written: int = self._real["write"](fd, data)
        if fd in self._fds:
            end = os.lseek(fd, 0, os.SEEK_CUR)
            self.note("write", node=self._fds[fd], offset=end - written, data=bytes(memoryview(data)[:written]))
        return written

    def _fsync(self, fd: int) -> None:
        if fd not in self._fds:
            return self._real["fsync"](fd)
        self.turn("fsync")
        self.synced(self._fds[fd], _site(self.disk, self._fds[fd]))
        return None

    _fdatasync = _fsync

    def _close(self, fd: int) -> None:
        """Closes, whatever it then reports: so does Linux."""
        watched = self._fds.pop(fd, None)
        self._real["close"](fd)
        if watched is not None:
            self.turn("close")

    def _replace(self, source: Any, target: Any) -> None:
        if (name := self.inside(source)) is None:
            return self._real["replace"](source, target)
        self.turn("replace")
        self._real["replace"](source, target)
        self.note("rename", path=name, target=self.inside(target))
        return None

    _rename = _replace

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        if (name := self.inside(path)) is None:
            return self._real["unlink"](path, dir_fd=dir_fd)
        self.turn("unlink")
        self._real["unlink"](path, dir_fd=dir_fd)
        self.note("unlink", path=name)
        return None

    _remove = _unlink

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if (name := self.inside(path)) is None:
            return self._real["mkdir"](path, mode, dir_fd=dir_fd)
        self.turn("mkdir")
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        self.note("mkdir", path=name)
        return None

    def _stat(self, path: Any, **options: Any) -> os.stat_result:
        if self.inside(path) is not None:
            self.turn("stat")
        found: os.stat_result = self._real["stat"](path, **options)
        return found

    def _listdir(self, path: Any = ".") -> list[Any]:
        if self.inside(path) is not None:
            self.turn("listdir")
        names: list[Any] = self._real["listdir"](path)
        return names

    def _fdopen(self, fd: int, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if mode == "rb" and not rest and not options and self.inside(os.readlink(f"/proc/self/fd/{fd}")) is not None:
            return io.BufferedReader(_WatchedFile(self, fd))
        return self._real["fdopen"](fd, mode, *rest, **options)


class _WatchedFile(io.FileIO):
    """A file whose reads are turns."""

    def __init__(self, watch: DiskWatch, fd: int) -> None:
        super().__init__(fd, "rb")
        self._watch = watch

    def readinto(self, buffer: Any) -> int:
        self._watch.turn("read")
        return super().readinto(buffer) or 0

    def readall(self) -> bytes:
        self._watch.turn("read")
        return super().readall()


def _site(disk: ForgetfulDisk, node: int) -> str:
    """Whose fsync this is: function of the store, and path of a folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = Path(frame.f_code.co_filename)
        if "adapter_store" in name.parent.parts and "tests" not in name.parts and frame.f_code.co_name not in _NO_SITES:
            folder = disk.folder_path(node)
            return f"{name.stem}.{frame.f_code.co_qualname}" + (f" of {folder}" if folder is not None else "")
        frame = frame.f_back
    return "elsewhere"


def failing_at(turn: int, number: int) -> Callable[[int, str], None]:
    """Turn `turn` fails with this errno, once."""

    def on_turn(now: int, kind: str) -> None:
        if now == turn:
            raise OSError(number, os.strerror(number))

    return on_turn


def killing_at(turn: int, exit_code: int) -> Callable[[int, str], None]:
    """The process ends before turn `turn`, without clean-up."""

    def on_turn(now: int, kind: str) -> None:
        if now == turn:
            os._exit(exit_code)

    return on_turn


DISK_ERRORS = (errno.ENOSPC, errno.EIO)
