"""Declare the options of `serve` that configure the engine; `ServerSettings` has them with all others."""

from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

from pydantic import ByteSize, Field, field_validator

from api.config.option_spec import OptionSpec, Size, flag, option_specs, texts
from api.config.partition_settings import PartitionSettings
from lorasrv.config import (
    BF16_LINEARS,
    BUILTIN_MODEL,
    CUDA_POOL_FRACTION,
    DEVICES,
    DTYPES,
    GPU_HOST_CACHE_FRACTION,
    GPU_MAX_NUM_BATCHED_TOKENS,
    GPU_MAX_NUM_SEQS,
    GPU_SWAP_FRACTION,
    KERNELS,
    LOAD_FORMATS,
    POLICIES,
    POOL_FRACTION,
    PREEMPTIONS,
    SPECULATION,
    EngineConfig,
    Limits,
    MemoryOptions,
    ModelOptions,
    SchedulerOptions,
    SpeculationOptions,
)
from lorasrv.errors import ConfigError, InvalidLimits
from lorasrv.sampling_params import Watermark
from lorasrv.speculation_params import ACCEPT, DRAFTERS
from sgmv_kernels.formats.kv_format import KV_FORMATS

_NO_LIMIT = "no limit"
_model = partial(OptionSpec, panel="Model")
_adapters = partial(OptionSpec, panel="Adapters")
_memory = partial(OptionSpec, panel="Memory")
_scheduling = partial(OptionSpec, panel="Scheduling")
_speculation = partial(OptionSpec, panel="Speculation")
_limits = partial(OptionSpec, panel="Limits")
_account_limits = partial(OptionSpec, panel="Limits", default=_NO_LIMIT)
_watermark = partial(OptionSpec, panel="Watermark")
_MODEL = ModelOptions()
_MEMORY = MemoryOptions()
_SCHEDULER = SchedulerOptions()
_SPECULATION = SpeculationOptions()
_WATERMARK = Watermark()
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_AtLeastOne = Annotated[int, Field(ge=1)]


class EngineSettings(PartitionSettings):
    """Hold the options of the engine."""

    model: Annotated[
        str, _model("Base model: a built-in name, a .gguf file, a Hugging Face folder or hf:org/name", metavar="MODEL")
    ] = BUILTIN_MODEL
    quantization: Annotated[
        _Name,
        _model(
            "Format of the base weights: none, int8, int4, q3h, nf4, fp4, fp8, or auto (that of a quantized file, else "
            "int8); gptq, awq, compressed-tensors, bitsandbytes, hqq, eetq or gguf: the checkpoint must be one; or by "
            "part of a layer: attn=int4,mlp=q3h",
            aliases=("quantize",),
            metavar="FORMAT",
        ),
    ] = _MODEL.quantization
    quantization_group: Annotated[
        int | None, _model("Number of weights that share a scale: 32, 64 or 128", default="the format's")
    ] = _MODEL.quantization_group
    quantized_weights: Annotated[
        Path | None, _model("File written by lorasrv quantize; it sets the format and the number of weights per scale")
    ] = None
    bf16_linears: Annotated[
        str,
        _model(
            "Additional bfloat16 copy of the linear layers for large steps; auto: on CPUs where that is faster; "
            "the last bits then depend on the batch",
            choices=BF16_LINEARS,
        ),
    ] = _MODEL.bf16_linears
    dtype: Annotated[
        str, _model("Data type of adapters, and of base weights that are not quantized", choices=DTYPES)
    ] = _MODEL.dtype
    device: Annotated[str, _model("Device to run on", choices=DEVICES)] = _MODEL.device
    kernels: Annotated[str, _model("Kernels to run with", choices=KERNELS)] = _MODEL.kernels
    load_format: Annotated[
        str, _model("Weights to load; dummy: random ones of the model's shape", choices=LOAD_FORMATS)
    ] = _MODEL.load_format
    max_model_len: Annotated[
        int | None,
        _model("Maximum length of prompt and answer together, in tokens", default="the model's context length"),
    ] = None

    max_lora_rank: Annotated[int, _adapters("Maximum rank of an adapter")] = _MEMORY.max_lora_rank

    kv_cache_dtype: Annotated[
        str,
        _memory("Format of the KV cache", aliases=("kv_dtype",), choices=("auto", *KV_FORMATS)),
    ] = _MEMORY.kv_cache_dtype
    pool_bytes: Annotated[
        Size | None,
        _memory(
            "Size of the pool that holds the KV cache and adapters, e.g. 2GiB",
            default=f"{100 * POOL_FRACTION:.0f} % of free memory, {100 * CUDA_POOL_FRACTION:.0f} % on CUDA",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _memory(
            "Fraction of the device's memory that base, pool and steps fill, in place of --pool-bytes",
            default="off",
        ),
    ] = None
    host_cache_bytes: Annotated[
        Size,
        _memory(
            "Size of the adapter cache in host memory",
            default=f"1GiB, {100 * GPU_HOST_CACHE_FRACTION:g} % of free host memory on CUDA",
        ),
    ] = ByteSize(_MEMORY.host_cache_bytes)
    swap_bytes: Annotated[
        Size,
        _memory(
            "Size of the host memory for preempted requests; 0 turns swapping off",
            default=f"256MiB, {100 * GPU_SWAP_FRACTION:g} % of free host memory on CUDA",
        ),
    ] = ByteSize(_MEMORY.swap_bytes)
    enable_prefix_caching: Annotated[bool, _memory("Reuse the KV cache of prompts with a common prefix")] = (
        _MEMORY.enable_prefix_caching
    )
    snapshot_bytes: Annotated[
        Size, _memory("Size of the snapshots of personas' prompts on the disk; 0 keeps none", default="1GiB")
    ] = ByteSize(_MEMORY.snapshot_bytes)
    adapter_pool_fraction: Annotated[
        float | None, _memory("Fraction of the pool that only adapters use", default="one pool for both")
    ] = _MEMORY.adapter_pool_fraction

    max_num_seqs: Annotated[
        int,
        _scheduling(
            "Maximum number of requests in a step",
            default=f"{_SCHEDULER.max_num_seqs}, {GPU_MAX_NUM_SEQS} on CUDA",
        ),
    ] = _SCHEDULER.max_num_seqs
    max_num_batched_tokens: Annotated[
        int,
        _scheduling(
            "Maximum number of tokens in a step",
            default=f"{_SCHEDULER.max_num_batched_tokens}, {GPU_MAX_NUM_BATCHED_TOKENS} on CUDA",
        ),
    ] = _SCHEDULER.max_num_batched_tokens
    scheduling_policy: Annotated[
        str, _scheduling("Order of waiting requests", aliases=("policy",), choices=POLICIES)
    ] = _SCHEDULER.scheduling_policy
    preemption_mode: Annotated[
        str,
        _scheduling(
            "How a preempted request resumes",
            aliases=("preemption",),
            choices=PREEMPTIONS,
        ),
    ] = _SCHEDULER.preemption_mode
    target_itl_ms: Annotated[
        float | None,
        _scheduling("Target duration of a step that generates tokens, in milliseconds, or off", takes_text=True),
    ] = _SCHEDULER.target_itl_ms
    target_itl_ratio: Annotated[
        float | None,
        _scheduling(
            "The same target as a multiple of a step without prompts, or off",
            metavar="N",
            takes_text=True,
        ),
    ] = _SCHEDULER.target_itl_ratio
    max_wait_steps: Annotated[
        int, _scheduling("Number of steps after which a waiting request goes before all others")
    ] = _SCHEDULER.max_wait_steps
    queue_timeout_s: Annotated[
        float | None, _scheduling("Maximum time a request waits for its first step, in seconds", default=_NO_LIMIT)
    ] = _SCHEDULER.queue_timeout_s
    load_timeout_s: Annotated[
        float | None,
        _scheduling("Maximum time for reading an adapter from disk, in seconds; then its requests fail"),
    ] = _SCHEDULER.load_timeout_s
    early_abort: Annotated[bool, _scheduling("Refuse requests that are predicted to miss their deadline")] = (
        _SCHEDULER.early_abort
    )

    speculation: Annotated[
        str,
        _speculation("Verify several drafted tokens in a step where it pays; no answer changes", choices=SPECULATION),
    ] = _SPECULATION.speculation
    drafters: Annotated[
        tuple[str, ...],
        _speculation(f"Drafters to use, of {', '.join(DRAFTERS)}", metavar="NAME,..."),
    ] = _SPECULATION.drafters
    corpus_bytes: Annotated[
        Size, _speculation("Size of the memory for past answers that new ones are drafted from; 0 keeps none")
    ] = ByteSize(_SPECULATION.corpus_bytes)
    draft_model: Annotated[
        _Name | None,
        _speculation(
            "Base of the same vocabulary that drafts for --model; named like it", metavar="MODEL", default="none"
        ),
    ] = _SPECULATION.draft_model
    draft_layers: Annotated[
        int | None,
        _speculation("Number of the base's own layers that draft for all of them, with the adapters", default="none"),
    ] = _SPECULATION.draft_layers
    draft_heads: Annotated[
        _Name | None,
        _speculation("Medusa heads of the base: a file, or the folder that holds it", metavar="PATH", default="none"),
    ] = _SPECULATION.draft_heads
    draft_head_bytes: Annotated[
        Size, _speculation("Size of the memory for the Medusa heads of adapters; 0 uses none of them")
    ] = ByteSize(_SPECULATION.draft_head_bytes)
    lookahead: Annotated[
        _Name | None,
        _speculation("Places and n-gram length of lookahead decoding, as 5x4", metavar="NxN", default="none"),
    ] = _SPECULATION.lookahead
    accept: Annotated[
        str,
        _speculation(
            "How draft tokens are accepted: if they are what would be drawn anyway, or, in requests without a seed, by "
            "rejection sampling",
            choices=ACCEPT,
        ),
    ] = _SPECULATION.accept
    draft_trees: Annotated[
        bool, _speculation("Verify drafts of several drafters together, as a tree; the last bits of logits may differ")
    ] = _SPECULATION.draft_trees

    max_num_queued_seqs: Annotated[
        _AtLeastOne, _limits("Maximum number of requests that wait for their first step", aliases=("max_queued",))
    ] = _SCHEDULER.max_num_queued_seqs
    max_num_queued_tokens: Annotated[
        _AtLeastOne, _limits("Maximum number of prompt tokens that wait to be computed", aliases=("max_queued_tokens",))
    ] = _SCHEDULER.max_num_queued_tokens
    max_running_per_adapter: Annotated[
        int | None,
        _account_limits(
            "Maximum number of running requests per adapter", engine="scheduler.adapter_limits.max_running"
        ),
    ] = None
    max_queued_per_adapter: Annotated[
        int | None,
        _account_limits("Maximum number of waiting requests per adapter", engine="scheduler.adapter_limits.max_queued"),
    ] = None
    tokens_per_s_per_adapter: Annotated[
        float | None,
        _account_limits(
            "Maximum number of tokens per second and adapter, on average",
            engine="scheduler.adapter_limits.tokens_per_s",
        ),
    ] = None
    resident_bytes_per_adapter: Annotated[
        Size | None,
        _account_limits(
            "Maximum size of an adapter and its requests in the pool, e.g. 64MiB",
            engine="scheduler.adapter_limits.resident_bytes",
        ),
    ] = None
    max_running_per_key: Annotated[
        int | None,
        _account_limits("Maximum number of running requests per API key", engine="scheduler.key_limits.max_running"),
    ] = None
    max_queued_per_key: Annotated[
        int | None,
        _account_limits("Maximum number of waiting requests per API key", engine="scheduler.key_limits.max_queued"),
    ] = None
    tokens_per_s_per_key: Annotated[
        float | None,
        _account_limits(
            "Maximum number of tokens per second and API key, on average", engine="scheduler.key_limits.tokens_per_s"
        ),
    ] = None
    resident_bytes_per_key: Annotated[
        Size | None,
        _account_limits(
            "Maximum size of an API key's requests and their adapters in the pool",
            engine="scheduler.key_limits.resident_bytes",
        ),
    ] = None

    watermark_gamma: Annotated[
        float, _watermark("Fraction of tokens on the watermark's green list", engine="watermark.gamma")
    ] = _WATERMARK.gamma
    watermark_delta: Annotated[
        float, _watermark("Bias added to the logits of green tokens", engine="watermark.delta")
    ] = _WATERMARK.delta
    watermark_key: Annotated[
        int,
        Field(repr=False),
        _watermark(
            "Secret number that detection needs; safer as LORASRV_WATERMARK_KEY",
            default="TGI's",
            engine="watermark.key",
        ),
    ] = _WATERMARK.key

    @field_validator("target_itl_ms", "target_itl_ratio", mode="before")
    @classmethod
    def _parse_target_itl(cls, value: object) -> object:
        return None if value == "off" else value

    @field_validator("drafters", mode="before")
    @classmethod
    def _split_drafters(cls, value: object) -> object:
        return texts(value)

    def for_gpu(self, free_on_host: int) -> Self:
        """Return the settings with the defaults of a GPU for options that were not given.

        Args:
            free_on_host: bytes of free host memory.
        """
        tokens = GPU_MAX_NUM_BATCHED_TOKENS
        if "max_num_batched_tokens" in self.model_fields_set:
            tokens = self.max_num_batched_tokens
        defaults = {
            "max_num_seqs": min(GPU_MAX_NUM_SEQS, tokens),
            "max_num_batched_tokens": tokens,
            "host_cache_bytes": ByteSize(free_on_host * GPU_HOST_CACHE_FRACTION),
            "swap_bytes": ByteSize(free_on_host * GPU_SWAP_FRACTION),
        }
        return self.model_copy(update={name: defaults[name] for name in defaults.keys() - self.model_fields_set})

    def engine_config(self) -> EngineConfig:
        """Build the engine's configuration.

        Raises:
            ConfigError: a value is out of range; the error names the flag.
        """
        config: EngineConfig = self._built(EngineConfig)
        return config

    def limits(self, of: Literal["adapter", "key"]) -> Limits:
        """Return the default limits of every adapter, or of every key.

        Raises:
            ConfigError: a value is out of range; the error names the flag.
        """
        limits: Limits = self._built(Limits, f"scheduler.{of}_limits.")
        return limits

    def _built(self, kind: Any, path: str = "") -> Any:
        """Build a dataclass of the engine's configuration, with nested ones, from the options of its fields."""
        values = {}
        for name, inner in get_type_hints(kind).items():
            if is_dataclass(inner):
                values[name] = self._built(inner, f"{path}{name}.")
            elif option := engine_options().get(path + name):
                value = getattr(self, option)
                values[name] = int(value) if isinstance(value, ByteSize) else value
        try:
            return kind(**values)
        except InvalidLimits as error:
            problem = str(error).removeprefix(f"{error.param} ")
            raise ConfigError(f"{flag(engine_options()[path + error.param])} {problem}") from None


@cache
def engine_options() -> dict[str, str]:
    """Map paths in EngineConfig, such as `scheduler.max_num_seqs`, to their options."""
    options = option_specs(EngineSettings)
    renamed = {option.engine: name for name, option in options.items() if option.engine}
    found = {}
    for path in _paths(EngineConfig):
        name = renamed.get(path, path.rpartition(".")[2])
        if path in renamed or (name in options and not options[name].engine):
            found[path] = name
    return found


def _paths(kind: Any, path: str = "") -> list[str]:
    found = []
    for name, inner in get_type_hints(kind).items():
        found += _paths(inner, f"{path}{name}.") if is_dataclass(inner) else [path + name]
    return found
