"""Which threads compute in parallel: the engine's, and no other.

Every thread that runs a parallel product gets an OpenMP team of its own. As soon as all teams together outnumber the
processors, libgomp lets waiting threads sleep at once instead of spinning for a moment, and a step of hundreds of small
products takes four times as long (docs/benchmarks.md). So whoever loads models or adapters computes alone.

Where a model computes: the device that `--device` means here, its activations, what it has free.
"""

import torch

from lorasrv.errors import ConfigError
from sgmv_kernels.ops import Ops

ENGINE_THREADS = torch.get_num_threads()
"""The processors that torch found, or OMP_NUM_THREADS."""


def compute_alone() -> None:
    """The calling thread has no team from now on. Before its first product."""
    _set_num_threads(1)


def compute_in_parallel() -> None:
    """The calling thread is the engine's."""
    _set_num_threads(ENGINE_THREADS)


def find_best_team(ops: Ops) -> None:
    """Give the engine's thread, which calls this, as many threads as these kernels are fastest with."""
    _set_num_threads(ops.best_threads(ENGINE_THREADS))


def _set_num_threads(count: int) -> None:
    # A thread's first question or product takes over the count that any thread has set last; so ask first, then set.
    torch.get_num_threads()
    torch.set_num_threads(count)


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where torch sees it.

    Raises:
        ConfigError: `cuda` was asked for, and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        built = f"torch {torch.__version__} sees no CUDA device"
        raise ConfigError(f"--device cuda: {built}; use --device cpu, or install a torch for your driver")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def activation_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """fp32 on a CPU (ARCHITECTURE.md says why); what `--dtype` says elsewhere."""
    return torch.float32 if device.type == "cpu" else dtype


def free_device_bytes(device: torch.device) -> int:
    """What a CUDA device has left, once torch has given back what it only keeps."""
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info(device)[0]
    return free
