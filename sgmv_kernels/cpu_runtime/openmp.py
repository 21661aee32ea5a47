"""Threads of the CPU kernels: torch's own OpenMP team.

A kernel's one argument is the address of an array of int64 whose first two elements are counters. Every thread of the
team runs the kernel and takes tasks from the first counter until none is left, so that tasks of unequal size balance;
from the second it takes its own number, for a place in scratch memory. Numba's `parallel=True` would bring a second
OpenMP library with a second team, whose idle threads spin on the processors that torch's need, and nothing where the
system has no such library; so kernels use the library that torch has loaded.
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

Arguments = ctypes.Array[ctypes.c_int64]
logger = logging.getLogger(__name__)
_TEAM_LIBRARIES = ("libgomp", "libiomp5", "libomp")


def arguments(*args: int) -> Arguments:
    """Return a kernel's `args`, the two counters first; elements may be changed between runs."""
    return (ctypes.c_int64 * (len(args) + 2))(0, 0, *args)


def run(kernel: int, block: Arguments, threads: int, tasks: int) -> None:
    """Run a kernel over `tasks` tasks and wait: in the whole team of `threads`, or in this thread if there is one task.

    A part of the team is never used: OpenMP would end the other threads, and start them again for the next kernel.
    """
    block[0] = block[1] = 0
    team = _team()
    if team is None or threads == 1 or tasks <= 1:
        _KERNEL(kernel)(block)
    else:
        team(kernel, block, threads, 0)


def team_size() -> int:
    """Return the threads that the calling thread may use: torch's setting, 1 without an OpenMP library to share."""
    return 1 if _team() is None else torch.get_num_threads()


_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _team() -> Callable[..., None] | None:
    """Return GOMP_parallel(function, argument, threads, flags) of torch's OpenMP library."""
    for path in _loaded_libraries():
        try:
            start = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        start.restype = None
        start_team: Callable[..., None] = start
        return start_team
    logger.warning("torch's OpenMP library was not found: kernels run in one thread")
    return None


def _loaded_libraries() -> list[str]:
    """Return the OpenMP libraries of this process, those that came with torch first."""
    home = str(Path(torch.__file__).parent)
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") > 4 and "/" in line}
    found = sorted(path for path in paths if Path(path).name.startswith(_TEAM_LIBRARIES))
    return sorted(found, key=lambda path: not path.startswith(home))
