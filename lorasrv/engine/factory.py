"""Factory: build an engine's parts (model, memory, pool, scheduler) from options."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adapter_store.formats.weights import HeadArrays
from adapter_store.host_cache import HostCache
from adapter_store.storage.snapshots import SnapshotFiles
from adapter_store.store import AdapterStore
from lorasrv.config import PAGE_SIZE_TOKENS, EngineConfig, MemoryOptions, ModelOptions, SpeculationOptions
from lorasrv.engine.core import EngineParts
from lorasrv.engine.draft_model import load_draft_weights, open_draft_model
from lorasrv.engine.input_processor import InputProcessor
from lorasrv.engine.memory_plan import MemoryPlan, pool_size
from lorasrv.engine.poison_requests import PoisonGuard
from lorasrv.errors import ConfigError, UnsupportedFormat
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.models.loader import Checkpoint, WeightMeter
from lorasrv.models.quantization import Fit, QuantFormat, StoredWeights, get_format, select_format
from lorasrv.models.quantization.fp8 import Fp8Format
from lorasrv.models.quantization.grouped import Int8Format
from lorasrv.models.quantization.served import ServedWeights
from lorasrv.models.spec import ModelSpec, operations
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.speculation.drafter import Drafter
from lorasrv.speculation.drafters import draft_layers, make_drafters, model_names
from lorasrv.speculation.speculator import Speculator
from lorasrv.speculation_params import REJECTION
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.adapter_source import HostAdapterStore
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device import DeviceMemory, activation_dtype, resolve_device
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.draft_heads import DraftHeads, MedusaHeads, read_heads
from lorasrv.worker.executor import InProcessExecutor, LaunchingExecutor
from lorasrv.worker.host_memory import free_bytes
from lorasrv.worker.kv_identity import kv_identity
from lorasrv.worker.model_runner import DraftModel, ModelRunner
from lorasrv.worker.weights import load_weights, silent
from sgmv_kernels.formats.fp8 import multiplies_fp8
from sgmv_kernels.formats.kv_format import KVFormat, get_kv_format
from sgmv_kernels.ops import KernelsUnavailable, Ops

logger = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
"""Called with the current activity and its progress from 0 to 1."""
PROBED_WIDTH = 2048
"""Narrower models gain less from bf16 copies of their linears than was measured (`linear_autotune`)."""
MAX_COPIES_SHARE = 0.2
"""Largest share of free memory for bf16 copies of the base's linears: two bytes a weight, which is also what a token
costs in operations. 4-bit weights grow to five times their size with a copy."""
_OWN_FORMAT = "--quantized-weights fixes format and group"


@dataclass(frozen=True)
class BuiltModel:
    """Hold a loaded model and what its checkpoint describes."""

    parts: EngineParts
    spec: ModelSpec
    # The format that its weights are in.
    weights: ServedWeights
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    # Whether a request's result is the same alone and in any batch, to the bit.
    is_batch_invariant: bool
    # Those of the store; None without one.
    snapshots: SnapshotFiles | None = None
    max_snapshot_bytes: int = 0

    def input_processor(
        self, poison: PoisonGuard, queue_timeout_s: float | None = None, load_timeout_s: float | None = None
    ) -> InputProcessor:
        """Return an input processor for an engine of these parts, which owns `poison`."""
        return InputProcessor(
            self.parts.memory,
            self.parts.source,
            self.parts.max_model_len,
            self.parts.vocab_size,
            self.tokenizer,
            eos_token_ids=self.parts.eos_token_ids,
            watermark=self.parts.watermark,
            poison=poison,
            queue_timeout_s=queue_timeout_s,
            load_timeout_s=load_timeout_s,
            may_reject=self.parts.may_reject,
            num_draft_heads=self.parts.num_draft_heads,
            drafters=self.parts.drafters,
            step_tokens=self.parts.step_tokens,
            why_no_policy=self.spec.why_no_kv_policy,
        )


def build(
    checkpoint: Checkpoint,
    config: EngineConfig,
    store: AdapterStore | None,
    progress: Progress | None = None,
    drafters: Sequence[Drafter] | None = None,
) -> BuiltModel:
    """Load the model and build an empty engine around it; `drafters` replace those that the options name.

    Raises:
        ModelError: the checkpoint cannot be served.
        ConfigError: an option does not fit this model or machine.
        NotEnoughMemory: the model, the pool or a step is too large for this machine.
    """
    spec = checkpoint.spec
    device = resolve_device(config.model.device)
    dtype = getattr(torch, config.model.dtype)
    kv_format = get_kv_format(config.memory.kv_cache_dtype, config.model.dtype)
    max_model_len = _max_model_len(config.model.max_model_len, spec)
    ops = _ops(config.model, spec, device, dtype, kv_format, progress or silent)
    # Before the weights, which take long: what can be refused is refused here.
    source = checkpoint.tokenizer_source()
    tokenizer = Tokenizer.from_source(source)
    fmt = choose_format(config.model, checkpoint, ops)
    drafting = open_draft_model(config, tokenizer, spec.vocab_size, max_model_len)
    draft_spec = None if drafting is None else drafting.spec
    base_heads = _read_draft_heads(config.speculation, spec)
    plan = MemoryPlan.of(config, spec, fmt.name, device, checkpoint.packing, draft_spec)
    plan.check()
    if warning := plan.warning():
        logger.warning(warning)
    weights = load_weights(checkpoint, fmt, dtype, WeightMeter(), progress, device)
    served = ServedWeights(fmt.name, checkpoint.packing, weights.kept_codes, weights.remade_codes)
    if line := served.line():
        logger.log(logging.INFO if served.is_exact else logging.WARNING, "%s", line)
    draft = None if drafting is None else load_draft_weights(drafting, config.model, ops, device, progress or silent)
    weight_bytes = weights.nbytes + (0 if draft is None else draft.nbytes)
    plan = _measured(plan, config.memory, weight_bytes, device)
    plan.check()
    page_bytes = _page_bytes(spec, kv_format)
    draft_bytes = 0 if draft is None else _page_bytes(draft.spec, kv_format) * draft.spec.num_slabs
    geometry = PoolLayout.of_bytes(plan.pool, page_bytes, PAGE_SIZE_TOKENS, spec.num_slabs, draft_bytes)
    device_pool = DevicePool(spec, geometry.num_pages, geometry.page_size, kv_format, device)
    draft_model = None
    if draft is not None:
        draft_pool = DevicePool(draft.spec, geometry.num_pages, geometry.page_size, kv_format, device)
        draft_model = DraftModel(draft, draft_pool)
    adapters = HostAdapterStore(store, HostCache(config.memory.host_cache_bytes), weights, dtype) if store else None
    is_on_host = adapters.is_on_host if adapters else lambda _: False
    snapshots = store.snapshots if store is not None and config.memory.snapshot_bytes else None
    sizes = (geometry.page_size, geometry.page_bytes, geometry.num_slabs, geometry.draft_bytes)
    identity = kv_identity(weights, fmt, config.model, ops, kv_format, sizes, draft)
    memory = MemoryManager.make(
        geometry,
        config.memory,
        config.scheduler.preemption_mode,
        is_on_host,
        facts=identity if snapshots is not None else None,
        stored=snapshots.sizes() if snapshots is not None else {},
    )
    rows, samples = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    limits = DecoderLimits(max_model_len, rows, samples, dtype, activation_dtype(device, dtype))
    models = model_names(config.speculation)
    layers = draft_layers(spec.num_layers, config.speculation.draft_layers, spec.kv_source_layers)
    made = make_drafters(config.speculation) if drafters is None else drafters
    may_reject = config.speculation.accept == REJECTION
    heads = None
    if "medusa" in models:
        base = MedusaHeads.of(base_heads, limits.activation, device) if base_heads else None
        max_bytes = config.speculation.draft_head_bytes
        read = adapters.draft_heads if adapters is not None and max_bytes else None
        heads = DraftHeads(base, read, max_bytes, limits.activation, device)
    runner = ModelRunner(weights, device_pool, limits, ops, draft_model, layers, heads)
    executor = LaunchingExecutor(runner) if device.type == "cuda" else InProcessExecutor(runner)
    runner.warm_up(config.memory.max_lora_rank, progress or silent)
    parts = EngineParts(
        memory=memory,
        scheduler=Scheduler(
            config.scheduler,
            memory,
            frozenset(spec.eos_token_ids),
            is_on_host,
            Speculator(
                made,
                spec.vocab_size,
                models=models,
                makes_trees=config.speculation.draft_trees,
            ),
        ),
        executor=executor,
        source=adapters,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        weight_bytes=weight_bytes,
        pool_bytes=device_pool.nbytes + (0 if draft_model is None else draft_model.memory.nbytes),
        eos_token_ids=frozenset(spec.eos_token_ids),
        watermark=config.watermark,
        may_reject=may_reject,
        num_draft_heads=len(base_heads),
        drafters=frozenset((*(drafter.name for drafter in made), *models)),
        step_tokens=config.scheduler.max_num_batched_tokens,
    )
    template = ChatTemplate.from_source(source) if source.chat_template else None
    is_batch_invariant = ops.is_batch_invariant and fmt.is_batch_invariant and weights.is_recordable
    return BuiltModel(
        parts, spec, served, tokenizer, template, is_batch_invariant, snapshots, config.memory.snapshot_bytes
    )


def choose_format(options: ModelOptions, checkpoint: Checkpoint, ops: Ops) -> QuantFormat:
    """Return the format to serve in; "auto" takes the one that fits the checkpoint best.

    Raises:
        UnsupportedFormat: an unknown format or group, one that the model's linears do not fit, or another than that of
            --quantized-weights.
    """
    asked = options.quantization
    if asked == Fp8Format.name and not multiplies_fp8(ops.device):
        logger.warning("--quantization fp8: %s multiplies no e4m3; weights are rounded to int8 instead", ops.device)
        asked = Int8Format.name
    name, accepted = select_format(StoredWeights.of(checkpoint), asked, options.quantization_group)
    if asked not in ("auto", name):
        logger.info("--quantization %s: served as %s", asked, name)
    if options.quantized_weights is not None and accepted.fit < Fit.EXACT:
        raise UnsupportedFormat(f"{_OWN_FORMAT}: leave out --quantization and --quantization-group")
    if accepted.fit == Fit.REFUSED:
        raise UnsupportedFormat(f"--quantization {name}: {accepted.reason}")
    return get_format(name, ops, accepted.group, keep_int8_codes=accepted.keep_int8_codes)


def make_ops(options: ModelOptions, spec: ModelSpec, device: torch.device) -> Ops:
    """Return the kernels that `options` name.

    Raises:
        KernelsUnavailable: they cannot run on this machine.
    """
    pays = spec.hidden_size >= PROBED_WIDTH and operations(spec).token <= MAX_COPIES_SHARE * free_bytes()
    copies = options.bf16_linears == "auto" and pays
    return Ops(device, None if options.kernels == "auto" else options.kernels, copies=copies)


def _ops(
    options: ModelOptions,
    spec: ModelSpec,
    device: torch.device,
    adapter_dtype: torch.dtype,
    kv_format: KVFormat,
    progress: Progress,
) -> Ops:
    try:
        ops = make_ops(options, spec, device)
        ops.warm_up(adapter_dtype, kv_format, progress)
        return ops
    except KernelsUnavailable as error:
        raise ConfigError(f"--kernels: {error}; use --kernels auto or torch") from error


def _max_model_len(wanted: int | None, spec: ModelSpec) -> int:
    if wanted is not None and wanted > spec.max_position:
        why = ": longrope is served within the original context only" if spec.rope.max_position else ""
        raise ConfigError(f"--max-model-len {wanted} is more than the {spec.max_position} that the model supports{why}")
    return wanted or spec.max_position


def _read_draft_heads(options: SpeculationOptions, spec: ModelSpec) -> HeadArrays:
    return () if options.draft_heads is None else read_heads(Path(options.draft_heads), spec.hidden_size)


def _page_bytes(spec: ModelSpec, kv_format: KVFormat) -> int:
    return kv_format.page_bytes(spec.num_kv_heads, spec.head_dim, PAGE_SIZE_TOKENS)


def _measured(plan: MemoryPlan, options: MemoryOptions, weight_bytes: int, device: torch.device) -> MemoryPlan:
    """Return the plan with the numbers of the loaded base."""
    memory = DeviceMemory.of(device)
    return replace(plan, free=memory.free + weight_bytes, base=weight_bytes, pool=pool_size(options, memory, plan.step))
