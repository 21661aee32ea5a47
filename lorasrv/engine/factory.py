"""From options to the parts of an engine: model, memory, pool, scheduler. The only place that puts them together."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from adapter_store.host_cache import HostCache
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.engine.core import EngineParts
from lorasrv.errors import ConfigError, UnsupportedFormat
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.models.loader import Checkpoint, WeightMeter
from lorasrv.models.quantization import INT8_GROUP, LEVELS, QuantFormat, get_format
from lorasrv.models.spec import ModelSpec, operations
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.speculation.checked_drafter import CheckedDrafter
from lorasrv.speculation.drafter import Drafter
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.adapter_source import HostAdapterStore
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device import activation_dtype, free_device_bytes, resolve_device
from lorasrv.worker.device_pool import DevicePool, page_bytes
from lorasrv.worker.executor import InProcessExecutor
from lorasrv.worker.host_memory import free_bytes
from lorasrv.worker.model_runner import ModelRunner
from lorasrv.worker.weights import load_weights
from sgmv_kernels.ops import INT8_LEVELS, KernelsUnavailable, Ops

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is, from 0 to 1."""
MIN_POOL_PAGES = 4
PROBED_WIDTH = 2048
"""Narrower models gain less from bf16 copies of their linears than was measured (`linear_autotune`)."""
MAX_COPIES_SHARE = 0.2
"""Of free memory, that bf16 copies of the base's linears may take: two bytes a weight, which is what a token costs in
operations. Codes of 4 bits grow to five times their size by them."""
_TYPICAL_LINEAR = "model.layers.0.mlp.down_proj.weight"
_OWN_FORMAT = "--quantized-weights has a format and groups of its own"
_FORMAT_OF_LEVELS = {levels: name for name, levels in LEVELS.items()}


@dataclass(frozen=True)
class BuiltModel:
    """A loaded model with everything around it that its checkpoint describes; the format that its weights are in."""

    parts: EngineParts
    spec: ModelSpec
    quantization: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def build(
    checkpoint: Checkpoint,
    config: EngineConfig,
    store: AdapterStore | None,
    progress: Progress | None = None,
    drafter: Drafter | None = None,
) -> BuiltModel:
    """Load the model and make an empty engine around it; `drafter` guesses what answers go on with.

    Raises:
        ModelError: the checkpoint cannot be served.
        ConfigError: an option does not fit this model or machine.
    """
    spec = checkpoint.spec
    device = resolve_device(config.model.device)
    dtype = getattr(torch, config.model.dtype)
    kv_dtype = dtype if config.memory.kv_dtype == "auto" else getattr(torch, config.memory.kv_dtype)
    max_model_len = _max_model_len(config.model.max_model_len, spec)
    if progress and config.model.kernels != "torch" and device.type == "cpu":
        progress("loading kernels; the first start on a machine compiles them, which takes 15 to 30 seconds", 0.0)
    ops = _ops(config.model, spec, device, [dtype, kv_dtype])
    # Before the weights: what is refused here is refused at once.
    source = checkpoint.tokenizer_source()
    tokenizer = Tokenizer.from_source(source)
    fmt = choose_format(config.model, checkpoint, ops)
    weights = load_weights(checkpoint, fmt, dtype, WeightMeter(), progress, device)
    memory = _memory(config.memory, spec, kv_dtype, device)
    adapters = HostAdapterStore(store, HostCache(config.memory.host_cache_bytes), spec, dtype) if store else None
    is_on_host = adapters.is_on_host if adapters else lambda _: False
    geometry = PoolLayout(memory.num_pages, memory.page_size, memory.page_bytes, spec.num_layers)
    books = MemoryManager.make(geometry, config.memory, config.scheduler.preemption, is_on_host)
    rows, samples = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    limits = DecoderLimits(max_model_len, rows, samples, dtype, activation_dtype(device, dtype))
    parts = EngineParts(
        books=books,
        scheduler=Scheduler(
            config.scheduler,
            books,
            frozenset(spec.eos_token_ids),
            is_on_host,
            CheckedDrafter(drafter, spec.vocab_size),
        ),
        executor=InProcessExecutor(ModelRunner(weights, memory, limits, ops)),
        source=adapters,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        weight_bytes=weights.nbytes,
        pool_bytes=memory.nbytes,
        eos_token_ids=frozenset(spec.eos_token_ids),
        watermark=config.watermark,
    )
    template = ChatTemplate.from_source(source) if source.chat_template else None
    return BuiltModel(parts, spec, fmt.name, tokenizer, template)


def choose_format(options: ModelOptions, checkpoint: Checkpoint, ops: Ops) -> QuantFormat:
    """The format to serve in. "auto" is that of the file's codes, which it keeps exactly, else int8; a model whose
    linears do not divide into groups stays as it is. Where the format is the file's, its groups are too.

    Raises:
        UnsupportedFormat: an unknown format or group, or another than that of --quantized-weights.
    """
    name, group = options.quantization, options.quantization_group
    divides = all(site.in_features % INT8_GROUP == 0 for site in checkpoint.spec.sites())
    codes = checkpoint.codes(_TYPICAL_LINEAR) if divides else None
    if name == "auto":
        name = _FORMAT_OF_LEVELS[codes.levels if codes is not None else INT8_LEVELS] if divides else "none"
    if codes is not None and codes.levels == LEVELS.get(name) and group is None:
        group = codes.group
    if options.quantized_weights is not None and (
        codes is None or codes.levels != LEVELS.get(name) or codes.group != group
    ):
        raise UnsupportedFormat(f"{_OWN_FORMAT}: leave out --quantization and --quantization-group")
    return get_format(name, ops, group, keeps_finer=codes is not None and codes.levels != INT8_LEVELS)


def make_ops(options: ModelOptions, spec: ModelSpec, device: torch.device) -> Ops:
    """The kernels that options ask for. Raises: KernelsUnavailable: they cannot run here."""
    pays = spec.hidden_size >= PROBED_WIDTH and operations(spec).token <= MAX_COPIES_SHARE * free_bytes()
    copies = options.bf16_linears == "auto" and pays
    return Ops(device, None if options.kernels == "auto" else options.kernels, copies=copies)


def _ops(options: ModelOptions, spec: ModelSpec, device: torch.device, dtypes: list[torch.dtype]) -> Ops:
    try:
        ops = make_ops(options, spec, device)
        ops.warm_up(dtypes)
        return ops
    except KernelsUnavailable as error:
        raise ConfigError(f"--kernels: {error}; use --kernels auto or torch") from error


def _max_model_len(wanted: int | None, spec: ModelSpec) -> int:
    if wanted is not None and wanted > spec.max_position:
        why = ": longrope is served within the original context only" if spec.rope.max_position else ""
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {spec.max_position} that the model was made for{why}"
        )
    return wanted or spec.max_position


def _memory(options: MemoryOptions, spec: ModelSpec, kv_dtype: torch.dtype, device: torch.device) -> DevicePool:
    block = page_bytes(spec, options.page_size_tokens, kv_dtype) * spec.num_layers
    pool_bytes = pool_size(options, device)
    if pool_bytes < MIN_POOL_PAGES * block:
        raise ConfigError(
            f"--pool-bytes {pool_bytes} is too small: one page takes {block} bytes, and {MIN_POOL_PAGES} are the least"
        )
    return DevicePool(spec, pool_bytes // block, options.page_size_tokens, kv_dtype, device)


def pool_size(options: MemoryOptions, device: torch.device | None = None) -> int:
    """Bytes that a pool would get now, in host memory unless the device is CUDA's."""
    if device is not None and device.type == "cuda":
        return options.pool_bytes or int(free_device_bytes(device) * options.cuda_pool_fraction)
    return options.pool_bytes or int(free_bytes() * options.pool_fraction)
