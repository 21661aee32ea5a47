"""Describe the machine and versions of a measurement without network access, and measure the machine's rates.

Measuring takes about two seconds, in this process, on all its cores. Bandwidth: sequential reads of far more memory
than the caches hold. fp32: a large matrix product, the best case for a BLAS. int8: 4-bit weights times int8
activations, the server's arithmetic in which a processor is fastest.
"""

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from api.cli.bench.roofline import MachineRates
from lorasrv import __version__

ROOT = Path(__file__).parents[3]
TELLING_FLAGS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
PACKAGES = ("torch", "numba", "h11")


def machine() -> dict[str, object]:
    """Return the processor, its vector instructions, cores that this process may use, memory, system."""
    info = _text("/proc/cpuinfo")
    flags = set(_found(r"^(?:flags|Features)\s*:(.*)$", info).split())
    memory = _found(r"^MemTotal:\s*(\d+)", _text("/proc/meminfo"))
    return {
        "cpu": _found(r"^model name\s*:(.*)$", info) or platform.processor() or platform.machine(),
        "cores": _cores(),
        "instructions": [flag for flag in TELLING_FLAGS if flag in flags],
        "memory_bytes": 1024 * int(memory) if memory else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def client_versions() -> dict[str, str]:
    """Return the versions of this client, and of packages that a server in the same environment would use."""
    versions = {"lorasrv": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> str | None:
    """Return the commit of the checkout that contains this file, with `+changes` if tracked files differ; None outside
    a checkout.
    """
    if not (ROOT / ".git").exists():
        return None
    try:
        found = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return found + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip() if match else ""


READ_BYTES = 256 << 20
CHUNK = 1 << 20
ROWS, WIDTH = 512, 1024
ROUNDS = 7


def measure() -> MachineRates:
    """Measure the rates, each as the best of several rounds. Imports torch."""
    # Set before torch is imported, as in `serve`.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    return MachineRates(read_bytes=read_bandwidth(), fp32_ops=_fp32_ops(), int8_ops=_int8_ops())


def read_bandwidth() -> float:
    """Measure the read bandwidth in bytes per second."""
    import torch

    from sgmv_kernels.cpu_runtime.kernel_cache import address_of
    from sgmv_kernels.cpu_runtime.team import arguments, run, team_size

    buffer = torch.ones(READ_BYTES, dtype=torch.uint8)
    try:
        kernel = address_of("bandwidth", "read")
    except ImportError:
        # Without Numba: a sum of floats, which reads about as fast.
        words = buffer.view(torch.float32)
        return READ_BYTES / _least(words.sum)
    chunks = READ_BYTES // CHUNK
    args = arguments(chunks, buffer.data_ptr(), CHUNK, 0)
    return READ_BYTES / _least(lambda: run(kernel, args, team_size(), chunks))


def _fp32_ops() -> float:
    import torch

    a, b = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    return 2 * ROWS * WIDTH * WIDTH / _least(lambda: a @ b)


def _int8_ops() -> float:
    import torch

    from lorasrv.models.quantization import get_format
    from sgmv_kernels.ops import Ops

    with torch.inference_mode():
        fmt = get_format("int4", Ops(torch.device("cpu")))
        linear = fmt.linear(torch.ones(WIDTH, WIDTH), None, torch.float32)
        x = torch.ones(ROWS, WIDTH)
        return 2 * ROWS * WIDTH * WIDTH / _least(lambda: linear(x))


def _least(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest round."""
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
