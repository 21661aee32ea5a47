"""Compile missing kernels in separate processes, on several cores, so that the serving process never imports Numba.

A compiling process imports Numba once and forks workers, which take one kernel after another. It locks the cache
directory while it runs: a later one, also of another server, waits and then finds the kernels there. Kernels that are
still missing are compiled by `kernel_cache.address_of`, in the process that needs them. Imports no torch.

A start waits for the kernels that most models need. The others are compiled when they are needed, or in the background
by a process of the lowest priority, which takes no lock, so that no start waits for it.
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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from sgmv_kernels.cpu_runtime.kernel_cache import (
    OF_TARGET,
    address_of,
    cache_directory,
    can_be_written,
    compile_into,
    delete_unused,
    missing,
)
from sgmv_kernels.cpu_runtime.kernel_names import OF_SOME_MODELS, Kernel

logger = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
"""Called with the current activity and its progress from 0 to 1."""
COMMAND = (sys.executable, "-P", "-m", "sgmv_kernels.cpu_runtime.kernel_compiler")
MOST_WORKERS = 4
"""More workers would only wait for the kernel that takes longest."""
STALLED_S = 240.0
"""Time without a new kernel after which the wait for the compiling process ends."""
_POLL_S = 0.05
CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
"""Signals that end a crashing compiler; the serving process must then not compile by itself."""
_IN_BACKGROUND, _LOWEST_PRIORITY = "--in-background", 19


@dataclass(frozen=True, slots=True)
class Compilation:
    """Describe a process that compiles `kernels` into `directory`."""

    kernels: Sequence[Kernel]
    directory: Path
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]

    def wait(self, progress: Progress) -> None:
        """Wait for the process; if kernels are missing afterwards, log why.

        Raises:
            ImportError: the compiler crashes on this machine.
        """
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
                time.sleep(_POLL_S)
        if left and abs(self.process.poll() or 0) in CRASHES:
            raise ImportError(f"the kernels cannot be compiled on this machine: {self._why()}")
        if left:
            logger.warning("%d kernels are compiled in this process, as %s", *self.left())

    def left(self) -> tuple[int, str]:
        """Return how many kernels are missing, and why."""
        return len(missing(self.kernels, self.directory)), self._why()

    def end(self) -> None:
        """Kill the process and its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _why(self) -> str:
        if (code := self.process.poll()) is None:
            return f"no other has compiled one for {STALLED_S:.0f} s"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"the one for it ended with code {code}: {last}"


@contextmanager
def compiling(kernels: Sequence[Kernel], *, in_background: bool = False) -> Iterator[Compilation | None]:
    """Compile missing kernels in a process that is ended with the `with` block; yield None if there is nothing to do or
    no folder to keep them.
    """
    directory = place()
    absent = missing(kernels, directory) if directory is not None else []
    if directory is None or not absent:
        yield None
        return
    with ExitStack() as opened:
        names = [*([_IN_BACKGROUND] if in_background else []), *map(".".join, absent)]
        # OpenBLAS would start threads, and a process with threads should not fork.
        kept = {name: value for name, value in os.environ.items() if name not in OF_TARGET}
        environment = {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            # In memory: there may be no folder for temporary files, or no room.
            errors = opened.enter_context(os.fdopen(os.memfd_create("errors"), "w+b"))
            process = subprocess.Popen(
                [*COMMAND, *names],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                # Not a new session: in another session, a low priority would have no effect (sched_autogroup_enabled).
                process_group=0,
            )
        except OSError as error:
            logger.warning("no process can be started to compile kernels: %s", error)
            yield None
            return
        compilation = Compilation(absent, directory, process, errors)
        try:
            yield compilation
        finally:
            compilation.end()
            process.wait()


def place() -> Path | None:
    """Return the folder for compiled kernels, or None without Numba or a folder that can be written."""
    try:
        directory = cache_directory()
    except ImportError:
        return None
    return directory if directory is not None and can_be_written(directory) else None


@contextmanager
def compiling_in_background(kernels: Sequence[Kernel], after_s: float) -> Iterator[None]:
    """After `after_s`, compile kernels that are still missing in a process that is ended with the `with` block."""
    is_over = threading.Event()

    def compile_them() -> None:
        if is_over.wait(after_s):
            return
        with compiling(kernels, in_background=True) as compilation:
            while compilation is not None and compilation.process.poll() is None and not is_over.wait(1.0):
                pass
            if compilation is not None and compilation.process.returncode:
                logger.warning("%d kernels are compiled when they are needed, as %s", *compilation.left())

    thread = threading.Thread(target=compile_them, name="compiling in the background", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@cache
def kernel_address(module: str, function: str) -> int:
    """Return the address of a kernel. A missing one is compiled first, which takes seconds, in another process if the
    result can be kept.

    Raises:
        ImportError: it cannot be compiled.
    """

    def tell(what: str, share: float) -> None:
        if not share:
            logger.info("%s.%s is missing: %s", module, function, what)

    kernel = module, function
    compile_missing(OF_SOME_MODELS if kernel in OF_SOME_MODELS else (kernel,), tell)
    return address_of(module, function)


def compile_missing(kernels: Sequence[Kernel], progress: Progress) -> None:
    """Compile the kernels that are missing, and wait for them.

    Raises:
        ImportError: the compiler crashes on this machine.
    """
    with compiling(kernels) as compilation:
        if compilation is not None:
            compilation.wait(progress)


def main(names: Sequence[str]) -> int:
    """Compile the kernels that are missing, and delete unused folders; return the process's exit code."""
    directory = cache_directory()
    if directory is None:
        return 1
    if names[0] == _IN_BACKGROUND:
        names = names[1:]
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
    else:
        with suppress(OSError):  # If the file system has no locks, two processes may do the same work.
            fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_EX)
        delete_unused(directory)
    asked = (name.split(".") for name in names)
    kernels = missing([(module, function) for module, function in asked], directory)
    if not kernels:
        return 0
    gc.disable()  # The process is short-lived, and collecting takes a tenth of its time.
    # Load everything that workers share before forking; compiling a small kernel first fills Numba's tables.
    for module, _ in kernels:
        importlib.import_module(f"sgmv_kernels.cpu_kernels.{module}")
    if not compile_into(directory, kernels.pop()):
        return 1
    tasks, feed = os.pipe()
    os.write(feed, bytes(range(len(kernels))))
    os.close(feed)
    fork = multiprocessing.get_context("fork")
    count = min(len(os.sched_getaffinity(0)), MOST_WORKERS, len(kernels))
    workers = [fork.Process(target=_work, args=(tasks, kernels, directory)) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max((abs(worker.exitcode or 0) for worker in workers), default=0)


def _work(tasks: int, kernels: Sequence[Kernel], directory: Path) -> None:
    """Compile the kernels whose numbers are read from a pipe."""
    while number := os.read(tasks, 1):
        if not compile_into(directory, kernels[number[0]]):
            sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
