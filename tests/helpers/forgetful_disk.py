"""A model of a disk that forgets: what a power loss may leave of what was written and not fsynced.

File data is safe after an fsync of the file, a name (created, replaced, removed) after an fsync of its folder; nothing
else is. What is not safe may be there, or not, or in part: which part is a `Loss`. The idea of enumerating the states
that a crash may leave is that of ALICE (Pillai et al., OSDI 2014) and of SQLite's own crash tests.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECTOR_BYTES = 512
# SQLite's wal-index is shared memory, rebuilt after a crash; nobody expects it to be durable.
UNMODELLED = ("-shm",)

Tree = dict[str, bytes | None]
"""Path -> content of a file, None for a folder."""


@dataclass(frozen=True)
class Op:
    """One change of the disk; the kind `ack`: all up to here was acknowledged. `site` says whose fsync it is."""

    kind: str
    path: str = ""
    node: int = 0
    offset: int = 0
    data: bytes = b""
    target: str = ""
    site: str = ""


@dataclass(frozen=True)
class Loss:
    """Which of the changes that are not safe survive: all or none of the names, of the data, or either by chance."""

    names: bool = False
    data: bool = False
    seed: int | None = None

    def chooser(self, keep: bool, salt: str) -> Callable[[], bool]:
        if self.seed is None:
            return lambda: keep
        chance = random.Random(f"{self.seed} {salt}")
        return lambda: chance.random() < 0.5


KILLED = Loss(names=True, data=True)
"""A process that dies leaves everything it wrote."""
SAFE_ONLY = Loss()
NAMES_ONLY = Loss(names=True)
DATA_ONLY = Loss(data=True)


@dataclass
class _File:
    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    unsafe: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes since the last fsync: (offset, bytes), or (new length, None)."""


@dataclass
class _Folder:
    names: dict[str, int] = field(default_factory=dict)
    safe: dict[str, int] = field(default_factory=dict)
    unsafe: list[tuple[str, int | None]] = field(default_factory=list)

    def set(self, name: str, node: int | None) -> None:
        if node is None:
            del self.names[name]
        else:
            self.names[name] = node
        self.unsafe.append((name, node))


class ForgetfulDisk:
    """The folder `top` and everything below, as it is (all of it safe), and what happens to it from then on."""

    def __init__(self, top: Path) -> None:
        self._nodes: list[_File | _Folder] = [_Folder()]
        for path in sorted(top.rglob("*")):
            if path.name.endswith(UNMODELLED):
                continue
            name = path.relative_to(top).as_posix()
            if path.is_dir():
                self._add(name, _Folder())
            else:
                data = path.read_bytes()
                self._add(name, _File(bytearray(data), data))
        for node in self._nodes:
            if isinstance(node, _Folder):
                _sync(node)

    def node(self, path: str) -> int | None:
        """The file or folder that a path (relative to the top; the top is ".") names now."""
        at = 0
        for part in _parts(path):
            folder = self._nodes[at]
            if not isinstance(folder, _Folder) or part not in folder.names:
                return None
            at = folder.names[part]
        return at

    def folder_path(self, node: int) -> str | None:
        """The path of a folder; None for a file."""
        if node == 0:
            return "."
        paths = dict(self._folders(0, ""))
        return paths.get(node)

    def _folders(self, at: int, prefix: str) -> Iterator[tuple[int, str]]:
        folder = self._nodes[at]
        assert isinstance(folder, _Folder)
        for name, node in folder.names.items():
            if isinstance(self._nodes[node], _Folder):
                yield node, prefix + name
                yield from self._folders(node, f"{prefix}{name}/")

    def apply(self, op: Op) -> None:
        """Let a change happen."""
        if op.kind == "create":
            self._add(op.path, _File())
        elif op.kind == "mkdir":
            self._add(op.path, _Folder())
        elif op.kind == "write":
            _write(self._file(op.node).data, op.offset, op.data)
            self._file(op.node).unsafe.append((op.offset, op.data))
        elif op.kind == "truncate":
            _resize(self._file(op.node).data, op.offset)
            self._file(op.node).unsafe.append((op.offset, None))
        elif op.kind == "rename":
            node = self.node(op.path)
            assert node is not None
            self._set(op.target, node)
            self._set(op.path, None)
        elif op.kind == "unlink":
            self._set(op.path, None)
        elif op.kind == "sync":
            _sync(self._nodes[op.node])
        else:
            assert op.kind == "ack", op.kind

    def tree(self, loss: Loss) -> Tree:
        """What is found after the crash."""
        return dict(self._walk(0, "", loss))

    def _walk(self, at: int, prefix: str, loss: Loss) -> Iterator[tuple[str, bytes | None]]:
        folder = self._nodes[at]
        assert isinstance(folder, _Folder)
        for name, node in sorted(_surviving_names(folder, loss.chooser(loss.names, prefix)).items()):
            path, found = prefix + name, self._nodes[node]
            if isinstance(found, _File):
                yield path, _surviving_data(found, loss.chooser(loss.data, path))
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
        folder = self._nodes[at]
        assert isinstance(folder, _Folder)
        folder.set(name, node)

    def _file(self, node: int) -> _File:
        file = self._nodes[node]
        assert isinstance(file, _File)
        return file


def crash_states(
    disk: ForgetfulDisk, ops: Iterable[Op], losses: Iterable[Loss], dropped_sites: frozenset[str] = frozenset()
) -> Iterator[tuple[int, Tree]]:
    """What a crash after any of the changes may leave: (how many acknowledgements there were, the tree).

    Equal pairs come once. `disk` is as it was before them, and is used up. The fsyncs of `dropped_sites` do nothing.
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
    """Make a tree real, in a folder that is there."""
    for path, data in tree.items():
        if data is None:
            (top / path).mkdir(mode=0o700)
        else:
            (top / path).write_bytes(data)


def read_tree(top: Path) -> Tree:
    """A real folder as a tree."""
    paths = [path for path in sorted(top.rglob("*")) if not path.name.endswith(UNMODELLED)]
    return {p.relative_to(top).as_posix(): None if p.is_dir() else p.read_bytes() for p in paths}


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _sync(node: _File | _Folder) -> None:
    if isinstance(node, _File):
        node.safe = bytes(node.data)
    else:
        node.safe = dict(node.names)
    node.unsafe.clear()


def _surviving_names(folder: _Folder, keep: Callable[[], bool]) -> dict[str, int]:
    """Changes of one name survive in their order: a later one only with all before it."""
    names, lost = dict(folder.safe), set()
    for name, node in folder.unsafe:
        if name in lost or not keep():
            lost.add(name)
        elif node is None:
            names.pop(name, None)
        else:
            names[name] = node
    return names


def _surviving_data(file: _File, keep: Callable[[], bool]) -> bytes:
    """Writes survive sector by sector, in any order."""
    data = bytearray(file.safe)
    for offset, written in file.unsafe:
        if written is None:
            if keep():
                _resize(data, offset)
            continue
        for start in range(0, len(written), SECTOR_BYTES):
            if keep():
                _write(data, offset + start, written[start : start + SECTOR_BYTES])
    return bytes(data)


def _write(data: bytearray, offset: int, written: bytes) -> None:
    if len(data) < offset:
        _resize(data, offset)
    data[offset : offset + len(written)] = written


def _resize(data: bytearray, length: int) -> None:
    if length < len(data):
        del data[length:]
    else:
        data.extend(bytes(length - len(data)))
