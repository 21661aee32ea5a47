"""The synchronous heart: add, abort, step. No asyncio, no threads, no text.

Everything in here belongs to the one thread that calls `step`; loads run wherever the `Loader` runs them.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from adapter_store.spec import AdapterKey
from lorasrv.adapter_cache import AdapterCache
from lorasrv.adapter_loader import AdapterSource, Loader
from lorasrv.adapter_pack import PackedAdapter
from lorasrv.errors import ContextLengthExceeded, InvalidRequest
from lorasrv.kv_cache import KVCacheManager
from lorasrv.metrics import EngineMetrics, EngineSnapshot
from lorasrv.model_runner import ModelRunner
from lorasrv.page_pool import PagePool
from lorasrv.request import AdapterTier, AddRequest, EngineOutput, RequestId, RequestStatus, SamplingParams
from lorasrv.scheduler import Scheduler
from lorasrv.step import SchedulerOutput


@dataclass(frozen=True)
class EngineParts:
    """What an engine is put together from; `lorasrv.build` makes them."""

    pool: PagePool
    kv: KVCacheManager
    adapters: AdapterCache
    scheduler: Scheduler
    runner: ModelRunner
    source: AdapterSource | None
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    pool_bytes: int


class Engine:
    """One model, one pool, one batch after another."""

    def __init__(self, parts: EngineParts, loader: Loader | None) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._loader = loader
        self._arrived: dict[AdapterKey, PackedAdapter] = {}
        self._steps = self._loads = self._load_failures = 0
        self._last_step_s = 0.0
        self._made_progress = False
        self.metrics = EngineMetrics(self._snapshot())

    @property
    def has_requests(self) -> bool:
        """Whether somebody still waits for an answer."""
        return self._scheduler.has_requests

    @property
    def made_progress(self) -> bool:
        """Whether the last step changed anything; if not, only a message or a load can."""
        return self._made_progress

    def max_new_tokens(self, num_prompt_tokens: int, adapter: AdapterKey | None) -> int:
        """The rest of the context, or of the pool if that is smaller; at least one. Safe to call from any thread."""
        pages = self._parts.pool.num_pages - self._adapter_pages(adapter)
        room = min(self._parts.max_model_len, pages * self._parts.kv.page_size)
        return max(1, room - num_prompt_tokens)

    def admit(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: AdapterKey | None,
        principal: str = "anonymous",
    ) -> AddRequest:
        """The message for `add_request`, or a refusal. Safe to call from any thread.

        `max_tokens` None takes the rest of the context or of the pool; a random request gets a seed.
        Raises:
            InvalidRequest: the prompt is empty or names a token that does not exist.
            ContextLengthExceeded: it can never fit.
        """
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if not all(0 <= t < self._parts.vocab_size for t in token_ids):
            raise InvalidRequest(f"token ids must lie in [0, {self._parts.vocab_size})", param="prompt")
        max_tokens = sampling.max_tokens or self.max_new_tokens(len(token_ids), adapter)
        self.check_fits(len(token_ids), max_tokens, adapter)
        if sampling.seed is None and not sampling.is_greedy:
            sampling = replace(sampling, seed=secrets.randbits(63))
        return AddRequest(request_id, tuple(token_ids), max_tokens, sampling, adapter, principal)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int, adapter: AdapterKey | None) -> None:
        """Refuse a request that could never run, however empty the pool. Safe to call from any thread.

        Raises:
            ContextLengthExceeded: with the numbers.
            InvalidRequest: it names an adapter, but there is no store.
        """
        total = num_prompt_tokens + max_tokens
        if total > self._parts.max_model_len:
            raise ContextLengthExceeded(
                f"the context holds {self._parts.max_model_len} tokens, but the request asks for {total}: "
                f"{num_prompt_tokens} of the prompt and {max_tokens} to generate (max_tokens)",
                param="max_tokens" if num_prompt_tokens < self._parts.max_model_len else "messages",
            )
        kv_pages = self._parts.kv.pages_for(total)
        adapter_pages = self._adapter_pages(adapter)
        if kv_pages + adapter_pages > self._parts.pool.num_pages:
            raise ContextLengthExceeded(
                f"the pool has {self._parts.pool.num_pages} pages, but the request needs {kv_pages + adapter_pages}: "
                f"{kv_pages} for {total} tokens and {adapter_pages} for the adapter; lower max_tokens "
                "or start the server with a larger --pool-bytes",
                param="max_tokens",
            )

    def add_request(self, message: AddRequest) -> None:
        """Queue a request that `check_fits` has passed."""
        key, source = message.adapter_key, self._parts.source
        if key is None:
            self._scheduler.add(message)
            return
        assert source is not None, "check_fits refuses adapters without a store"
        packed = source.cached(key)
        self._scheduler.add(message, AdapterTier.DISK if packed is None else AdapterTier.HOST)
        if packed is not None:
            self._arrived[key] = packed
            self._scheduler.adapter_loaded(key, packed.layout)

    def abort(self, request_id: RequestId) -> None:
        """End a request before the next step; nothing happens if it has ended."""
        self._scheduler.end(request_id, RequestStatus.FINISHED_ABORTED)

    def stop(self, request_id: RequestId) -> None:
        """As `abort`, of a request whose text has met a stop string."""
        self._scheduler.end(request_id, RequestStatus.FINISHED_STOPPED)

    def step(self) -> list[EngineOutput]:
        """Compute one batch, and say what it brought for each request."""
        self._take_loads()
        step = self._scheduler.schedule()
        self._begin_loads(step.loads)
        output = self._parts.runner.run(step, self._arrived)
        outputs = self._scheduler.update_from_output(step, output.sampled)
        self._finish_step(step)
        return outputs

    def check_integrity(self) -> None:
        """Every page and pin has its holder. Raises AssertionError if not."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def _adapter_pages(self, adapter: AdapterKey | None) -> int:
        if adapter is None:
            return 0
        if self._parts.source is None:
            raise InvalidRequest("this engine has no store of adapters", param="adapter_id")
        return self._parts.adapters.pages_for(self._parts.source.layout(adapter))

    def _take_loads(self) -> None:
        for result in self._loader.poll() if self._loader is not None else ():
            if result.packed is None:
                self._load_failures += 1
                self._scheduler.adapter_failed(result.key, result.error or "loading the adapter failed")
            else:
                self._loads += 1
                self._arrived[result.key] = result.packed
                self._scheduler.adapter_loaded(result.key, result.packed.layout)

    def _begin_loads(self, keys: tuple[AdapterKey, ...]) -> None:
        for key in keys:
            assert self._loader is not None
            self._loader.submit(key)

    def _finish_step(self, step: SchedulerOutput) -> None:
        for key in self._arrived.keys() - self._scheduler.on_host:
            del self._arrived[key]
        self._made_progress = bool(step.scheduled) or step.num_preempted > 0
        self._steps += bool(step.scheduled)
        self._last_step_s = time.monotonic()
        self.metrics.publish(self._snapshot())

    def _snapshot(self) -> EngineSnapshot:
        parts, scheduler, counters = self._parts, self._scheduler, self._scheduler.counters
        return EngineSnapshot(
            requests_running=scheduler.num_running,
            requests_waiting=scheduler.num_waiting,
            requests_waiting_for_adapter=scheduler.num_waiting_for_adapter,
            pages_total=parts.pool.num_pages,
            pages_free=parts.pool.num_free,
            pages_kv=parts.kv.num_pages,
            pages_adapters=parts.adapters.num_pages,
            adapters_resident=len(parts.adapters),
            steps_total=self._steps,
            prompt_tokens_total=counters.prompt_tokens,
            generated_tokens_total=counters.generated_tokens,
            requests_finished_total=dict(counters.finished),
            preemptions_total=counters.preemptions,
            adapter_loads_total=self._loads,
            adapter_load_failures_total=self._load_failures,
            adapter_evictions_total=parts.adapters.num_evictions,
            last_step_s=self._last_step_s,
            weight_bytes=parts.weight_bytes,
            pool_bytes=parts.pool_bytes,
            host_cache_bytes=parts.source.host_cache_bytes if parts.source is not None else 0,
        )
