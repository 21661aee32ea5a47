"""Replacement of the engine in a registry, a server that keeps a store and answers no prompts.

Its tokenizer, chat template and grammars, which check adapters and personas, are real; it refuses all computation.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn, Self

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import NO_SHARE, Limits, LimitShare, ModelOptions, SchedulerOptions
from lorasrv.engine.backpressure import QueueLimiter
from lorasrv.engine.in_flight_requests import InFlightRequests
from lorasrv.engine.messages import AdapterStatus
from lorasrv.engine.watchdog import Heartbeat
from lorasrv.errors import EngineDead, NoEngine
from lorasrv.metrics.engine_stats import EngineMetrics, EngineStats
from lorasrv.metrics.request_stats import RequestStats
from lorasrv.metrics.step_stats import StepProfile, StepStats
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.checkpoint import Checkpoint
from lorasrv.models.quantization.served import ServedWeights
from lorasrv.outputs import AdapterTier
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.own_tokenizers import OwnTokenizers
from lorasrv.text.structured_output.compiler import GrammarCompiler
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.disk_threads import DiskReadStats

NO_WEIGHTS = "none"
_PAGE_TOKENS = 16


class StoreEngine:
    """Implement `ServedEngine` without computing anything.

    Args:
        checkpoint: the base model against which adapters and personas are checked.
        max_model_len: most tokens of prompt and answer together; None: the base's limit.
        store: the adapters, which may have their own tokens.
    """

    def __init__(
        self, checkpoint: Checkpoint, max_model_len: int | None = None, store: AdapterStore | None = None
    ) -> None:
        source, spec = checkpoint.tokenizer_source(), checkpoint.spec
        self.model_name, self.spec = checkpoint.name, spec
        self.weights = ServedWeights(NO_WEIGHTS)
        self.quantization = NO_WEIGHTS
        self.is_batch_invariant = True
        self.max_model_len = max_model_len or spec.max_position
        self.page_size_tokens = _PAGE_TOKENS
        self.tokenizer = Tokenizer.from_source(source)
        self._own_tokenizers = None if store is None else OwnTokenizers(self.tokenizer, store.added_tokens.of)
        self.chat_template = ChatTemplate.from_source(source) if source.chat_template else None
        self.grammars = GrammarCompiler(self.tokenizer, spec.vocab_size, frozenset(spec.eos_token_ids))
        self.metrics, self.heartbeat = EngineMetrics(EngineStats()), Heartbeat()
        self.profile, self.step_stats = StepProfile(), StepStats()
        self.queue_limiter = QueueLimiter(SchedulerOptions(), self.metrics.stats)
        self.in_flight = InFlightRequests(lambda *_: None)
        self.request_stats = self.observers = RequestStats()
        self.is_alive = False
        self.error: str | None = None
        self.silence: str | None = None

    @classmethod
    def build(cls, options: ModelOptions, store: AdapterStore) -> Self:
        """Read a checkpoint's tokenizer and shapes, but no weights.

        Raises: ModelError.
        """
        checkpoint = open_checkpoint(options.model, options.load_format)
        try:
            return cls(checkpoint, options.max_model_len, store)
        finally:
            checkpoint.close()

    async def start(self) -> None:
        self.is_alive = True

    async def warmed(self) -> None:
        """Do nothing: nothing is computed."""

    async def shutdown(self) -> None:
        self.is_alive = False

    def abort_all(self, why: str, kind: type[EngineDead] = EngineDead) -> None:
        self.error = why

    def disk_reads(self) -> DiskReadStats:
        return DiskReadStats()

    async def set_limits(self, adapter_id: str, limits: Limits | None) -> None:
        """Do nothing: the followers apply limits."""

    async def set_share(self, adapter_id: str, share: LimitShare) -> LimitShare:
        """Return `NO_SHARE`: nothing is used."""
        return NO_SHARE

    async def own_tokenizer(self, adapter: AdapterKey | None) -> Tokenizer | None:
        """Return the tokenizer of an adapter, as `AsyncEngine.own_tokenizer`."""
        return None if self._own_tokenizers is None else await asyncio.to_thread(self._own_tokenizers.of, adapter)

    async def unpin(self, adapter: AdapterKey) -> AdapterStatus:
        """Return the adapter's tier: disk, since nothing is pinned."""
        return AdapterStatus(AdapterTier.DISK)

    async def forget_answers(self, adapter: AdapterKey | None = None, salt: str | None = None) -> None:
        """Do nothing: no answers are kept."""

    async def find_snapshot(self, adapter: AdapterKey | None, prefix: object, token_ids: Sequence[int]) -> None:
        """Return None: there are no snapshots."""

    async def tier(self, adapter: AdapterKey) -> AdapterTier:
        return AdapterTier.DISK

    async def residents(self) -> list[tuple[AdapterKey, int]]:
        return []

    def check_computes(self, without: str) -> None:
        """Refuse a request that only a server with an engine can answer.

        Raises: NoEngine.
        """
        raise NoEngine(f"this server is a registry, which answers no prompts and so {without}")

    def check_admission(self, principal: str) -> None:
        """Refuse a request before any work is done for it.

        Raises: NoEngine.
        """
        _refuse()

    @property
    def fingerprint(self) -> NoReturn:
        _refuse()

    @property
    def pages(self) -> NoReturn:
        _refuse()

    async def add_choices(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    async def warm(self, adapter: AdapterKey, deadline_s: float) -> NoReturn:
        _refuse()

    async def pin(self, adapter: AdapterKey) -> NoReturn:
        _refuse()

    async def make_snapshot(self, *_: Any) -> NoReturn:
        _refuse()

    async def pool_map(self) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise NoEngine("this server is a registry: it keeps adapters and answers no prompts; ask a server that follows it")
