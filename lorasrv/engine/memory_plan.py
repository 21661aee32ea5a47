"""Plan the memory of a server before it allocates any: refuse what cannot fit, warn of what may grow too large.

Building an engine enforces the plan, `lorasrv doctor` shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from lorasrv.config import (
    CUDA_POOL_FRACTION,
    PAGE_SIZE_TOKENS,
    POOL_FRACTION,
    EngineConfig,
    MemoryOptions,
    size,
)
from lorasrv.distributed.partition import Partition
from lorasrv.distributed.rank_spec import RankSpec
from lorasrv.errors import ConfigError, NotEnoughMemory
from lorasrv.models.loader import StoredPacking
from lorasrv.models.quantization import find_format
from lorasrv.models.spec import ModelSpec
from lorasrv.sampling.sampler import DRAW_BYTES, DRAWN_TOGETHER
from lorasrv.speculation.drafters import model_names
from lorasrv.speculation.speculator import MAX_MODEL_DRAFT
from lorasrv.speculation_params import REJECTION
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device import DeviceMemory, activation_dtype
from lorasrv.worker.host_memory import free_bytes
from sgmv_kernels.formats.kv_format import get_kv_format

MIN_POOL_PAGES = 4
_FLOAT_BYTES, _PROBABILITY_BYTES = 4, 8
LIBRARY_BYTES = 256 << 20
"""Approximate workspaces of libraries on a GPU, cuBLAS's 32 MiB for each thread among them, and kernels that torch
loads. NOT MEASURED."""
LINK_BYTES = 64 << 20
"""Approximate buffers of a GPU for the connection to another rank. NOT MEASURED."""
_FACTOR_BITS = 0.25
"""Approximate bits per weight that the groups' factors take in a quantized file."""


def base_bytes(spec: ModelSpec, quantization: str, dtype: torch.dtype, packing: StoredPacking | None = None) -> int:
    """Estimate the bytes of a base in a weight format, which may be that of its file."""
    chosen, bits = find_format(quantization), 8.0 * dtype.itemsize
    is_own = packing is not None and packing.method == quantization
    own = packing.mean_bits + _FACTOR_BITS if packing is not None and is_own else None
    linear = spec.linear_weights * (own or chosen.bits_of_linears(spec) or bits)
    table = spec.table_weights * (chosen.table_bits or bits)
    return int((linear + table) / 8)


def step_bytes(spec: ModelSpec, config: EngineConfig, activation: torch.dtype) -> int:
    """Estimate the bytes of the largest step: inputs and outputs of one layer's linears, and logits."""
    row = spec.hidden_size + sum(site.in_features + sum(site.out_features) for site in spec.sites_of(0))
    rows, samples = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    return rows * row * activation.itemsize + samples * spec.vocab_size * _FLOAT_BYTES


def bytes_beside_steps(spec: ModelSpec, config: EngineConfig, num_ranks: int, most_pages: int) -> int:
    """Estimate what a rank's GPU holds besides weights, pages and steps: rotary tables, workspaces of libraries and of
    connections, a dequantized weight with its product while an adapter with DoRA is loaded, and CUDA graphs.

    Args:
        most_pages: pages that its memory could hold.
    """
    max_model_len = config.model.max_model_len or spec.max_position
    ropes = {spec.rope_of(layer) for layer in range(spec.num_layers)}
    tables = len(ropes) * max_model_len * spec.head_dim * _FLOAT_BYTES
    loading = 2 * _FLOAT_BYTES * max(site.in_features * sum(site.out_features) for site in spec.sites())
    links = num_ranks * LINK_BYTES if num_ranks > 1 else 0
    has_graphs = num_ranks == 1 and config.model.kernels in ("auto", "triton") and find_spec("triton") is not None
    graphs = _graph_bytes(spec, config, max_model_len, most_pages * PAGE_SIZE_TOKENS) if has_graphs else 0
    return tables + loading + links + graphs + LIBRARY_BYTES


def _graph_bytes(spec: ModelSpec, config: EngineConfig, max_model_len: int, most_tokens: int) -> int:
    # Imported only here: it needs Triton.
    from lorasrv.worker.graph_memory import graph_bytes

    dtype, scheduler = getattr(torch, config.model.dtype), config.scheduler
    limits = DecoderLimits(max_model_len, scheduler.max_num_batched_tokens, scheduler.max_num_seqs, dtype, dtype)
    kv_format = get_kv_format(config.memory.kv_cache_dtype, config.model.dtype)
    return graph_bytes(spec, limits, PAGE_SIZE_TOKENS, kv_format, config.memory.max_lora_rank, most_tokens)


def block_bytes(parts: Sequence[ModelSpec], config: EngineConfig) -> int:
    """Return the bytes of a page in all slabs of all ranks; it has the same size in every slab."""
    kv_format = get_kv_format(config.memory.kv_cache_dtype, config.model.dtype)
    heads, slabs = max(part.num_kv_heads for part in parts), sum(part.num_slabs for part in parts)
    return kv_format.page_bytes(heads, parts[0].head_dim, PAGE_SIZE_TOKENS) * slabs


def pool_size(options: MemoryOptions, memory: DeviceMemory, step: int = 0, fullest: float = 1.0) -> int:
    """Return the bytes of a pool that is built while this memory is free, with `step` bytes left for steps.

    Args:
        fullest: bytes of the rank with the most slabs, as a multiple of the mean.
    """
    if options.pool_bytes is not None:
        return options.pool_bytes
    left = memory.free - step
    if options.gpu_memory_utilization is not None:
        left -= int((1 - options.gpu_memory_utilization) * memory.total)
    else:
        left = min(left, int(memory.free * (CUDA_POOL_FRACTION if memory.on_gpu else POOL_FRACTION)))
    left = max(0, left)
    # Each rank has a GPU of its own; on a CPU all share the memory.
    return int(left / fullest) if memory.on_gpu else left


def pool_too_small(pool: int, block: int) -> str:
    """Return by how much a pool of `pool` bytes is too small for pages of `block` bytes; "" if it is not."""
    if pool // block >= MIN_POOL_PAGES:
        return ""
    return (
        f"a pool of {size(pool)} is too small for {MIN_POOL_PAGES} pages of {size(block)}; --pool-bytes must be "
        f"{size(MIN_POOL_PAGES * block)} or more"
    )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Hold the bytes of what a server will have in memory, all its ranks together."""

    # Free now, where base, pool and steps will be.
    free: int
    # Free on the host, where the host cache and swap space will be.
    free_on_host: int
    on_gpu: bool
    base: int
    step: int
    # What GPUs hold besides, see `bytes_beside_steps`. A pool leaves room for it; with less, steps have no graphs.
    beside: int
    pool: int
    # Bytes of a page in all slabs.
    block: int
    num_ranks: int
    # See `pool_size`.
    fullest: float
    host_cache: int
    swap: int
    corpus: int
    heads: int
    max_num_batched_tokens: int

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        spec: ModelSpec,
        quantization: str,
        device: torch.device,
        packing: StoredPacking | None = None,
        draft: ModelSpec | None = None,
    ) -> "MemoryPlan":
        """Plan for the memory that is free now, before the base and its draft model are loaded as `quantization`.

        Args:
            packing: how the file is quantized; None if it is not, or not there yet.
        Raises:
            ConfigError: the base cannot be divided as the options say.
        """
        dtype = getattr(torch, config.model.dtype)
        parts = RankSpec.all_of(spec, Partition.of(config.partition))
        own = DeviceMemory.of(device)
        # Other ranks report what they have once they have loaded their parts.
        memory = own.with_ranks([own] * (len(parts) - 1))
        base = sum(base_bytes(part, quantization, dtype, packing) for part in parts)
        step = sum(step_bytes(part, config, activation_dtype(device, dtype)) for part in parts)
        if draft is not None:
            base += base_bytes(draft, quantization, dtype)
            step += step_bytes(draft, config, activation_dtype(device, dtype))
        if config.speculation.accept == REJECTION:
            # The distribution that each draft model sampled from, which is kept for the next step.
            vocabulary = len(model_names(config.speculation)) * spec.vocab_size
            step += config.scheduler.max_num_seqs * MAX_MODEL_DRAFT * vocabulary * _PROBABILITY_BYTES
        slabs = [part.num_slabs for part in parts]
        fullest = max(slabs) * len(slabs) / sum(slabs)
        heads = config.speculation.draft_head_bytes if "medusa" in model_names(config.speculation) else 0
        block = block_bytes(parts, config) + (0 if draft is None else block_bytes([draft], config))
        beside = 0
        if memory.on_gpu:
            drawn = min(config.scheduler.max_num_seqs, DRAWN_TOGETHER) * spec.vocab_size * DRAW_BYTES
            pages = memory.free // block
            beside = len(parts) * max(bytes_beside_steps(part, config, len(parts), pages) for part in parts)
            # Only rank 0 draws, but all ranks count as the fullest one.
            step += heads + drawn * len(parts)
        return cls(
            free=memory.free,
            free_on_host=free_bytes(),
            on_gpu=memory.on_gpu,
            base=base,
            step=step,
            beside=beside,
            pool=pool_size(config.memory, replace(memory, free=max(0, memory.free - base)), step + beside, fullest),
            block=block,
            num_ranks=len(parts),
            fullest=fullest,
            host_cache=config.memory.host_cache_bytes,
            swap=config.memory.swap_bytes,
            corpus=config.speculation.corpus_bytes,
            heads=0 if memory.on_gpu else heads,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )

    def measured(
        self, options: MemoryOptions, base: int, device: torch.device, others: Sequence[DeviceMemory]
    ) -> "MemoryPlan":
        """Return the plan with the bytes of the loaded base and what is free now.

        Args:
            others: memory of the other ranks.
        """
        memory = DeviceMemory.of(device).with_ranks(others)
        pool = pool_size(options, memory, self.step + self.beside, self.fullest)
        return replace(self, free=memory.free + base, base=base, pool=pool)

    @property
    def needed(self) -> int:
        """Return the bytes without which no server can run."""
        return self.base + self._pool_of_all + self.step

    @property
    def _pool_of_all(self) -> int:
        """Return the bytes of the pool; on GPUs, as if every rank had as many as the one with the most slabs."""
        return int(self.pool * self.fullest) if self.on_gpu else self.pool

    def too_large(self) -> str:
        """Return what does not fit, in one line with the option to change; "" if all does."""
        if self.needed <= self.free:
            return ""
        pool = self._pool_of_all
        options = {"--model": self.base, "--pool-bytes": pool, "--max-num-batched-tokens": self.step}
        largest = max(options, key=lambda option: options[option])
        counted = " (as if every rank had the most layers)" if pool > self.pool else ""
        return (
            f"{size(self.free)} of memory are free, but the base needs about {size(self.base)}, the pool "
            f"{size(pool)}{counted} and a step of {self.max_num_batched_tokens} tokens {size(self.step)}; choose a "
            f"smaller {largest}"
        )

    def warning(self) -> str:
        """Return what may grow beyond the memory, in one line with the options to change; "" if nothing."""
        rest = self.free_on_host - (0 if self.on_gpu else self.needed)
        if self.host_cache + self.swap + self.corpus + self.heads <= rest:
            return ""
        return (
            f"adapters, requests, past answers and draft heads in host memory may grow to {size(self.host_cache)} "
            f"(--host-cache-bytes), {size(self.swap)} (--swap-bytes), {size(self.corpus)} (--corpus-bytes) and "
            f"{size(self.heads)} (--draft-head-bytes), but {size(max(0, rest))} are left"
        )

    def check(self) -> None:
        """Refuse a plan that cannot work.

        Raises:
            ConfigError: the pool is too small.
            NotEnoughMemory: the server as a whole is too large.
        """
        # First, because a large step leaves nothing for a pool.
        if problem := self.too_large():
            raise NotEnoughMemory(problem)
        if problem := pool_too_small(self.pool, self.block):
            raise ConfigError(problem)
