"""Declare the interface through which a server uses its engine."""

from collections.abc import AsyncIterator, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from adapter_store.spec import AdapterKey
from api.replication.share_holder import SharingEngine
from api.serving.adapter_limits import LimitingEngine
from api.serving.admission import AdmittingEngine
from api.serving.fixed_prefixes import PrefixEngine
from lorasrv.engine.backpressure import QueueLimiter
from lorasrv.engine.messages import AdapterStatus, SnapshotStatus
from lorasrv.engine.pool_map import PoolMap
from lorasrv.engine.watchdog import WatchedEngine
from lorasrv.errors import EngineDead
from lorasrv.metrics.engine_stats import EngineMetrics
from lorasrv.metrics.request_observer import RequestObserver
from lorasrv.metrics.step_stats import StepProfile
from lorasrv.metrics.usage_ledger import LedgerEngine
from lorasrv.outputs import AdapterTier, RequestOutput
from lorasrv.request import NO_OPTIONS, FixedPrefix, RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.disk_threads import DiskReadStats

if TYPE_CHECKING:
    from lorasrv.engine.page_lender import PageLender
    from lorasrv.engine.request_stream import RequestStream
    from lorasrv.models.quantization.served import ServedWeights
    from lorasrv.text.structured_output.compiler import GrammarCompiler


class ServedEngine(AdmittingEngine, LedgerEngine, LimitingEngine, PrefixEngine, SharingEngine, WatchedEngine, Protocol):
    """Declare the interface through which a server uses its engine. Members are documented in `AsyncEngine`.

    `StoreEngine` implements it for a registry, and refuses all computation.
    """

    model_name: str
    weights: "ServedWeights"
    quantization: str
    is_batch_invariant: bool
    grammars: "GrammarCompiler"
    metrics: EngineMetrics
    profile: StepProfile
    queue_limiter: QueueLimiter

    @property
    def fingerprint(self) -> str: ...

    @property
    def observers(self) -> RequestObserver: ...

    @property
    def pages(self) -> "PageLender": ...

    @property
    def silence(self) -> str | None: ...

    async def start(self) -> None: ...

    async def warmed(self) -> None: ...

    async def shutdown(self) -> None: ...

    def abort_all(self, why: str, kind: type[EngineDead] = EngineDead) -> None: ...

    def disk_reads(self) -> DiskReadStats: ...

    def check_computes(self, without: str) -> None: ...

    async def add_choices(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        count: int,
        options: RequestOptions = NO_OPTIONS,
        *,
        request_id: str | None = None,
        versions: Collection[tuple[str, int]] = (),
    ) -> "list[RequestStream]": ...

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]: ...

    async def warm(self, adapter: AdapterKey, deadline_s: float) -> AdapterStatus: ...

    async def pin(self, adapter: AdapterKey) -> AdapterStatus: ...

    async def unpin(self, adapter: AdapterKey) -> AdapterStatus: ...

    async def forget_answers(self, adapter: AdapterKey | None = None, salt: str | None = None) -> None: ...

    async def make_snapshot(
        self, adapter: AdapterKey | None, prefix: FixedPrefix, token_ids: tuple[int, ...]
    ) -> SnapshotStatus: ...

    async def find_snapshot(
        self, adapter: AdapterKey | None, prefix: FixedPrefix, token_ids: tuple[int, ...]
    ) -> SnapshotStatus | None: ...

    async def tier(self, adapter: AdapterKey) -> AdapterTier: ...

    async def pool_map(self) -> PoolMap: ...
