"""Parts of an engine: those that compute and those that do the accounting."""

from dataclasses import dataclass, field

from lorasrv.engine.poison_requests import PoisonGuard
from lorasrv.memory.memory_manager import MemoryManager
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
    weight_bytes: int
    pool_bytes: int
    # Requests that have made the engine fail.
    poison: PoisonGuard = field(default_factory=PoisonGuard)
