"""Device: where a model computes, its activation dtype and free memory, and which threads compute in parallel.

Only the engine thread computes in parallel. Every thread that runs a parallel torch product gets its own OpenMP team.
As soon as the teams together have more threads than there are processors, libgomp lets waiting threads sleep at once
instead of spinning for a moment, and a step of hundreds of small products takes four times as long
(docs/benchmarks/steps.md#threads). So threads that load models or adapters compute single-threaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lorasrv.errors import ConfigError
from lorasrv.worker.host_memory import free_bytes, total_bytes
from sgmv_kernels.ops import Ops

ENGINE_THREADS = torch.get_num_threads()
"""Number of processors that torch found, or OMP_NUM_THREADS."""


def compute_alone() -> None:
    """Make the calling thread compute single-threaded. Call this before the thread's first product."""
    _set_num_threads(1)


def compute_in_parallel() -> None:
    """Let the calling thread, the engine's, use all processors."""
    _set_num_threads(ENGINE_THREADS)


def find_best_team(ops: Ops, limit: int) -> None:
    """Give the calling thread, the engine's, the number of threads at which these kernels are fastest, up to a
    limit."""
    _set_num_threads(ops.best_threads(limit))


def _set_num_threads(count: int) -> None:
    # A thread's first get or product adopts the count that any thread has set last; so get first, then set.
    torch.get_num_threads()
    torch.set_num_threads(count)


def resolve_device(name: str) -> torch.device:
    """Return the device that `--device` names; `auto` is CUDA if torch sees it.

    Raises:
        ConfigError: `cuda` was requested, but there is none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        built = f"torch {torch.__version__} sees no CUDA device"
        raise ConfigError(f"--device cuda: {built}; use --device cpu, or install a torch for your driver")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def activation_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of activations: fp32 on a CPU (for the reason see ARCHITECTURE.md), else `dtype`."""
    return torch.float32 if device.type == "cpu" else dtype


def compiles_kernels(device: torch.device, ops: Ops) -> bool:
    """Return whether these kernels are compiled for a GPU as they are launched, so that a warm-up is due."""
    return device.type == "cuda" and ops.name == "triton"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Hold the bytes of a device's memory; on a CPU, of the host's memory."""

    free: int
    total: int
    on_gpu: bool = False

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        """Measure now; torch's cached blocks count as free.

        Ask only about the process's own GPU: a question about another one takes half a gigabyte there for a context.
        """
        if device.type != "cuda":
            return cls(free_bytes(), total_bytes())
        torch.cuda.empty_cache()
        return cls(*torch.cuda.mem_get_info(device), on_gpu=True)

    def with_ranks(self, others: "Sequence[DeviceMemory]") -> "DeviceMemory":
        """Return the memory of all ranks together, of which this is rank 0's. On GPUs, each rank has its own, and all
        count as the fullest one; on a CPU they share this memory."""
        if not self.on_gpu:
            return self
        ranks = (self, *others)
        free, total = min(rank.free for rank in ranks), min(rank.total for rank in ranks)
        return DeviceMemory(free * len(ranks), total * len(ranks), on_gpu=True)


_NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of errors without a type of their own: of torch's allocator on a CPU; of CUDA, through torch or Triton, for
pinned memory, a graph or a launch; of cuBLAS, for its workspace."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
