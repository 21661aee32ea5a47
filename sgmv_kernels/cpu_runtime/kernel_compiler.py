"""Compile missing kernels in processes of their own, on several cores, so that the one that serves imports no Numba.

A compiling process imports Numba once and forks workers, which take one kernel after another, those that may be needed
later at the lowest priority. While it lives it locks the cache directory: one that comes later, another server's too,
waits and finds the kernels there, and so does `kernel_cache.address_of`. Whatever is missing in the end is compiled by
the process that needs it. Imports no torch.
"""

import fcntl
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sgmv_kernels.cpu_runtime.kernel_cache import POLL_S, STALLED_S, cache_directory, compile_into, missing
from sgmv_kernels.cpu_runtime.kernel_names import Kernel

logger = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
"""Called with the current activity and its progress from 0 to 1."""
COMMAND = (sys.executable, "-P", "-m", "sgmv_kernels.cpu_runtime.kernel_compiler")
MOST_WORKERS = 4
"""Workers beyond these would wait for the kernel that takes longest."""
LOWEST_PRIORITY = 19
_LATER = "--"
"""Stands between the kernels that are waited for and those that may be needed later."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A process that compiles `kernels` into `directory`."""

    kernels: Sequence[Kernel]
    directory: Path
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]

    def wait(self, progress: Progress) -> None:
        """Wait for the process; log why, if kernels are missing afterwards."""
        what = f"compiling {len(self.kernels)} kernels, once on this machine"
        left, since, is_over = len(self.kernels), time.monotonic(), False
        progress(what, 0.0)
        while left and not is_over:
            # In this order: the last kernel may appear just before the process ends.
            is_over = self.process.poll() is not None or time.monotonic() - since > STALLED_S
            now_left = len(missing(self.kernels, self.directory))
            if now_left < left:
                left, since = now_left, time.monotonic()
                progress(what, 1 - left / len(self.kernels))
            if left and not is_over:
                time.sleep(POLL_S)
        if left:
            logger.warning("%d kernels are compiled in this process, as %s", left, self._why())

    def _why(self) -> str:
        if (code := self.process.poll()) is None:
            return f"no other has compiled one for {STALLED_S:.0f} s"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"the one for it ended with code {code}: {last}"


@contextmanager
def compiling(kernels: Sequence[Kernel], later: Sequence[Kernel] = ()) -> Iterator[Compilation | None]:
    """Let a process compile the kernels that are missing, which is ended with the block; None if there is nothing to do
    or no place to keep them.

    Args:
        later: those that may be needed some time.
    """
    try:
        directory = cache_directory()
    except ImportError:
        directory = None  # Numba is not installed.
    if directory is None or not os.access(directory, os.W_OK):
        yield None
        return
    absent, absent_later = missing(kernels, directory), missing(later, directory)
    if not absent and not absent_later:
        yield None
        return
    with tempfile.TemporaryFile() as errors:
        names = [*map(".".join, absent), _LATER, *map(".".join, absent_later)]
        # OpenBLAS would start threads, beside which nothing should be forked.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            process = subprocess.Popen(
                [*COMMAND, *names],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            logger.warning("no process can be started to compile kernels: %s", error)
            yield None
            return
        try:
            yield Compilation(absent, directory, process, errors)
        finally:
            # The workers, too.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def compile_missing(kernels: Sequence[Kernel], progress: Progress) -> None:
    """Compile kernels that are not kept yet, and wait for them."""
    with compiling(kernels) as compilation:
        if compilation is not None:
            compilation.wait(progress)


def main(names: Sequence[str]) -> int:
    """Compile kernels that are not kept yet, those behind `_LATER` last; return the process's exit code."""
    directory = cache_directory()
    if directory is None:
        return 1
    with suppress(OSError):  # Without locks on this file system, two processes do the same work.
        fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_EX)
    at = names.index(_LATER)
    now, later = (missing([_kernel(name) for name in part], directory) for part in (names[:at], names[at + 1 :]))
    kernels = [*now, *later]
    if not kernels:
        return 0
    gc.disable()  # The process is short-lived, and collecting takes a tenth of its time.
    # What all workers need, before they are forked; the first compilation, of a small kernel, fills Numba's tables.
    for module, _ in kernels:
        importlib.import_module(f"sgmv_kernels.cpu_kernels.{module}")
    if now and not compile_into(directory, kernels.pop(len(now) - 1)):
        return 1
    tasks, feed = os.pipe()
    os.write(feed, bytes(range(len(kernels))))
    os.close(feed)
    fork = multiprocessing.get_context("fork")
    count = min(len(os.sched_getaffinity(0)), MOST_WORKERS, len(kernels))
    first_later = max(0, len(now) - 1)
    workers = [fork.Process(target=_work, args=(tasks, kernels, first_later, directory)) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max((abs(worker.exitcode or 0) for worker in workers), default=0)


def _kernel(name: str) -> Kernel:
    module, function = name.split(".")
    return module, function


def _work(tasks: int, kernels: Sequence[Kernel], first_later: int, directory: Path) -> None:
    """Compile the kernels whose numbers come out of a pipe; from the number `first_later` on nobody waits for them."""
    while number := os.read(tasks, 1):
        if number[0] >= first_later:
            os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
        if not compile_into(directory, kernels[number[0]]):
            sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
