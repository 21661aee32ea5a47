"""Watch SQLite's reads and writes call by call: a VFS in front of the usual one, in the library that `sqlite3` uses.

It is built with ctypes and becomes the default, so that the store's own connections use it without changes. This
requires a `sqlite3` module that links SQLite as a shared library, as Debian's and pyenv's do; see `is_possible`.
"""

import contextlib
import ctypes
import errno
import functools
import importlib.util
import os
import sqlite3
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store_disk import DiskWatch

NAME = b"watched"
# Names and numbers are those of sqlite3.h.
SQLITE_OK, SQLITE_FULL, SQLITE_IOERR, SQLITE_CANTOPEN = 0, 13, 10, 14
IOERR_READ, IOERR_WRITE, IOERR_FSYNC, IOERR_TRUNCATE, IOERR_DELETE = (SQLITE_IOERR | n << 8 for n in (1, 3, 4, 6, 10))
# Main journal, super journal, WAL: at their first sync, SQLite also syncs their folder (UNIXFILE_DIRSYNC in os_unix.c).
OPEN_JOURNALS = 0x800 | 0x4000 | 0x80000

_Read = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_Truncate = CFUNCTYPE(c_int, c_void_p, c_int64)
_Int = CFUNCTYPE(c_int, c_void_p, c_int)
_Close = CFUNCTYPE(c_int, c_void_p)
# File names are passed as addresses: SQLite keeps them, and the data that follows them in memory.
_Open = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
_Delete = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int)
_OTHERS = (
    *("xFileSize", "xLock", "xUnlock", "xCheckReservedLock", "xFileControl", "xSectorSize"),
    *("xDeviceCharacteristics", "xShmMap", "xShmLock", "xShmBarrier", "xShmUnmap", "xFetch", "xUnfetch"),
)


class _Methods(Structure):
    _fields_ = [
        ("iVersion", c_int),
        ("xClose", _Close),
        ("xRead", _Read),
        ("xWrite", _Read),
        ("xTruncate", _Truncate),
        ("xSync", _Int),
        *[(name, c_void_p) for name in _OTHERS],
    ]


class _Vfs(Structure):
    _fields_ = [
        ("iVersion", c_int),
        ("szOsFile", c_int),
        ("mxPathname", c_int),
        ("pNext", c_void_p),
        ("zName", c_char_p),
        ("pAppData", c_void_p),
        ("xOpen", _Open),
        ("xDelete", _Delete),
        *[(f"other{n}", c_void_p) for n in range(14)],
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the SQLite library that the module `_sqlite3` is linked with, or None if it cannot be loaded."""
    spec = importlib.util.find_spec("_sqlite3")
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        library.sqlite3_vfs_find.restype = POINTER(_Vfs)
        library.sqlite3_vfs_register.argtypes = [POINTER(_Vfs), c_int]
        library.sqlite3_libversion.restype = c_char_p
    except (OSError, AttributeError):
        return None
    return library if library.sqlite3_libversion().decode() == sqlite3.sqlite_version else None


def is_possible() -> bool:
    """Return whether connections of `sqlite3` can be watched here."""
    return _library() is not None and os.name == "posix"


class _WatchingVfs:
    """Report calls for files below the top, in front of the default VFS. Built once, since open files point into it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.watch: DiskWatch | None = None
        self._library = library
        self._usual = library.sqlite3_vfs_find(None)
        self._files: dict[int, _OpenFile] = {}
        self._methods: dict[int, _Methods] = {}
        self._vfs = _Vfs.from_buffer_copy(self._usual.contents)
        self._vfs.zName, self._vfs.pNext = NAME, None
        self._vfs.xOpen, self._vfs.xDelete = _Open(self._open), _Delete(self._delete)

    @contextlib.contextmanager
    def default(self, watch: "DiskWatch") -> Iterator[None]:
        assert self.watch is None, "one watch at a time"
        self.watch = watch
        self._library.sqlite3_vfs_register(ctypes.byref(self._vfs), 1)
        try:
            yield
        finally:
            self._library.sqlite3_vfs_register(self._usual, 1)
            self.watch = None

    def _watched(self, name: int | None) -> tuple["DiskWatch | None", str]:
        """Return the watch of a path, and the path's name in it."""
        if self.watch is None or name is None:
            return None, ""
        path = self.watch.inside(ctypes.string_at(name).decode())
        return (None, "") if path is None else (self.watch, path)

    def _open(self, _: int, name: int | None, file: int, flags: int, out_flags: int) -> int:
        watch, path = self._watched(name)
        usual, vfs = self._usual.contents.xOpen, ctypes.cast(self._usual, c_void_p)
        if watch is None:
            return int(usual(vfs, name, file, flags, out_flags))
        methods = ctypes.cast(file, POINTER(c_void_p))
        methods[0] = None

        def work() -> int:
            result = int(usual(vfs, name, file, flags, out_flags))
            if result == SQLITE_OK:
                if watch.disk.node(path) is None:
                    watch.note("create", path=path)
                node = watch.disk.node(path)
                assert node is not None
                self._files[file] = _OpenFile(node, path, methods[0], bool(flags & OPEN_JOURNALS))
                methods[0] = ctypes.addressof(self._patched(methods[0]))
            return result

        return _guarded(watch, "sqlite open", work, SQLITE_CANTOPEN, SQLITE_CANTOPEN)

    def _delete(self, _: int, name: int, sync_folder: int) -> int:
        watch, path = self._watched(name)
        usual, vfs = self._usual.contents.xDelete, ctypes.cast(self._usual, c_void_p)
        if watch is None:
            return int(usual(vfs, name, sync_folder))

        def work() -> int:
            result = int(usual(vfs, name, sync_folder))
            if result == SQLITE_OK:
                watch.note("unlink", path=path)
                if sync_folder:
                    self._sync_folder(watch, path)
            return result

        return _guarded(watch, "sqlite unlink", work, IOERR_DELETE, IOERR_DELETE)

    def _sync_folder(self, watch: "DiskWatch", path: str) -> None:
        node = watch.disk.node(os.path.dirname(path))
        assert node is not None
        watch.note("sync", node=node, site="sqlite folder")

    def _patched(self, address: int) -> _Methods:
        if address not in self._methods:
            own = _Methods.from_buffer_copy(_Methods.from_address(address))
            own.xClose, own.xRead, own.xWrite = _Close(self._close), _Read(self._read), _Read(self._write)
            own.xTruncate, own.xSync = _Truncate(self._truncate), _Int(self._sync)
            self._methods[address] = own
        return self._methods[address]

    # -- methods of files; a file that outlives its watch is written normally

    def _close(self, address: int) -> int:
        return int(self._files.pop(address).usual.xClose(address))

    def _on_file(self, address: int, what: str, failed: int, full: int, call: Callable[..., int], **change: Any) -> int:
        """Run a method as a turn, and record the change if it succeeds."""
        file, watch = self._files[address], self.watch
        if watch is None:
            return int(call(file.usual))

        def work() -> int:
            result = int(call(file.usual))
            if result == SQLITE_OK and change:
                watch.note(node=file.node, **change)
            return result

        return _guarded(watch, f"sqlite {what}", work, failed, full)

    def _read(self, address: int, buffer: int, amount: int, offset: int) -> int:
        read = lambda usual: usual.xRead(address, buffer, amount, offset)  # noqa: E731
        return self._on_file(address, "read", IOERR_READ, IOERR_READ, read)

    def _write(self, address: int, buffer: int, amount: int, offset: int) -> int:
        write = lambda usual: usual.xWrite(address, buffer, amount, offset)  # noqa: E731
        change = {"kind": "write", "offset": offset, "data": ctypes.string_at(buffer, amount)}
        return self._on_file(address, "write", IOERR_WRITE, SQLITE_FULL, write, **change)

    def _truncate(self, address: int, size: int) -> int:
        truncate = lambda usual: usual.xTruncate(address, size)  # noqa: E731
        kinds = (IOERR_TRUNCATE, IOERR_TRUNCATE)
        return self._on_file(address, "truncate", *kinds, truncate, kind="truncate", offset=size)

    def _sync(self, address: int, flags: int) -> int:
        """Sync only in the model."""
        file, watch = self._files[address], self.watch
        if watch is None:
            return int(file.usual.xSync(address, flags))

        def work() -> int:
            watch.note("sync", node=file.node, site=f"sqlite {file.kind}")
            if file.syncs_folder:
                file.syncs_folder = False
                self._sync_folder(watch, file.path)
            return SQLITE_OK

        return _guarded(watch, "sqlite fsync", work, IOERR_FSYNC, IOERR_FSYNC)


class _OpenFile:
    """Describe a file that SQLite has open."""

    def __init__(self, node: int, path: str, methods: int, syncs_folder: bool) -> None:
        self.node = node
        self.path = path
        self.usual = _Methods.from_address(methods)
        self.syncs_folder = syncs_folder
        self.kind = next((kind for kind in ("wal", "journal") if path.endswith(f"-{kind}")), "database")


def _guarded(watch: "DiskWatch", kind: str, work: Callable[[], int], failed: int, full: int) -> int:
    """Take a turn and do the work unless the turn fails. Exceptions must not escape: the caller is SQLite's C code."""
    try:
        watch.turn(kind)
        return int(work())
    except OSError as error:
        return full if error.errno == errno.ENOSPC else failed
    except BaseException as error:
        watch.failures.append(error)
        return failed


@functools.cache
def _vfs() -> _WatchingVfs:
    library = _library()
    assert library is not None, "see is_possible"
    return _WatchingVfs(library)


@contextlib.contextmanager
def watching(watch: "DiskWatch") -> Iterator[Any]:
    """Watch the connections that are opened in the `with` block."""
    with _vfs().default(watch):
        yield
