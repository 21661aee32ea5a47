"""A disk for crash tests: a model of the data that survives a power loss, and a watch that feeds it from a real folder.

In the model, file data is safe after an fsync of the file, and a name (created, replaced, removed) after an fsync of
its folder. Anything else may survive completely, partly or not at all, as a `Loss` decides. The enumeration of the
states that a crash may leave follows ALICE (Pillai et al., OSDI 2014) and SQLite's own crash tests.

While it is active, the watch replaces functions of `os`, and sees SQLite's files through `sqlite_watch.py`. Each call
is a turn, which may raise OSError for the caller or end the process.
"""

import contextlib
import io
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECTOR_BYTES = 512
# SQLite's wal-index is shared memory, rebuilt after a crash, and need not be durable.
UNMODELLED = ("-shm",)
Tree = dict[str, bytes | None]
"""Path -> content of a file, None for a folder."""


@dataclass(frozen=True)
class Op:
    """One change of the disk; the kind `ack` acknowledges all earlier ones. `site` is the caller of an fsync."""

    kind: str
    path: str = ""
    node: int = 0
    offset: int = 0
    data: bytes = b""
    target: str = ""
    site: str = ""


@dataclass(frozen=True)
class Loss:
    """Choose which unsafe changes survive: all or none of the names, all or none of the data, or each at random."""

    names: bool = False
    data: bool = False
    seed: int | None = None

    def chooser(self, keep: bool, salt: str) -> Callable[[], bool]:
        if self.seed is None:
            return lambda: keep
        chance = random.Random(f"{self.seed} {salt}")
        return lambda: chance.random() < 0.5


KILLED = Loss(names=True, data=True)
"""After the death of a process, everything that it wrote survives."""
SAFE_ONLY, NAMES_ONLY, DATA_ONLY = Loss(), Loss(names=True), Loss(data=True)


@dataclass
class _File:
    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    unsafe: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes since the last fsync: (offset, bytes), or (new length, None)."""

    def sync(self) -> None:
        self.safe = bytes(self.data)
        self.unsafe.clear()

    def change(self, offset: int, data: bytes | None) -> None:
        _change(self.data, offset, data)
        self.unsafe.append((offset, data))

    def surviving(self, keep: Callable[[], bool]) -> bytes:
        """Return the data after a crash; writes survive sector by sector, in any order."""
        data = bytearray(self.safe)
        for offset, written in self.unsafe:
            for start in range(0, len(written or b"x"), SECTOR_BYTES):
                if keep():
                    _change(data, offset + start, written and written[start : start + SECTOR_BYTES])
        return bytes(data)


@dataclass
class _Folder:
    names: dict[str, int] = field(default_factory=dict)
    safe: dict[str, int] = field(default_factory=dict)
    unsafe: list[tuple[str, int | None]] = field(default_factory=list)

    def sync(self) -> None:
        self.safe = dict(self.names)
        self.unsafe.clear()

    def set(self, name: str, node: int | None) -> None:
        if node is None:
            del self.names[name]
        else:
            self.names[name] = node
        self.unsafe.append((name, node))

    def surviving(self, keep: Callable[[], bool]) -> dict[str, int]:
        """Return the names after a crash; a change of a name survives only with all earlier changes of that name."""
        names, lost = dict(self.safe), set()
        for name, node in self.unsafe:
            if name in lost or not keep():
                lost.add(name)
            elif node is None:
                names.pop(name, None)
            else:
                names[name] = node
        return names


class ForgetfulDisk:
    """Model the folder `top` and everything below it, starting with its current state, which is safe."""

    def __init__(self, top: Path) -> None:
        self._nodes: list[_File | _Folder] = [_Folder()]
        for name, data in read_tree(top).items():
            self._add(name, _Folder() if data is None else _File(bytearray(data)))
        for node in self._nodes:
            node.sync()

    def node(self, path: str) -> int | None:
        """Return the node that a path currently names; the top is "."."""
        at = 0
        for part in _parts(path):
            folder = self._nodes[at]
            if not isinstance(folder, _Folder) or part not in folder.names:
                return None
            at = folder.names[part]
        return at

    def folder_path(self, node: int) -> str | None:
        """Return the path of a folder, or None for a file."""
        return "." if node == 0 else dict(self._folders(0, "")).get(node)

    def _folder(self, node: int) -> _Folder:
        folder = self._nodes[node]
        assert isinstance(folder, _Folder)
        return folder

    def _folders(self, at: int, prefix: str) -> Iterator[tuple[int, str]]:
        for name, node in self._folder(at).names.items():
            if isinstance(self._nodes[node], _Folder):
                yield node, prefix + name
                yield from self._folders(node, f"{prefix}{name}/")

    def apply(self, op: Op) -> None:
        """Apply a change."""
        if op.kind in ("create", "mkdir"):
            self._add(op.path, _File() if op.kind == "create" else _Folder())
        elif op.kind in ("write", "truncate"):
            file = self._nodes[op.node]
            assert isinstance(file, _File)
            file.change(op.offset, op.data if op.kind == "write" else None)
        elif op.kind == "rename":
            self._set(op.target, self.node(op.path))
            self._set(op.path, None)
        elif op.kind == "unlink":
            self._set(op.path, None)
        elif op.kind == "sync":
            self._nodes[op.node].sync()
        else:
            assert op.kind == "ack", op.kind

    def tree(self, loss: Loss) -> Tree:
        """Return the files and folders after a crash."""
        return dict(self._walk(0, "", loss))

    def _walk(self, at: int, prefix: str, loss: Loss) -> Iterator[tuple[str, bytes | None]]:
        for name, node in sorted(self._folder(at).surviving(loss.chooser(loss.names, prefix)).items()):
            path, found = prefix + name, self._nodes[node]
            if isinstance(found, _File):
                yield path, found.surviving(loss.chooser(loss.data, path))
            else:
                yield path, None
                yield from self._walk(node, path + "/", loss)

    def _add(self, path: str, node: _File | _Folder) -> None:
        self._nodes.append(node)
        self._set(path, len(self._nodes) - 1)

    def _set(self, path: str, node: int | None) -> None:
        *parents, name = _parts(path)
        at = self.node("/".join(parents))
        assert at is not None
        self._folder(at).set(name, node)


def crash_states(
    disk: ForgetfulDisk, ops: Iterable[Op], losses: Iterable[Loss], dropped_sites: frozenset[str] = frozenset()
) -> Iterator[tuple[int, Tree]]:
    """Yield the states that a crash after each change may leave: (acknowledgements so far, tree), equal pairs once.

    `disk` is the state before the changes, and is modified. The fsyncs of `dropped_sites` have no effect.
    """
    losses, seen, acknowledged = tuple(losses), set(), 0
    for op in ops:
        if op.kind == "sync" and op.site in dropped_sites:
            continue
        disk.apply(op)
        acknowledged += op.kind == "ack"
        for loss in losses:
            tree = disk.tree(loss)
            key = (acknowledged, hash(frozenset(tree.items())))
            if key not in seen:
                seen.add(key)
                yield acknowledged, tree


def write_tree(tree: Tree, top: Path) -> None:
    """Write a tree to the new folder `top`."""
    top.mkdir()
    for path, data in tree.items():
        if data is None:
            (top / path).mkdir(mode=0o700)
        else:
            (top / path).write_bytes(data)


def read_tree(top: Path) -> Tree:
    """Return a real folder as a tree."""
    paths = [path for path in sorted(top.rglob("*")) if not path.name.endswith(UNMODELLED)]
    return {p.relative_to(top).as_posix(): None if p.is_dir() else p.read_bytes() for p in paths}


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _change(data: bytearray, offset: int, written: bytes | None) -> None:
    """Write bytes at an offset, or resize to it."""
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    if written is None:
        del data[offset:]
    else:
        data[offset : offset + len(written)] = written


# Functions of `os` that change names, and the kind of change; functions that only look.
_CHANGES = {"replace": "rename", "rename": "rename", "unlink": "unlink", "remove": "unlink", "mkdir": "mkdir"}
_LOOKS = ("stat", "listdir")


class DiskWatch:
    """Watch the changes below `top`, from one thread.

    Attributes:
        ops: the changes so far, for `crash_states`.
        turns: the number of calls.
        failures: errors of the watch itself.
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
        self._real: dict[str, Any] = {}

    def turn(self, kind: str) -> None:
        """Count a call before it happens.

        Raises:
            OSError: the call must fail.
        """
        if not self._paused:
            self.turns += 1
            self._on_turn(self.turns - 1, kind)

    def note(self, kind: str, **fields: Any) -> None:
        """Record a change that has happened."""
        op = Op(kind, **fields)
        self.disk.apply(op)
        self.ops.append(op)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count calls while a test looks around."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def inside(self, path: object) -> str | None:
        """Return a path below the top as the model names it, or None for any other path."""
        if not isinstance(path, str | os.PathLike):
            return None
        text = os.path.abspath(os.fspath(path))
        if text == self.top:
            return "."
        return text[len(self.top) + 1 :] if text.startswith(self.top + "/") else None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Replace the functions of `os`, and SQLite's file system."""
        from sqlite_watch import watching

        replaced: dict[str, Callable[..., Any]] = {
            "open": self._open, "write": self._write, "fsync": self._fsync, "fdatasync": self._fsync,
            "close": self._close, "fdopen": self._fdopen
        }  # fmt: skip
        replaced |= {name: self._by_path(getattr(os, name), kind) for name, kind in _CHANGES.items()}
        replaced |= {name: self._by_path(getattr(os, name), None, name) for name in _LOOKS}
        self._real = {name: getattr(os, name) for name in replaced}
        for name, function in replaced.items():
            setattr(os, name, function)
        try:
            with watching(self):
                yield
        finally:
            for name, function in self._real.items():
                setattr(os, name, function)

    def _by_path(self, real: Callable[..., Any], change: str | None, kind: str = "") -> Callable[..., Any]:
        def call(path: Any = ".", *rest: Any, **options: Any) -> Any:
            inside = self.inside(path)
            if inside is not None:
                self.turn(change or kind)
            result = real(path, *rest, **options)
            if inside is not None and change is not None:
                self.note(change, path=inside, target=self.inside(rest[0]) if change == "rename" else "")
            return result

        return call

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = self.inside(path)
        if name is not None:
            self.turn("open")
        fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        self._fds.pop(fd, None)
        if name is None:
            return fd
        if flags & os.O_CREAT and self.disk.node(name) is None:
            self.note("create", path=name)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
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
            self._real["fsync"](fd)
            return
        self.turn("fsync")
        self.note("sync", node=self._fds[fd], site=_site(self.disk, self._fds[fd]))

    def _close(self, fd: int) -> None:
        """Close even if an error is reported, as Linux does."""
        watched = self._fds.pop(fd, None)
        self._real["close"](fd)
        if watched is not None:
            self.turn("close")

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
    """Return the caller of an fsync: function of the store, and path of a folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = Path(frame.f_code.co_filename)
        in_store = "adapter_store" in name.parent.parts and "tests" not in name.parts
        if in_store and frame.f_code.co_name != "fsync_directory":
            folder = disk.folder_path(node)
            return f"{name.stem}.{frame.f_code.co_qualname}" + (f" of {folder}" if folder is not None else "")
        frame = frame.f_back
    return "elsewhere"
