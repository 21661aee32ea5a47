"""The processes that compute one model: usually this one alone, otherwise several ranks, of which it is the first."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from adapter_store.host_cache import HostCache
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig
from lorasrv.distributed.executor import PartitionedExecutor
from lorasrv.distributed.part_checkpoint import PartCheckpoint
from lorasrv.distributed.partition import Partition
from lorasrv.distributed.rank0 import LoadedRanks, ProcessLauncher, Ranks
from lorasrv.distributed.rank_adapters import SharedAdapterStore
from lorasrv.models.loader import Checkpoint
from lorasrv.models.spec import ModelSpec
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.adapter_source import HostAdapterStore, LoadKernels
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.exchange import Exchange
from lorasrv.worker.executor import Executor, LaunchingExecutor, ThreadedExecutor
from lorasrv.worker.model_runner import ModelRunner
from lorasrv.worker.weights import ModelWeights, Progress
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.ops import Ops

Panels = HostCache[PackedAdapter]


class ModelProcesses(Protocol):
    """Provide what an engine needs from the processes that compute its model."""

    @property
    def num_kv_heads(self) -> int:
        """Return the largest number of key heads of any process: pages have the same size in all processes."""

    @property
    def slabs_elsewhere(self) -> int:
        """Return the number of slabs in the pools of the other processes."""

    @property
    def can_lend_pages(self) -> bool:
        """Return whether other threads than the engine's can read pages."""

    @property
    def can_draft(self) -> bool:
        """Return whether models can draft beside the served one."""

    @property
    def why_no_policy(self) -> str | None:
        """Return why requests may not have a `kv_policy`; None if they may."""

    def part(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the part of a checkpoint that this process loads."""

    def wait_loaded(self, progress: Progress) -> LoadedRanks:
        """Wait until the other processes have their weights.

        Raises:
            ModelError, ConfigError, NotEnoughMemory: one of them reports it.
        """

    def adapters(
        self, store: AdapterStore, cache: Panels, base: ModelWeights, dtype: torch.dtype, load_kernels: LoadKernels
    ) -> HostAdapterStore:
        """Return the source of adapters for all processes."""

    def open(self, memory: DevicePool, limits: DecoderLimits, ops: Ops) -> Exchange:
        """Have the other processes make pools like this one's, and return the exchange with them.

        Raises:
            ConfigError, NotEnoughMemory: one of them reports it.
        """

    def warming_up(self, max_rank: int, *, has_trees: bool) -> AbstractContextManager[object]:
        """Return a block in which the other processes warm up as `ModelRunner.warm_up` does, after `open`.

        Raises (by the block):
            NotEnoughMemory: one of them reports it.
            EngineDead: one of them cannot warm up, or has ended.
        """

    def executor(self, runner: ModelRunner) -> Executor:
        """Return the executor over all processes, after `open`. Closing it ends the others."""

    def close(self) -> None:
        """End the other processes."""


class OneProcess:
    """Compute the whole model in this process. See `ModelProcesses`."""

    slabs_elsewhere = 0
    can_lend_pages = True
    can_draft = True

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._device = device
        self.num_kv_heads, self.why_no_policy = spec.num_kv_heads, spec.why_no_kv_policy

    def part(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint

    def wait_loaded(self, progress: Progress) -> LoadedRanks:
        del progress
        return LoadedRanks()

    def adapters(
        self, store: AdapterStore, cache: Panels, base: ModelWeights, dtype: torch.dtype, load_kernels: LoadKernels
    ) -> HostAdapterStore:
        return HostAdapterStore(store, cache, base, dtype, load_kernels)

    def open(self, memory: DevicePool, limits: DecoderLimits, ops: Ops) -> Exchange:
        del memory, limits, ops
        return Exchange()

    def warming_up(self, max_rank: int, *, has_trees: bool) -> AbstractContextManager[object]:
        del max_rank, has_trees
        return nullcontext()

    def executor(self, runner: ModelRunner) -> Executor:
        return LaunchingExecutor(runner) if self._device.type == "cuda" else ThreadedExecutor(runner)

    def close(self) -> None:
        """Do nothing: there are no other processes."""


class SeveralProcesses:
    """Compute one model in several ranks, of which this process is the first. See `ModelProcesses`."""

    can_lend_pages = False
    can_draft = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.num_kv_heads = max(spec.num_kv_heads for spec in ranks.specs)
        self.slabs_elsewhere = sum(spec.num_slabs for spec in ranks.specs[1:])
        self.why_no_policy = f"not with {ranks.partition.text}"
        self.wait_loaded, self.open, self.close = ranks.wait_loaded, ranks.open, ranks.close
        self.warming_up = ranks.warming_up

    def part(self, checkpoint: Checkpoint) -> Checkpoint:
        return PartCheckpoint(checkpoint, self._ranks.spec)

    def adapters(
        self, store: AdapterStore, cache: Panels, base: ModelWeights, dtype: torch.dtype, load_kernels: LoadKernels
    ) -> HostAdapterStore:
        return SharedAdapterStore(store, cache, base, dtype, load_kernels, self._ranks.pool_spec, self._ranks.partition)

    def executor(self, runner: ModelRunner) -> Executor:
        return PartitionedExecutor(runner, self._ranks)


def start_processes(config: EngineConfig, spec: ModelSpec, device: torch.device, kv_format: KVFormat) -> ModelProcesses:
    """Start the other processes, if the options request any.

    Args:
        spec: spec of the whole model.
    Raises:
        ConfigError: an option is not possible with a partition, or the model cannot be divided this way.
    """
    if Partition.of(config.partition).num_ranks == 1:
        return OneProcess(spec, device)
    return SeveralProcesses(Ranks(config, spec, device, kv_format, ProcessLauncher))
