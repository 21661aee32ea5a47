"""Host memory: free, total and peak bytes, and freed bytes that the C library keeps."""

import ctypes
import mmap
import os
import re
import resource
import sys
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
_POPULATE_WRITE = 23
"""`madvise` advice since Linux 5.14; older kernels refuse it."""


def free_bytes() -> int:
    """Return the memory that can be allocated without swapping: the kernel's estimate, within the container's limit."""
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
    """Return the host memory that this process holds now; None if the system does not report it."""
    held = _figure(Path("/proc/self/status"), r"VmRSS:\s+(\d+) kB")
    return None if held is None else held * 1024


def peak_bytes() -> int:
    """Return the most memory that this process has held. The value of getrusage would include the parent's peak."""
    peak = _figure(Path("/proc/self/status"), r"VmHWM:\s+(\d+) kB")
    if peak is not None:
        return peak * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def release_freed() -> None:
    """Give freed memory that the C library keeps back to the system. Takes some 10 ms without the GIL."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def commit(address: int, nbytes: int) -> None:
    """Have the system commit memory for a range of a buffer now, without the GIL; do nothing if it cannot."""
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
