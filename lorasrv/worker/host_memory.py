"""Host memory: free, total and peak bytes, and what the C library keeps."""

import ctypes
import mmap
import os
import re
import resource
import sys
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
_POPULATE_WRITE = 23
"""Advice since Linux 5.14; older ones refuse it."""


def free_bytes() -> int:
    """Return the memory that can be taken without swapping: the kernel's estimate, within the container's limit."""
    available = _figure(Path("/proc/meminfo"), r"MemAvailable:\s+(\d+) kB")
    if available is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limit, used = (_figure(_GROUP / name, r"(\d+)") for name in ("memory.max", "memory.current"))
    free = available * 1024
    return free if limit is None or used is None else min(free, max(0, limit - used))


def total_bytes() -> int:
    """Return the memory of the machine, or the container's limit."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _figure(_GROUP / "memory.max", r"(\d+)")
    return machine if limit is None else min(machine, limit)


def resident_bytes() -> int | None:
    """Return the host memory that this process holds now; None where the system does not say."""
    held = _figure(Path("/proc/self/status"), r"VmRSS:\s+(\d+) kB")
    return None if held is None else held * 1024


def peak_bytes() -> int:
    """Return the most memory that this process has held. Getrusage's figure would start with the parent's."""
    peak = _figure(Path("/proc/self/status"), r"VmHWM:\s+(\d+) kB")
    if peak is not None:
        return peak * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def release_freed() -> None:
    """Return freed memory, which the C library would keep, to the system. Takes some 10 ms without the GIL."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def commit(address: int, nbytes: int) -> None:
    """Have the system give memory to a range of a buffer now, without the GIL; do nothing where it cannot be asked."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux":
        size = ctypes.c_size_t(address + nbytes - first)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, _POPULATE_WRITE)


def _figure(path: Path, pattern: str) -> int | None:
    try:
        found = re.search(pattern, path.read_text())
    except OSError:
        return None
    return int(found.group(1)) if found else None
