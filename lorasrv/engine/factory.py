"""Factory: build an engine's parts (model, memory, pool, scheduler) from options."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from adapter_store.host_cache import HostCache
from adapter_store.storage.snapshots import Facts, SnapshotFiles
from adapter_store.store import AdapterStore
from lorasrv.config import PAGE_SIZE_TOKENS, EngineConfig
from lorasrv.distributed.model_processes import ModelProcesses, start_processes
from lorasrv.engine.checked_model import CheckedModel
from lorasrv.engine.draft_rules import DraftRules
from lorasrv.engine.input_processor import InputProcessor
from lorasrv.engine.loaded_model import LoadedModel
from lorasrv.engine.parts import EngineParts
from lorasrv.errors import NotEnoughMemory
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.models.loader import Checkpoint
from lorasrv.models.quantization.served import ServedWeights
from lorasrv.models.spec import ModelSpec
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.speculation.drafter import Drafter
from lorasrv.speculation.drafters import make_drafters, model_names
from lorasrv.speculation.speculator import Speculator
from lorasrv.speculation_params import REJECTION
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.own_tokenizers import OwnTokenizers
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.adapter_source import HostAdapterStore
from lorasrv.worker.device import is_out_of_memory
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.draft_heads import DraftHeads, MedusaHeads
from lorasrv.worker.kv_identity import kv_identity, peer_identity, same_tokens
from lorasrv.worker.model_runner import DraftModel, ModelRunner
from lorasrv.worker.weights import Progress, silent


@dataclass(frozen=True)
class BuiltModel:
    """Hold a loaded model and what its checkpoint describes."""

    parts: EngineParts
    # Makes requests for an engine of these parts.
    input_processor: InputProcessor
    spec: ModelSpec
    # Format of the base's weights.
    weights: ServedWeights
    tokenizer: Tokenizer
    # Tokenizers of adapters with tokens of their own; None without a store.
    own_tokenizers: OwnTokenizers | None
    chat_template: ChatTemplate | None
    # Whether a request's result is bit-identical alone and in any batch.
    is_batch_invariant: bool
    # Equal for engines that answer a request with the same tokens; empty if the tokens depend on the batch.
    fingerprint: str
    # Snapshots of the store; None without a store.
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
        EngineDead: a process that loads a part of the model has ended.
    """
    progress = progress or silent
    with _reporting_memory(), ExitStack() as opened, ExitStack() as on_failure:
        model = CheckedModel.of(checkpoint, config, progress)
        if model.draft is not None:
            opened.callback(model.draft.close)
        plan = model.plan_memory()
        processes = start_processes(config, model.spec, model.device, model.kv_format)
        on_failure.callback(processes.close)
        loaded = LoadedModel.load(model, processes, progress)
        plan = plan.measured(config.memory, loaded.nbytes, model.device, loaded.others)
        plan.check()
        layout = _layout(model, loaded, processes, plan.pool)
        built = _build(model, loaded, processes, layout, store, drafters, progress)
        on_failure.pop_all()
        return built


@contextmanager
def _reporting_memory() -> Iterator[None]:
    """Report that the device or the host ran out of memory, which nothing before could foresee.

    Raises:
        NotEnoughMemory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise NotEnoughMemory(
            "the memory does not suffice for loading the model and computing the largest step; choose a smaller "
            f"--pool-bytes, --max-num-batched-tokens or --model: {str(error).partition('. ')[0]}"
        ) from error


def _build(
    model: CheckedModel,
    loaded: LoadedModel,
    processes: ModelProcesses,
    layout: PoolLayout,
    store: AdapterStore | None,
    drafters: Sequence[Drafter] | None,
    progress: Progress,
) -> BuiltModel:
    """Build the parts that need loaded weights and a pool of this layout."""
    config, spec, drafting = model.config, model.spec, model.config.speculation
    adapters = None
    if store is not None:
        cache: HostCache[PackedAdapter] = HostCache(config.memory.host_cache_bytes)
        load_kernels = partial(model.ops.load_kernels_of, dtype=model.dtype)
        adapters = processes.adapters(store, cache, loaded.weights, model.dtype, load_kernels)
    snapshots = store.snapshots if store is not None and config.memory.snapshot_bytes else None
    if snapshots is not None:
        snapshots.trim(config.memory.snapshot_bytes)
    sizes = (layout.page_size, layout.page_bytes, layout.num_slabs, layout.elsewhere_bytes)
    identity = kv_identity(loaded.weights, model.fmt, config.model, model.ops, model.kv_format, sizes, loaded.draft)
    memory = _memory(model, processes, layout, adapters, snapshots, identity)
    pool = _pool(model, loaded.weights.spec, layout)
    models = model_names(drafting) if processes.can_draft else []
    runner = _runner(model, loaded, processes, pool, _draft_heads(model, models, adapters))
    has_trees = drafting.draft_trees or drafting.lookahead is not None
    max_rank = config.memory.max_lora_rank
    runner.warm_up(max_rank, progress, processes.warming_up(max_rank, has_trees=has_trees), has_trees=has_trees)
    made = make_drafters(drafting) if drafters is None else drafters
    speculator = Speculator(made, spec.vocab_size, models=models, makes_trees=drafting.draft_trees)
    parts = EngineParts(
        memory=memory,
        scheduler=Scheduler(config.scheduler, memory, frozenset(spec.eos_token_ids), speculator),
        executor=processes.executor(runner),
        source=adapters,
        max_model_len=model.max_model_len,
        weight_bytes=loaded.nbytes,
        pool_bytes=pool.nbytes + layout.num_pages * layout.elsewhere_bytes,
    )
    own_tokenizers = OwnTokenizers(model.tokenizer, store.added_tokens.of) if store is not None else None
    names = frozenset((*(drafter.name for drafter in made), *models))
    inputs = _inputs(model, processes, parts, own_tokenizers, names)
    of_kernels = model.ops.is_batch_invariant and model.fmt.is_batch_invariant and loaded.weights.is_recordable
    is_batch_invariant = of_kernels and not drafting.draft_trees
    source = model.tokenizer_source
    return BuiltModel(
        parts=parts,
        input_processor=inputs,
        spec=spec,
        weights=loaded.served,
        tokenizer=model.tokenizer,
        own_tokenizers=own_tokenizers,
        chat_template=ChatTemplate.from_source(source) if source.chat_template else None,
        is_batch_invariant=is_batch_invariant,
        fingerprint=same_tokens(identity) if is_batch_invariant else "",
        snapshots=snapshots,
        max_snapshot_bytes=config.memory.snapshot_bytes,
    )


def _layout(model: CheckedModel, loaded: LoadedModel, processes: ModelProcesses, pool_bytes: int) -> PoolLayout:
    """Return the layout of a pool of `pool_bytes`, which include the pools of the draft model and other ranks."""

    def page_bytes(num_kv_heads: int, head_dim: int) -> int:
        return model.kv_format.page_bytes(num_kv_heads, head_dim, PAGE_SIZE_TOKENS)

    own = page_bytes(processes.num_kv_heads, model.spec.head_dim)
    elsewhere = own * processes.slabs_elsewhere
    if loaded.draft is not None:
        draft = loaded.draft.spec
        elsewhere += page_bytes(draft.num_kv_heads, draft.head_dim) * draft.num_slabs
    return PoolLayout.of_bytes(pool_bytes, own, PAGE_SIZE_TOKENS, loaded.weights.spec.num_slabs, elsewhere)


def _memory(
    model: CheckedModel,
    processes: ModelProcesses,
    layout: PoolLayout,
    adapters: HostAdapterStore | None,
    snapshots: SnapshotFiles | None,
    identity: Facts,
) -> MemoryManager:
    """Return the accounts of an empty pool; pages are bit-identical on servers with equal `identity`."""
    return MemoryManager.make(
        layout,
        model.config.memory,
        model.config.scheduler.preemption_mode,
        adapters.is_on_host if adapters else lambda _: False,
        facts=identity if snapshots is not None else None,
        stored=snapshots.sizes() if snapshots is not None else {},
        peer_facts=peer_identity(identity) if processes.can_lend_pages else None,
    )


def _pool(model: CheckedModel, spec: ModelSpec, layout: PoolLayout) -> DevicePool:
    """Return the pool of the layers that this process computes."""
    return DevicePool(
        spec, layout.num_pages, layout.page_size, model.kv_format, model.device, page_bytes=layout.page_bytes
    )


def _inputs(
    model: CheckedModel,
    processes: ModelProcesses,
    parts: EngineParts,
    own_tokenizers: OwnTokenizers | None,
    drafters: frozenset[str],
) -> InputProcessor:
    """Return the input processor for these parts and for drafters with these names."""
    config = model.config
    return InputProcessor(
        parts.memory,
        parts.source,
        model.max_model_len,
        model.spec.vocab_size,
        model.tokenizer,
        own_tokenizers=own_tokenizers,
        eos_token_ids=model.spec.eos_token_ids,
        watermark=config.watermark,
        poison=parts.poison,
        drafts=DraftRules(
            may_reject=config.speculation.accept == REJECTION,
            num_draft_heads=len(model.draft_heads),
            drafters=drafters,
        ),
        step_tokens=model.limits.max_rows,
        why_no_policy=processes.why_no_policy,
    )


def _draft_heads(model: CheckedModel, models: Sequence[str], adapters: HostAdapterStore | None) -> DraftHeads | None:
    """Return the Medusa heads of base and adapters; None if none draft."""
    if "medusa" not in models:
        return None
    activation, max_bytes = model.limits.activation, model.config.speculation.draft_head_bytes
    base = MedusaHeads.of(model.draft_heads, activation, model.device) if model.draft_heads else None
    read = adapters.draft_heads if adapters is not None and max_bytes else None
    return DraftHeads(base, read, max_bytes, activation, model.device)


def _runner(
    model: CheckedModel, loaded: LoadedModel, processes: ModelProcesses, pool: DevicePool, heads: DraftHeads | None
) -> ModelRunner:
    """Return the runner of this process's part of every step, and have the other processes make their pools."""
    draft = None
    if loaded.draft is not None:
        draft_pool = DevicePool(loaded.draft.spec, pool.num_pages, pool.page_size, model.kv_format, model.device)
        draft = DraftModel(loaded.draft, draft_pool)
    exchange = processes.open(pool, model.limits, model.ops)
    return ModelRunner(loaded.weights, pool, model.limits, model.ops, draft, model.draft_layers, heads, exchange)
