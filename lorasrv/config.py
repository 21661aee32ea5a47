"""Engine configuration: frozen dataclasses with units in the names. `api` handles flags and environment."""

import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from adapter_store.spec import MAX_LORA_RANK
from lorasrv.errors import ConfigError, InvalidLimits
from lorasrv.sampling_params import Watermark
from lorasrv.speculation_params import ACCEPT, DRAFTERS, MAX_PROBES, SAME_DRAW
from sgmv_kernels.formats.kv_format import KV_FORMATS

PARALLEL_LOADS = 8
"""Most adapters that are read from disk at the same time."""
MAX_VALUE = 2**53
"""Largest whole number that every JSON reader represents exactly."""
MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound what one adapter or one key may use at a time; None sets no bound. `Quotas` keeps the accounts.

    Args:
        max_running: running requests; further ones wait.
        max_queued: waiting requests; further ones are refused.
        tokens_per_s: prompt and generated tokens computed per second, on average.
        resident_bytes: bytes of the pool for the adapter and for the keys and values that its requests may come to
            need.
        weight: share of the service, not a bound: weight 2 gets twice the service of weight 1 while both have requests
            waiting.
    Raises:
        InvalidLimits: a value is not positive; the message names it.
    """

    max_running: int | None = None
    max_queued: int | None = None
    tokens_per_s: float | None = None
    resident_bytes: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidLimits(f"must be above 0, not {value}", name)
            if value is not None and value > MAX_VALUE:
                raise InvalidLimits(f"must be at most {MAX_VALUE}", name)
        if self.weight > MAX_WEIGHT or self.weight < 1 / MAX_WEIGHT:
            raise InvalidLimits(f"must be between {1 / MAX_WEIGHT:g} and {MAX_WEIGHT:g}, not {self.weight}", "weight")


@dataclass(frozen=True, slots=True)
class LimitShare:
    """Bound this engine's part of the limits of an adapter that several servers serve; None: all of a limit.

    Args:
        max_running: running requests; with 0 none begins.
        tokens_per_s: tokens computed per second; 0 removes the rate once no request runs and no tokens are owed.
    """

    max_running: int | None = None
    tokens_per_s: float | None = None

    @property
    def is_nothing(self) -> bool:
        """Return whether no request may begin."""
        return self.max_running == 0

    def union(self, other: "LimitShare") -> "LimitShare":
        """Return the smallest share that allows everything that either share allows."""
        return LimitShare(
            _larger(self.max_running, other.max_running),
            _larger(self.tokens_per_s, other.tokens_per_s),
        )


_N = TypeVar("_N", int, float)
NO_SHARE = LimitShare(0, 0.0)
WHOLE = LimitShare()


def _larger(one: _N | None, other: _N | None) -> _N | None:
    return None if one is None or other is None else max(one, other)


BUILTIN_MODEL = "smollm2-135m"
DTYPES = ("bfloat16", "float32")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "torch", "numba", "triton")
BF16_LINEARS = ("off", "auto")
LOAD_FORMATS = ("auto", "dummy")
PREEMPTIONS = ("auto", "recompute", "swap")
SPECULATION = ("auto", "off")
POLICIES = ("fair", "fcfs", "mlfq", "sjf")
PAGE_SIZE_TOKENS = 16
MIN_MODEL_LEN = 2
POOL_FRACTION = 0.25
"""Share of free host memory for a pool without `pool_bytes`."""
CUDA_POOL_FRACTION = 0.85
"""Share of a CUDA device's free memory for such a pool, after the weights are loaded."""


GPU_MAX_NUM_SEQS = 256
GPU_MAX_NUM_BATCHED_TOKENS = 2048
"""Default on a GPU, which a step of a few hundred tokens would not keep busy. NOT MEASURED."""
GPU_HOST_CACHE_FRACTION = 1 / 8
GPU_SWAP_FRACTION = 0.03
"""Defaults on a GPU as shares of free host memory: an adapter of an 8B model takes 80 MB, and so do 600 tokens."""


def size(num_bytes: int) -> str:
    """Format a number of bytes."""
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def default_store_dir() -> Path:
    """Return the folder of adapters if `--store` is not given: in the user's data directory."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "lorasrv"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Choose the base model and its runtime format."""

    model: str = BUILTIN_MODEL
    # "auto" keeps quantized files exactly, and quantizes others to int8.
    quantization: str = "auto"
    # None takes the format's default.
    quantization_group: int | None = None
    # Dtype of adapters, of a base that is not quantized, and of activations on CUDA.
    dtype: str = "bfloat16"
    device: str = "auto"
    kernels: str = "auto"
    max_model_len: int | None = None
    # "dummy" fills weights with random numbers.
    load_format: str = "auto"
    # File of linears that `lorasrv quantize` has rounded.
    quantized_weights: Path | None = None
    # "auto" adds a bf16 copy of linears for large steps on CPUs where that is much faster, if memory suffices. Results
    # then depend in the last bits on the size of the batch.
    bf16_linears: str = "off"

    def __post_init__(self) -> None:
        _positive("--quantization-group", self.quantization_group)
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--device", self.device, DEVICES)
        _one_of("--kernels", self.kernels, KERNELS)
        _one_of("--load-format", self.load_format, LOAD_FORMATS)
        _one_of("--bf16-linears", self.bf16_linears, BF16_LINEARS)
        if self.max_model_len is not None and self.max_model_len < MIN_MODEL_LEN:
            raise ConfigError(
                f"--max-model-len must be at least {MIN_MODEL_LEN}, a token each of prompt and answer, "
                f"not {self.max_model_len}"
            )


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Set the sizes of the pool that the KV cache and adapters share, and of other host memory."""

    # None takes a share of free memory (`POOL_FRACTION`, `CUDA_POOL_FRACTION`).
    pool_bytes: int | None = None
    # Share of all memory that base, pool and steps may take together, in place of `pool_bytes`.
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    host_cache_bytes: int = 1 << 30
    max_lora_rank: int = MAX_LORA_RANK
    swap_bytes: int = 1 << 28
    enable_prefix_caching: bool = True
    # Bytes on the disk for snapshots of fixed prompts, beside the adapters.
    snapshot_bytes: int = 1 << 30
    # Splits the pool permanently, as other servers do; None shares all of it.
    adapter_pool_fraction: float | None = None

    def __post_init__(self) -> None:
        _one_of("--kv-cache-dtype", self.kv_cache_dtype, ("auto", *KV_FORMATS))
        _positive("--pool-bytes", self.pool_bytes)
        _positive("--gpu-memory-utilization", self.gpu_memory_utilization)
        if self.gpu_memory_utilization is not None and self.gpu_memory_utilization > 1:
            raise ConfigError(f"--gpu-memory-utilization must be at most 1, not {self.gpu_memory_utilization}")
        if self.gpu_memory_utilization is not None and self.pool_bytes is not None:
            raise ConfigError("--gpu-memory-utilization and --pool-bytes exclude each other: give one of them")
        _positive("--host-cache-bytes", self.host_cache_bytes)
        _positive("--max-lora-rank", self.max_lora_rank)
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ConfigError(f"--max-lora-rank must be at most {MAX_LORA_RANK}, not {self.max_lora_rank}")
        if self.swap_bytes < 0:
            raise ConfigError(f"--swap-bytes must not be negative, not {self.swap_bytes}; 0 turns swapping off")
        if self.snapshot_bytes < 0:
            raise ConfigError(f"--snapshot-bytes must not be negative, not {self.snapshot_bytes}; 0 keeps no snapshots")
        if self.adapter_pool_fraction is not None and not 0.0 < self.adapter_pool_fraction < 1.0:
            raise ConfigError(f"--adapter-pool-fraction must be above 0 and below 1, not {self.adapter_pool_fraction}")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Bound a step and the accepted requests, and choose their order.

    Args:
        scheduling_policy: one of `POLICIES`.
        target_itl_ms: target for a step with running answers; prompt chunks are cut to meet it.
        target_itl_ratio: the same target as a multiple of such a step without prompts; the lower of both counts.
        max_wait_steps: steps after which a waiting request that could run goes before all others.
        max_num_queued_seqs, max_num_queued_tokens: requests that do not run yet, and prompt tokens that are not
            computed yet; further ones are refused.
        queue_timeout_s: longest wait for the first step; None sets no bound.
        load_timeout_s: longest time for reading an adapter from disk; None sets no bound.
        early_abort: refuse requests that are predicted to miss their deadline.
        adapter_limits: limits of every adapter without its own.
        key_limits: limits of every key.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_queued_seqs: int = 4096
    max_num_queued_tokens: int = 1 << 20
    preemption_mode: str = "auto"
    scheduling_policy: str = "fair"
    target_itl_ms: float | None = 250.0
    target_itl_ratio: float | None = 3.0
    max_wait_steps: int = 512
    queue_timeout_s: float | None = None
    load_timeout_s: float | None = 60.0
    early_abort: bool = False
    adapter_limits: Limits = Limits()
    key_limits: Limits = Limits()

    def __post_init__(self) -> None:
        _one_of("--preemption-mode", self.preemption_mode, PREEMPTIONS)
        _one_of("--scheduling-policy", self.scheduling_policy, POLICIES)
        _positive("--max-num-seqs", self.max_num_seqs)
        _positive("--max-num-batched-tokens", self.max_num_batched_tokens)
        _positive("--max-num-queued-seqs", self.max_num_queued_seqs)
        _positive("--max-num-queued-tokens", self.max_num_queued_tokens)
        _positive("--target-itl-ms", self.target_itl_ms)
        if self.target_itl_ratio is not None and self.target_itl_ratio <= 1:
            raise ConfigError(
                f"--target-itl-ratio {self.target_itl_ratio:g} leaves no time for prompts; take more than 1, or off"
            )
        _positive("--max-wait-steps", self.max_wait_steps)
        _positive("--queue-timeout-s", self.queue_timeout_s)
        _positive("--load-timeout-s", self.load_timeout_s)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than --max-num-seqs "
                f"{self.max_num_seqs}: a step could not give every request its token; raise the one or lower the other"
            )
        for of, limits in (("adapter", self.adapter_limits), ("key", self.key_limits)):
            if limits.max_running is not None and limits.max_running > self.max_num_seqs:
                raise ConfigError(
                    f"--max-running-per-{of} {limits.max_running} is more than --max-num-seqs {self.max_num_seqs}, "
                    "which no step exceeds; lower it or leave it out"
                )


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Choose how answers are drafted. No option changes an answer, except `accept="rejection"`, which changes the
    answers of requests without a seed but not their distribution.

    Args:
        speculation: "auto" drafts where that is faster.
        drafters: the drafters in use, out of `DRAFTERS`.
        corpus_bytes: memory for past answers, from which `corpus` drafts.
        draft_model: base with the same vocabulary, with which `model` drafts; as `ModelOptions.model`.
        accept: how draft tokens are accepted; "rejection" applies only to requests without a seed.
        draft_trees: whether drafts of several drafters are verified together, as a tree.
        draft_layers: number of the served base's layers with which `layers` drafts; None: it does not.
        draft_heads: file or folder of the base's Medusa heads, with which `medusa` drafts; adapters may have their own.
        draft_head_bytes: memory for the heads of adapters.
        lookahead: "WxN", the window with which `lookahead` drafts: places guessed at once, and tokens of an n-gram,
            including the one before a draft; None: it does not.
    """

    speculation: str = "auto"
    drafters: tuple[str, ...] = DRAFTERS
    corpus_bytes: int = 64 << 20
    draft_model: str | None = None
    draft_layers: int | None = None
    accept: str = SAME_DRAW
    draft_trees: bool = False
    draft_heads: str | None = None
    draft_head_bytes: int = 256 << 20
    lookahead: str | None = None

    def __post_init__(self) -> None:
        _one_of("--speculation", self.speculation, SPECULATION)
        for name in self.drafters:
            _one_of("--drafters", name, DRAFTERS)
        if self.corpus_bytes < 0:
            raise ConfigError(f"--corpus-bytes must not be negative, not {self.corpus_bytes}; 0 keeps no answers")
        if self.draft_head_bytes < 0:
            raise ConfigError(f"--draft-head-bytes must not be negative, not {self.draft_head_bytes}; 0 keeps no heads")
        _one_of("--accept", self.accept, ACCEPT)
        _positive("--draft-layers", self.draft_layers)
        for option, value, drafter in (
            ("--draft-model", self.draft_model, "model"),
            ("--draft-layers", self.draft_layers, "layers"),
            ("--draft-heads", self.draft_heads, "medusa"),
            ("--lookahead", self.lookahead, "lookahead"),
        ):
            if value is not None and not self.uses(drafter):
                raise ConfigError(f"{option} drafts nothing: --speculation or --drafters leaves {drafter} out")
        if self.lookahead is not None:
            places, length = self.lookahead_window
            if places < 1 or length < 2 or places * (length - 1) > MAX_PROBES:
                raise ConfigError(
                    f"--lookahead {self.lookahead} has {places} places and n-grams of {length} tokens; take n-grams of "
                    f"2 or more, and at most {MAX_PROBES} places times tokens behind the first"
                )

    @property
    def lookahead_window(self) -> tuple[int, int]:
        """Return the places and the length of n-grams.

        Raises:
            ConfigError: the option is not of the form "WxN".
        """
        places, _, length = (self.lookahead or "").partition("x")
        if not (places.isdecimal() and length.isdecimal()):
            raise ConfigError(
                f"--lookahead must be written as 5x4, places and tokens of an n-gram, not {self.lookahead!r}"
            )
        return int(places), int(length)

    def uses(self, drafter: str) -> bool:
        """Return whether a drafter is in use."""
        return self.speculation != "off" and drafter in self.drafters


TP_EXCHANGES = ("columns", "sums")


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """Divide a replica among processes; `lorasrv.distributed.partition` reads it.

    Args:
        partition: ranks, joined by & for columns and ; for stages; None takes the counts below.
        tp: number of columns: parts of the outputs of every linear.
        pp: number of stages: consecutive layers.
        cp: number of parts of the rows of a step, in place of the other two.
        tp_exchange: what the ranks of a stage exchange: "columns", or "sums", which are fewer.
    """

    partition: str | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    tp_exchange: str = "columns"

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp"):
            _positive(f"--{name}", getattr(self, name))
        if self.tp_exchange not in TP_EXCHANGES:
            raise ConfigError(f"--tp-exchange must be {' or '.join(TP_EXCHANGES)}, not {self.tp_exchange!r:.40}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configure an engine."""

    model: ModelOptions = field(default_factory=ModelOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    partition: PartitionOptions = field(default_factory=PartitionOptions)
    # Watermark of requests that ask for one.
    watermark: Watermark = field(default_factory=Watermark)


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{option} {value!r} is unknown; choose from {', '.join(choices)}")


def _positive(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{option} must be positive, not {value}")
