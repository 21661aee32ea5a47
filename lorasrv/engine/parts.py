"""Parts of an engine: what it computes with and what it accounts in."""

from dataclasses import dataclass

from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.sampling_params import Watermark
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.worker.adapter_source import HostAdapterStore
from lorasrv.worker.executor import Executor


@dataclass(frozen=True)
class EngineParts:
    """Hold what an engine is made of; `lorasrv.engine.factory` builds it."""

    memory: MemoryManager
    scheduler: Scheduler
    executor: Executor
    source: HostAdapterStore | None
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    pool_bytes: int
    eos_token_ids: frozenset[int] = frozenset()
    watermark: Watermark | None = None
    # Whether requests without a seed are accepted by rejection sampling.
    may_reject: bool = False
    # Tokens that the base's Medusa heads draft.
    num_draft_heads: int = 0
    # Names of those that the server has.
    drafters: frozenset[str] = frozenset()
    # Tokens of the largest step.
    step_tokens: int = 1
