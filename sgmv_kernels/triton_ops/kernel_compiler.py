"""Compile Triton kernels before they are launched, in separate processes, and count those that are compiled later.

Triton compiles a kernel for each *key*: dtypes, constants, and which numbers are 1 or multiples of 16. `noted` collects
the keys of launches instead of compiling and launching them; `load` starts processes that compile the kernels missing
in Triton's cache on disk, and loads all of them. Threads would not help: on two cores, 24 kernels took 5.5 s with one
thread and with two, because the compiler holds the GIL.
"""

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from tempfile import TemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sgmv_kernels.backend import Progress

COMMAND = (sys.executable, "-P", "-m", "sgmv_kernels.triton_ops.kernel_compiler")
MOST_PROCESSES = 8
"""Most compiling processes: each imports torch, which takes seconds and half a gigabyte."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelKey:
    """Name a kernel and a key that it is compiled for."""

    module: str
    name: str
    # The key in Triton's serialized form.
    data: str

    def load(self) -> bool:
        """Compile the kernel in this process or load it from the cache on disk; return whether it was in the cache."""
        found: list[bool] = []
        with _listening(found):
            getattr(importlib.import_module(self.module), self.name).preload(self.data)
        return all(found)


@contextmanager
def noted() -> Iterator[list[KernelKey]]:
    """Record the keys of launches whose kernels are not loaded, each once, instead of launching them."""
    keys: dict[KernelKey, None] = {}
    made: list[KernelKey] = []

    def note(*, fn: Any, compile: dict[str, Any], **rest: object) -> bool:
        keys.setdefault(KernelKey(fn.module, fn.name, compile["specialization_data"]))
        return True

    runtime = triton.knobs.runtime
    before, runtime.jit_cache_hook = runtime.jit_cache_hook, note
    try:
        yield made
    finally:
        runtime.jit_cache_hook = before
        made += keys


def load(keys: Sequence[KernelKey], progress: Progress) -> None:
    """Load kernels. From the first one that is not on disk, processes compile them.

    Raises:
        Exception: Triton cannot compile a kernel.
    """
    left = list(keys)
    while left and left.pop(0).load():
        pass
    if left:
        _compile_in_processes(left, progress)
    for key in left:
        key.load()


@dataclass(slots=True)
class LateKernels:
    """Count kernels that are compiled or loaded after a warm-up, while requests wait."""

    count: int = 0


def count_late() -> LateKernels:
    """Return a counter of the kernels compiled or loaded from now on."""
    late = LateKernels()

    def note(*, fn: Any, **rest: object) -> None:
        late.count += 1
        logger.warning("a step waits for a kernel that the warm-up did not compile: %s", fn.name)

    triton.knobs.runtime.jit_cache_hook = note
    return late


class _Target:
    """Replace Triton's driver while a kernel is only compiled, so that no GPU is used."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def _compile_in_processes(keys: Sequence[KernelKey], progress: Progress) -> None:
    """Compile in processes, into Triton's cache on disk; if a process fails, log why."""
    what = f"compiling {len(keys)} kernels, once on this machine"
    progress(what, 0.0)
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(keys))
    running = [_start(keys[first::count]) for first in range(count)]
    try:
        for done, process in enumerate(running, 1):
            _, errors = process.communicate()
            if process.returncode:
                why = errors.strip().rpartition("\n")[2] or f"exit code {process.returncode}"
                logger.warning("a process that compiles kernels failed, so this one does: %s", why)
            progress(what, done / count)
    finally:
        for process in running:
            process.kill()


def _start(keys: Sequence[KernelKey]) -> "subprocess.Popen[str]":
    """Start a process that runs `main` with these keys."""
    target = driver.active.get_current_target()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with TemporaryFile("w+") as asked:
        json.dump(([target.backend, target.arch, target.warp_size], [astuple(key) for key in keys]), asked)
        asked.seek(0)
        return subprocess.Popen(COMMAND, stdin=asked, stderr=subprocess.PIPE, text=True, env=environment)


@contextmanager
def _listening(found: list[bool]) -> Iterator[None]:
    """Append, for each kernel loaded in the `with` block, whether it was on disk."""

    def listen(*, cache_hit: bool, **rest: object) -> None:
        found.append(cache_hit)

    compilation = triton.knobs.compilation
    before, compilation.listener = compilation.listener, listen
    try:
        yield
    finally:
        compilation.listener = before


def main() -> None:
    """Compile the kernels that standard input lists: a target, and for each kernel its module, its name and its key."""
    target, keys = json.load(sys.stdin)
    driver.set_active(_Target(GPUTarget(*target)))
    for key in keys:
        KernelKey(*key).load()


if __name__ == "__main__":
    main()
