"""Machine code of the CPU kernels: compiled by Numba once per machine, kept on disk, then loaded without Numba.

A kernel is a C function with one address as its argument. `KERNELS` in a module of `cpu_kernels` has its Python code.
Importing Numba and reading its own cache took 2.2 s of every start, half of the time allowed for a start; loading
object code takes a tenth of that. Kernels raise no exceptions, so the functions for Numba's error paths are not needed.
Imports no torch.
"""

import ctypes
import hashlib
import importlib
import importlib.metadata
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from sgmv_kernels.cpu_runtime.kernel_names import Kernel
from sgmv_kernels.cpu_runtime.processor import name_and_features

logger = logging.getLogger(__name__)
_VERSION = re.compile("[0-9a-f]{16}")
_SOURCES = "cpu_*/*.py", "formats/*.py"
"""Files on which compiled code depends, and the measurements that are kept beside it (`measurements.py`)."""
UNUSED_S = 30 * 86400.0
"""Time since the last start with a folder after which the first start of another version deletes it."""
ROOM_BYTES = 1 << 20
"""Free bytes of a disk on which kernels can be kept; those of one server take about half of them."""
OF_TARGET = frozenset({"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"})
"""Settings that are ignored: kernels are compiled for this processor, even if other Numba code is not."""


@dataclass(frozen=True, slots=True)
class ObjectCode:
    """A kernel as relocatable code: its symbol, and the outside symbols that it needs."""

    symbol: str
    needed: tuple[str, ...]
    code: bytes


def numba_version() -> str:
    """Return the version of Numba.

    Raises:
        ImportError: Numba is not installed.
    """
    return importlib.metadata.version("numba")


@cache
def address_of(module: str, function: str) -> int:
    """Return the address of a kernel, which is loaded from disk or compiled now (this takes seconds)."""
    directory = cache_directory()
    stored = None if directory is None else _read(directory / f"{module}.{function}")
    if stored is None:
        stored = _compile(module, function)
        if directory is not None:
            _write(directory / f"{module}.{function}", stored)
    engine = _new_engine()
    for name in stored.needed:
        _provide(name)
    engine.add_object_file(llvm.ObjectFileRef.from_data(stored.code))
    engine.finalize_object()
    address: int = engine.get_function_address(stored.symbol)
    return address


def missing(kernels: Sequence[Kernel], directory: Path) -> list[Kernel]:
    """Return the kernels that a directory does not have."""
    return [kernel for kernel in kernels if _read(directory / ".".join(kernel)) is None]


def can_be_written(directory: Path) -> bool:
    """Return whether a directory takes kernels, as far as its rights and the room on its disk tell."""
    return os.access(directory, os.W_OK) and shutil.disk_usage(directory).free >= ROOM_BYTES


def compile_into(directory: Path, kernel: Kernel) -> bool:
    """Compile a kernel and write it to a directory; return whether it could be written."""
    return _write(directory / ".".join(kernel), _compile(*kernel))


def _compile(module: str, function: str) -> ObjectCode:
    """Compile a kernel.

    Raises:
        ImportError: Numba is not installed.
    """
    from sgmv_kernels.cpu_runtime.kernel_parts import compiled

    logger.info("compiling %s.%s, once on this machine", module, function)
    _provide_halves()
    llvm.initialize_native_asmparser()  # for ARM's instructions in `quant_ir`
    kernel = compiled(importlib.import_module(f"sgmv_kernels.cpu_kernels.{module}").KERNELS[function])
    library = kernel._library
    outside = (*library._final_module.functions, *library._final_module.global_variables)
    needed = tuple(v.name for v in outside if v.is_declaration and not v.name.startswith("llvm."))
    _, _, (code, _) = library.serialize_using_object_code()
    return ObjectCode(kernel.native_name, needed, code)


_engines: list[Any] = []
"""Kept for the life of the process: freeing a linker frees its code."""


def _new_engine() -> Any:
    """Return a linker for one kernel.

    Each kernel has its own linker: Numba numbers inner functions per process, so kernels compiled by different
    processes may use one name for different functions.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    _provide_halves()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    _engines.append(llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine))
    return _engines[-1]


def _provide_halves() -> None:
    """Tell LLVM the addresses of the fp16 conversions, for processors without them: generated code calls these
    functions although no module names them."""
    for name in ("__extendhfsf2", "__truncsfhf2"):
        if llvm.address_of_symbol(name) is None:
            with suppress(OSError, AttributeError):
                function = getattr(ctypes.CDLL("libgcc_s.so.1"), name)
                llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)


def _provide(name: str) -> None:
    """Tell LLVM the address of a symbol: the process's own, or `abort` for Numba's helpers for exceptions.

    Raises:
        ImportError: nothing in the process has this symbol.
    """
    if llvm.address_of_symbol(name) is not None:
        return
    process = ctypes.CDLL(None)
    function = getattr(process, name, None)
    if function is None:
        if not name.startswith(("numba_", "NRT_")):
            raise ImportError(f"a compiled kernel needs {name!r}, which this process does not have")
        function = process.abort
    llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)


def _read(path: Path) -> ObjectCode | None:
    """Return a stored kernel; None if the file is missing or incomplete."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            digest, rest = file.read().split(b"\n", 1)
        symbol, needed, code = rest.split(b"\n", 2)
    except (OSError, ValueError):
        return None
    whole = hashlib.sha256(rest).hexdigest().encode() == digest
    return ObjectCode(symbol.decode(), tuple(needed.decode().split()), code) if whole else None


def _write(path: Path, stored: ObjectCode) -> bool:
    """Store a kernel; return whether it was written."""
    rest = b"\n".join((stored.symbol.encode(), " ".join(stored.needed).encode(), stored.code))
    return replace_file(path, hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)


def replace_file(path: Path, content: bytes) -> bool:
    """Replace a file of the cache atomically, since another process may read or write it; return whether it was
    written."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.write_bytes(content)
            os.replace(whole, path)
    except OSError as error:
        _warn_not_kept(path.parent, error.strerror or str(error))
        return False
    return True


@cache
def _warn_not_kept(directory: Path, why: str) -> None:
    """Log, once for each reason, that nothing can be written to the cache."""
    logger.warning(
        "compiled kernels cannot be kept in %s: %s; every start compiles them anew; make room there, make the folder "
        "writable, or set XDG_CACHE_HOME to another one",
        directory,
        why,
    )


@cache
def cache_directory() -> Path | None:
    """Return the private folder for this processor and version of the sources, or None if there can be none.

    Note that it is used.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        base.mkdir(parents=True, exist_ok=True)
        for part, forbidden in (("lorasrv", 0o022), ("kernels", 0o022), (_version(), 0o077)):
            base = base / part
            base.mkdir(mode=0o700, exist_ok=True)
            status = base.lstat()
            if status.st_uid != os.getuid():
                logger.warning(
                    "%s belongs to another user: every start compiles kernels anew; chown it, or set XDG_CACHE_HOME to "
                    "a folder of your own",
                    base,
                )
                return None
            if not stat.S_ISDIR(status.st_mode) or stat.S_IMODE(status.st_mode) & forbidden:
                logger.warning("%s is open to other users: every start compiles kernels anew", base)
                return None
    except (OSError, RuntimeError) as error:
        logger.warning(
            "compiled kernels cannot be kept: %s; every start compiles them anew; set XDG_CACHE_HOME to a folder that "
            "can be written",
            error,
        )
        return None
    with suppress(OSError):
        os.utime(base)
    return base


def delete_unused(directory: Path) -> None:
    """Delete the folders beside this one, of other versions and processors, that were not used for `UNUSED_S`. A
    process that has run since then compiles the kernels that it still needs."""
    oldest_s = time.time() - UNUSED_S
    with suppress(OSError):
        for folder in list(directory.parent.iterdir()):
            status = folder.lstat()
            if _VERSION.fullmatch(folder.name) and stat.S_ISDIR(status.st_mode) and status.st_mtime < oldest_s:
                shutil.rmtree(folder, ignore_errors=True)


def _version() -> str:
    """Return a digest of everything that the compiled code and the measurements depend on."""
    known = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in Path(__file__).parents[1].glob(pattern)):
        known.update(path.read_bytes())
    settings = (item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] not in OF_TARGET)
    known.update(repr(sorted(settings)).encode())
    known.update(f"{numba_version()} {llvmlite.__version__} {name_and_features()}".encode())
    return known.hexdigest()[:16]
