"""Factory: build an engine's parts (model, memory, pool, scheduler) from options."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adapter_store.formats.weights import HeadArrays
from adapter_store.host_cache import HostCache
from adapter_store.storage.snapshots import SnapshotFiles
from adapter_store.store import AdapterStore
from lorasrv.config import PAGE_SIZE_TOKENS, EngineConfig, MemoryOptions, ModelOptions, SpeculationOptions
from lorasrv.distributed.executor import PartitionedExecutor
from lorasrv.distributed.part_checkpoint import PartCheckpoint
from lorasrv.distributed.partition import Partition
from lorasrv.distributed.rank0 import LoadedRanks, PartitionedReplica, ProcessLauncher
from lorasrv.distributed.rank_adapters import SharedAdapterStore
from lorasrv.engine.draft_model import load_draft_weights, open_draft_model
from lorasrv.engine.draft_rules import DraftRules
from lorasrv.engine.input_processor import InputProcessor
from lorasrv.engine.memory_plan import MemoryPlan, pool_size
from lorasrv.engine.parts import EngineParts
from lorasrv.errors import ConfigError
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.models.loader import Checkpoint, WeightMeter
from lorasrv.models.quantization.served import ServedWeights
from lorasrv.models.spec import ModelSpec
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.speculation.drafter import Drafter
from lorasrv.speculation.drafters import draft_layers, make_drafters, model_names
from lorasrv.speculation.speculator import Speculator
from lorasrv.speculation_params import REJECTION
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.own_tokenizers import OwnTokenizers
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.adapter_source import HostAdapterStore
from lorasrv.worker.base_format import choose_format, make_ops
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device import DeviceMemory, activation_dtype, resolve_device
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.draft_heads import DraftHeads, MedusaHeads, read_heads
from lorasrv.worker.executor import Executor, LaunchingExecutor, ThreadedExecutor
from lorasrv.worker.kv_identity import kv_identity, peer_identity, same_tokens
from lorasrv.worker.model_runner import DraftModel, ModelRunner
from lorasrv.worker.weights import ModelWeights, load_weights, served_error, silent
from sgmv_kernels.backend import KernelsUnavailable
from sgmv_kernels.formats.kv_format import KVFormat, get_kv_format
from sgmv_kernels.ops import Ops

logger = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
"""Called with the current activity and its progress from 0 to 1."""


@dataclass(frozen=True)
class BuiltModel:
    """Hold a loaded model and what its checkpoint describes."""

    parts: EngineParts
    # Makes the requests of an engine of these parts.
    input_processor: InputProcessor
    spec: ModelSpec
    # The format that its weights are in.
    weights: ServedWeights
    tokenizer: Tokenizer
    # Those of adapters with tokens of their own; None without a store.
    own_tokenizers: OwnTokenizers | None
    chat_template: ChatTemplate | None
    # Whether a request's result is the same alone and in any batch, to the bit.
    is_batch_invariant: bool
    # Equal for engines that answer a request in the same tokens; empty where these depend on the batch.
    fingerprint: str
    # Those of the store; None without one.
    snapshots: SnapshotFiles | None = None
    max_snapshot_bytes: int = 0


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
    with ExitStack() as on_failure:
        built = _build(checkpoint, config, store, progress or silent, drafters, on_failure)
        on_failure.pop_all()
        return built


def _build(
    checkpoint: Checkpoint,
    config: EngineConfig,
    store: AdapterStore | None,
    progress: Progress,
    drafters: Sequence[Drafter] | None,
    on_failure: ExitStack,
) -> BuiltModel:
    spec = checkpoint.spec
    device = resolve_device(config.model.device)
    dtype = getattr(torch, config.model.dtype)
    kv_format = get_kv_format(config.memory.kv_cache_dtype, config.model.dtype)
    max_model_len = _max_model_len(config.model.max_model_len, spec)
    ops = _ops(config.model, spec, device, dtype, kv_format, progress)
    # Before the weights, which take long: what can be refused is refused here.
    source = checkpoint.tokenizer_source()
    tokenizer = Tokenizer.from_source(source)
    fmt = choose_format(config.model, checkpoint, ops)
    drafting = open_draft_model(config, tokenizer, spec.vocab_size, max_model_len)
    draft_spec = None if drafting is None else drafting.spec
    layers = draft_layers(spec.num_layers, config.speculation.draft_layers, spec.kv_source_layers)
    base_heads = _read_draft_heads(config.speculation, spec)
    plan = MemoryPlan.of(config, spec, fmt.name, device, checkpoint.packing, draft_spec)
    plan.check()
    if warning := plan.warning():
        logger.warning(warning)
    replica = _start_ranks(config, spec, device, kv_format)
    if replica is not None:
        on_failure.callback(replica.close)
    own = checkpoint if replica is None else PartCheckpoint(checkpoint, replica.spec)
    weights = load_weights(own, fmt, dtype, WeightMeter(), progress, device)
    bits, error = weights.bits_per_weight, served_error(own, weights)
    others = LoadedRanks() if replica is None else replica.wait_loaded(progress)
    weights = others.join(weights)
    served = ServedWeights(fmt.name, checkpoint.packing, weights.kept_codes, weights.remade_codes, bits, error)
    if line := served.line():
        logger.log(logging.INFO if served.is_exact else logging.WARNING, "%s", line)
    draft = None if drafting is None else load_draft_weights(drafting, config.model, ops, device, progress)
    weight_bytes = weights.nbytes + sum(others.weight_bytes) + (0 if draft is None else draft.nbytes)
    plan = _measured(plan, config.memory, weight_bytes, device)
    plan.check()
    page_bytes = _page_bytes(spec, kv_format) if replica is None else replica.page_bytes
    elsewhere = 0 if draft is None else _page_bytes(draft.spec, kv_format) * draft.spec.num_slabs
    elsewhere += 0 if replica is None else sum(map(replica.block_bytes, range(1, len(replica.specs))))
    geometry = PoolLayout.of_bytes(plan.pool, page_bytes, PAGE_SIZE_TOKENS, weights.spec.num_slabs, elsewhere)
    device_pool = DevicePool(
        weights.spec, geometry.num_pages, geometry.page_size, kv_format, device, page_bytes=page_bytes
    )
    draft_model = None
    if draft is not None:
        draft_pool = DevicePool(draft.spec, geometry.num_pages, geometry.page_size, kv_format, device)
        draft_model = DraftModel(draft, draft_pool)
    adapters = None if store is None else _adapters(store, config.memory, weights, dtype, replica)
    snapshots = store.snapshots if store is not None and config.memory.snapshot_bytes else None
    sizes = (geometry.page_size, geometry.page_bytes, geometry.num_slabs, geometry.elsewhere_bytes)
    identity = kv_identity(weights, fmt, config.model, ops, kv_format, sizes, draft)
    memory = MemoryManager.make(
        geometry,
        config.memory,
        config.scheduler.preemption_mode,
        adapters.is_on_host if adapters else lambda _: False,
        facts=identity if snapshots is not None else None,
        stored=snapshots.sizes() if snapshots is not None else {},
        # Pages of several ranks can be read by the engine's thread alone, and lent ones are read beside it.
        peer_facts=peer_identity(identity) if replica is None else None,
    )
    rows, samples = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    limits = DecoderLimits(max_model_len, rows, samples, dtype, activation_dtype(device, dtype))
    models = model_names(config.speculation) if replica is None else []
    made = make_drafters(config.speculation) if drafters is None else drafters
    heads = None
    if "medusa" in models:
        base = MedusaHeads.of(base_heads, limits.activation, device) if base_heads else None
        max_bytes = config.speculation.draft_head_bytes
        read = adapters.draft_heads if adapters is not None and max_bytes else None
        heads = DraftHeads(base, read, max_bytes, limits.activation, device)
    exchange = None if replica is None else replica.open(device_pool, limits, ops)
    runner = ModelRunner(weights, device_pool, limits, ops, draft_model, layers, heads, exchange)
    has_trees = config.speculation.draft_trees or config.speculation.lookahead is not None
    runner.warm_up(config.memory.max_lora_rank, progress, has_trees=has_trees)
    parts = EngineParts(
        memory=memory,
        scheduler=Scheduler(
            config.scheduler,
            memory,
            frozenset(spec.eos_token_ids),
            Speculator(
                made,
                spec.vocab_size,
                models=models,
                makes_trees=config.speculation.draft_trees,
            ),
        ),
        executor=_executor(runner, device, replica),
        source=adapters,
        max_model_len=max_model_len,
        weight_bytes=weight_bytes,
        pool_bytes=device_pool.nbytes + geometry.num_pages * geometry.elsewhere_bytes,
    )
    own_tokenizers = OwnTokenizers(tokenizer, store.added_tokens.of) if store is not None else None
    inputs = InputProcessor(
        memory,
        adapters,
        max_model_len,
        spec.vocab_size,
        tokenizer,
        own_tokenizers=own_tokenizers,
        eos_token_ids=spec.eos_token_ids,
        watermark=config.watermark,
        poison=parts.poison,
        drafts=DraftRules(
            may_reject=config.speculation.accept == REJECTION,
            num_draft_heads=len(base_heads),
            drafters=frozenset((*(drafter.name for drafter in made), *models)),
        ),
        step_tokens=rows,
        why_no_policy=spec.why_no_kv_policy if replica is None else f"not with {replica.partition.text}",
    )
    template = ChatTemplate.from_source(source) if source.chat_template else None
    of_kernels = ops.is_batch_invariant and fmt.is_batch_invariant and weights.is_recordable
    is_batch_invariant = of_kernels and not config.speculation.draft_trees
    fingerprint = same_tokens(identity) if is_batch_invariant else ""
    return BuiltModel(
        parts,
        inputs,
        spec,
        served,
        tokenizer,
        own_tokenizers,
        template,
        is_batch_invariant,
        fingerprint,
        snapshots,
        config.memory.snapshot_bytes,
    )


def _start_ranks(
    config: EngineConfig, spec: ModelSpec, device: torch.device, kv_format: KVFormat
) -> PartitionedReplica | None:
    """Start the other processes of this replica; None if it has no others."""
    if Partition.of(config.partition).num_ranks == 1:
        return None
    return PartitionedReplica(config, spec, device, kv_format, ProcessLauncher)


def _adapters(
    store: AdapterStore,
    options: MemoryOptions,
    weights: ModelWeights,
    dtype: torch.dtype,
    replica: PartitionedReplica | None,
) -> HostAdapterStore:
    cache: HostCache[PackedAdapter] = HostCache(options.host_cache_bytes)
    if replica is None:
        return HostAdapterStore(store, cache, weights, dtype)
    return SharedAdapterStore(store, cache, weights, dtype, replica.pool_spec, replica.partition)


def _executor(runner: ModelRunner, device: torch.device, replica: PartitionedReplica | None) -> Executor:
    if replica is not None:
        return PartitionedExecutor(runner, replica)
    return LaunchingExecutor(runner) if device.type == "cuda" else ThreadedExecutor(runner)


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
