"""Async engine: one engine thread beside the event loop. They exchange only frozen messages without tensors.

`EngineThread` hands over the outputs of steps, which are turned into text here. Every accepted request ends exactly
once, even when the engine dies; an aborted one when its last output has come, so that all accounts of it agree.
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig, Limits, LimitShare, SchedulerOptions
from lorasrv.engine.async_input_processor import AsyncInputProcessor
from lorasrv.engine.backpressure import QueueLimiter
from lorasrv.engine.core import EngineCore
from lorasrv.engine.engine_thread import EngineThread
from lorasrv.engine.factory import BuiltModel, build
from lorasrv.engine.in_flight_requests import InFlightRequests
from lorasrv.engine.messages import (
    AdapterStatus,
    AddRequests,
    DescribePool,
    EndRequest,
    FindSnapshot,
    ForgetAnswers,
    GetAdapterTier,
    ListResidents,
    MakeSnapshot,
    Message,
    PinAdapter,
    SetLimits,
    SetShare,
    SnapshotStatus,
    UnpinAdapter,
    UtilityCall,
    UtilityRequest,
    UtilityResult,
    Wake,
    WarmAdapter,
)
from lorasrv.engine.output_processor import OutputProcessor
from lorasrv.engine.page_lender import PageLender
from lorasrv.engine.pool_map import PoolMap
from lorasrv.engine.request_stream import RequestStream
from lorasrv.engine.step_retry import FaultHook
from lorasrv.errors import EngineDead, EngineOverloaded, ServerStopping
from lorasrv.metrics.request_observer import RequestObserver, RequestObservers
from lorasrv.metrics.request_stats import RequestStats
from lorasrv.models.loader import open_checkpoint
from lorasrv.outputs import AdapterTier, EngineOutput, RequestId, RequestOutput
from lorasrv.request import NO_OPTIONS, EngineCoreRequest, FixedPrefix, RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.structured_output.compiler import GrammarCompiler
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.adapter_loader import ThreadedLoader
from lorasrv.worker.device import compute_alone
from lorasrv.worker.disk_threads import DiskReadStats
from lorasrv.worker.snapshot_loader import FetchPages, SnapshotLoader
from lorasrv.worker.weights import Progress

_LOG = logging.getLogger(__name__)
PIN_WAIT_S = 10.0


class AsyncEngine:
    """Serve one model to asyncio callers. Methods belong to the event loop's thread.

    Args:
        observers: told of every request, besides the engine's own: `request_stats`, `queue_limiter`, `in_flight`.
        fetch: reads pages from the peers that requests name; without it the prompts are computed here.
    """

    def __init__(
        self,
        model: BuiltModel,
        model_name: str,
        options: SchedulerOptions,
        observers: Sequence[RequestObserver] = (),
        fetch: FetchPages | None = None,
    ) -> None:
        self.model_name = model_name
        self.weights = model.weights
        self.quantization = model.weights.format
        self.is_batch_invariant = model.is_batch_invariant
        self.fingerprint = model.fingerprint
        self.spec = model.spec
        self.tokenizer: Tokenizer = model.tokenizer
        self._own_tokenizers = model.own_tokenizers
        self.chat_template = model.chat_template
        self.grammars = GrammarCompiler(model.tokenizer, model.spec.vocab_size, frozenset(model.spec.eos_token_ids))
        self.max_model_len = model.parts.max_model_len
        self.page_size_tokens = model.parts.memory.kv.page_size
        self.error: str | None = None
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._loader: ThreadedLoader | None = None
        if model.parts.source is not None:
            write = model.parts.executor.write_adapter
            source = model.parts.source
            self._loader = ThreadedLoader(source, write, self._wake, options.load_timeout_s, source.place)
        self._executor = model.parts.executor
        self._engine = EngineCore(model.parts, self._loader, self._snapshot_loader(model, options, fetch))
        memory = model.parts.memory
        # Any thread may call it.
        self._tier = memory.adapter_manager.tier
        self.pages = PageLender(
            memory.peer_pages.facts, memory.layout.block_bytes, model.parts.executor.read_pages, self._call_utility
        )
        self.input_processor = AsyncInputProcessor(
            model.input_processor, model.parts.source, options.queue_timeout_s, options.load_timeout_s
        )
        self.metrics, self.heartbeat = self._engine.metrics, self._engine.heartbeat
        self.profile = self._engine.profile
        self.step_stats = self._engine.step_stats
        self.queue_limiter = QueueLimiter(options, self.metrics.stats)
        self.in_flight = InFlightRequests(self._abort_with_error)
        self.request_stats = RequestStats()
        self.observers = RequestObservers((self.queue_limiter, self.in_flight, self.request_stats, *observers))
        # Until the engine's last output has come, also after an abort.
        self._streams: dict[RequestId, RequestStream] = {}
        self._utility_calls: dict[int, asyncio.Future[Any]] = {}
        self._thread = EngineThread(self._engine, self._inbox, self._deliver, self._fail_all)

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        store: AdapterStore | None = None,
        progress: Progress | None = None,
        observers: Sequence[RequestObserver] = (),
        fetch: FetchPages | None = None,
    ) -> "AsyncEngine":
        """Load the model, which takes seconds: call it in a thread.

        Raises:
            ModelError: the checkpoint cannot be served.
            ConfigError: an option does not fit this model or machine.
        """
        compute_alone()
        checkpoint = open_checkpoint(config.model.model, config.model.load_format, config.model.quantized_weights)
        try:
            built = build(checkpoint, config, store, progress)
            return cls(built, checkpoint.name, config.scheduler, observers, fetch)
        finally:
            checkpoint.close()

    def _snapshot_loader(
        self, model: BuiltModel, options: SchedulerOptions, fetch: FetchPages | None
    ) -> SnapshotLoader:
        executor, block_bytes = model.parts.executor, model.parts.memory.layout.block_bytes
        return SnapshotLoader(
            model.snapshots,
            block_bytes,
            model.max_snapshot_bytes,
            executor.read_pages,
            executor.write_pages,
            self._wake,
            options.load_timeout_s,
            fetch,
        )

    def _wake(self) -> None:
        """Wake the engine thread: a load has ended. For any thread."""
        self._inbox.put(Wake())

    @property
    def silence(self) -> str | None:
        """Return which process of the model has sent nothing for seconds; None if all have."""
        return self._executor.silence

    @property
    def is_alive(self) -> bool:
        """Return whether requests are answered."""
        return self._thread.is_alive and self.error is None

    async def start(self) -> None:
        """Start the engine thread. This process ends when another process that computes a part of the model ends."""
        loop = asyncio.get_running_loop()

        def tell(why: str) -> None:
            # The loop may be closed at any moment.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.abort_all, why)

        self._executor.exit_when_lost(tell)
        self._thread.start()

    async def warmed(self) -> None:
        """Wait until the device is prepared for every kind of request, or the engine has died."""
        await self._thread.bound()

    def disk_reads(self) -> DiskReadStats:
        """Return how many reads of adapters and of their headers took too long."""
        reads = self.input_processor.read_stats()
        loads = self._loader.read_stats() if self._loader is not None else DiskReadStats()
        return DiskReadStats(reads.num_given_up + loads.num_given_up, reads.num_hung + loads.num_hung)

    def inject_faults(self, faults: FaultHook) -> None:
        """Install a hook that makes steps fail on purpose. Call it before `start`."""
        self._engine.retrier.fault_hook = faults

    def abort_all(self, why: str, kind: type[EngineDead] = EngineDead) -> None:
        """End every stream with an error and accept no more requests."""
        self._fail_all(why, kind)
        self.input_processor.close()

    async def shutdown(self) -> None:
        """Stop the engine thread; requests that still run end with an error."""
        if self._thread.is_alive:
            self._thread.stop()
            await asyncio.to_thread(self._thread.join)
        self._fail_all("the server is shutting down", ServerStopping)
        self.input_processor.close()
        await self.grammars.aclose()
        await asyncio.to_thread(self._engine.close)

    async def add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        request_id: str | None = None,
        versions: Collection[tuple[str, int]] = (),
    ) -> RequestStream:
        """Accept a request, or refuse it at once.

        Args:
            prompt: text, or token ids, which are used unchanged.
            sampling: `max_tokens` None takes the rest of the context, or of the pool.
            request_id: a label for logs; the engine makes its own id unique.
            versions: (id, version) of the adapters whose deletion by force ends the request.
        Returns:
            The stream of the request's outputs.
        Raises:
            InvalidRequest, ContextLengthExceeded, AdapterError, PoisonRequest: as `InputProcessor.process`.
            RequestTimeout: the adapter's header was not read in time.
            AdapterDeleted: the adapter was deleted by force meanwhile.
            EngineOverloaded: too many requests are queued.
            EngineDead: the engine does not run.
        """
        return (await self.add_choices(prompt, sampling, 1, options, request_id=request_id, versions=versions))[0]

    async def add_choices(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        count: int,
        options: RequestOptions = NO_OPTIONS,
        *,
        request_id: str | None = None,
        versions: Collection[tuple[str, int]] = (),
    ) -> list[RequestStream]:
        """Accept several answers to one prompt, which share its pages. A seed counts up from choice to choice.

        Raises:
            LorasrvError, AdapterError: as `add`; then none of the choices is accepted.
        """
        arrived_s = time.monotonic()
        label = request_id or "req"
        rids = [RequestId(f"{label}#{next(self._numbers)}") for _ in range(count)]
        try:
            with self.in_flight.arriving(versions, rids) as use:
                requests = await self.input_processor.process_choices(rids, prompt, sampling, options)
                # Do not await below: from here on the registered streams end with the engine.
                use.check()
                if not self.is_alive:
                    raise EngineDead(self.error or "the engine is not running")
                self.queue_limiter.check(count, len(requests[0].prompt_token_ids), requests[0].principal)
                return self._accept(requests, arrived_s)
        except BaseException as error:
            self.observers.on_refused(error)
            raise

    def check_computes(self, without: str) -> None:
        """Check that this server computes answers. It always does: do nothing.

        Args:
            without: what a server that computes none lacks, and where to find it; for the error.
        """

    def check_admission(self, principal: str) -> None:
        """Check that the queue has a place for one more request, before any work is done for it. Do nothing if the
        engine is dead: `add` refuses then.

        Raises:
            EngineOverloaded: the queue is full.
        """
        if self.is_alive:
            try:
                self.queue_limiter.check(principal=principal)
            except EngineOverloaded as error:
                self.observers.on_refused(error)
                raise

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Add a request and yield its outputs; leaving the loop early aborts the request."""
        stream = await self.add(prompt, sampling, options, request_id=request_id)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def warm(self, adapter: AdapterKey, deadline_s: float) -> AdapterStatus:
        """Load an adapter into the pool.

        Args:
            deadline_s: longest wait for it; the load continues afterwards.
        Returns:
            Where the adapter is once it is resident, or at the deadline.
        Raises:
            InvalidRequest: it can never fit.
            AdapterLoadFailed, AdapterError: it cannot be loaded.
            EngineDead: the engine does not run.
        """
        layout = await self.input_processor.layout(adapter)
        return await self._call_and_wait(WarmAdapter(adapter, layout, deadline_s), deadline_s)

    async def pin(self, adapter: AdapterKey) -> AdapterStatus:
        """Load an adapter into the pool and keep it there.

        Returns:
            Where the adapter is once it is resident, or after `PIN_WAIT_S`.
        Raises:
            InvalidRequest: it can never fit, or too many pages are pinned already.
            LorasrvError, AdapterError: as `warm`.
        """
        layout = await self.input_processor.layout(adapter)
        return await self._call_and_wait(PinAdapter(adapter, layout), PIN_WAIT_S)

    async def own_tokenizer(self, adapter: AdapterKey | None) -> Tokenizer | None:
        """Return the tokenizer of an adapter that has tokens of its own; None if it is the base's.

        Raises:
            AdapterError: the adapter is not in the store any more, or its tokens do not fit the base's.
        """
        own = self._own_tokenizers
        if own is None:
            return None
        return own.of(adapter) if own.knows(adapter) else await asyncio.to_thread(own.of, adapter)

    async def unpin(self, adapter: AdapterKey) -> AdapterStatus:
        """Let an adapter be evicted again; do nothing if it is not pinned.

        Raises:
            EngineDead: the engine does not run.
        """
        status: AdapterStatus = await self._call_utility(UnpinAdapter(adapter))
        return status

    async def set_limits(self, adapter_id: str, limits: Limits | None) -> None:
        """Set an adapter's limits from the next step on; None restores the default limits.

        Raises:
            EngineDead: the engine does not run.
        """
        await self._call_utility(SetLimits(adapter_id, limits))

    async def set_share(self, adapter_id: str, share: LimitShare) -> LimitShare:
        """Set what this engine may use of an adapter's limits, from the next step on.

        Returns:
            What the engine uses for now: the share, or more while earlier requests still run.
        Raises:
            EngineDead: the engine does not run.
        """
        used: LimitShare = await self._call_utility(SetShare(adapter_id, share))
        return used

    async def forget_answers(self, adapter: AdapterKey | None = None, salt: str | None = None) -> None:
        """Drop the past answers of an adapter, or under a salt, which serve as drafts for later answers.

        Raises:
            EngineDead: the engine does not run.
        """
        await self._call_utility(ForgetAnswers(adapter, salt))

    async def make_snapshot(
        self, adapter: AdapterKey | None, prefix: FixedPrefix, token_ids: tuple[int, ...]
    ) -> SnapshotStatus:
        """Keep the pages of a prefix on the disk, as soon as a request has computed them.

        Raises:
            SnapshotFailure: they cannot be kept.
            EngineDead: the engine does not run.
        """
        status: SnapshotStatus = await self._call_utility(MakeSnapshot(adapter, prefix, token_ids))
        return status

    async def find_snapshot(
        self, adapter: AdapterKey | None, prefix: FixedPrefix, token_ids: tuple[int, ...]
    ) -> SnapshotStatus | None:
        """Return the snapshot of a prefix; None if there is none.

        Raises:
            EngineDead: the engine does not run.
        """
        status: SnapshotStatus | None = await self._call_utility(FindSnapshot(adapter, prefix, token_ids))
        return status

    async def tier(self, adapter: AdapterKey) -> AdapterTier:
        """Return where an adapter is now.

        Raises:
            EngineDead: the engine does not run.
        """
        status: AdapterStatus = await self._call_utility(GetAdapterTier(adapter))
        return status.tier

    async def pool_map(self) -> PoolMap:
        """Return which pages are used for what.

        Raises:
            EngineDead: the engine does not run.
        """
        described: PoolMap = await self._call_utility(DescribePool())
        return described

    async def residents(self) -> list[tuple[AdapterKey, int]]:
        """Return (key, bytes of its pages) of each adapter in the pool.

        Raises:
            EngineDead: the engine does not run.
        """
        found: list[tuple[AdapterKey, int]] = await self._call_utility(ListResidents())
        return found

    async def _call_and_wait(self, request: WarmAdapter | PinAdapter, deadline_s: float) -> AdapterStatus:
        try:
            async with asyncio.timeout(deadline_s):
                status: AdapterStatus = await self._call_utility(request)
        except TimeoutError:
            status = await self._call_utility(GetAdapterTier(request.key))
        return status

    async def _call_utility(self, request: UtilityRequest) -> Any:
        """Call the engine thread and return the result's content; raise it if it is an exception."""
        if not self.is_alive:
            raise EngineDead(self.error or "the engine is not running")
        number = next(self._numbers)
        future = self._utility_calls[number] = asyncio.get_running_loop().create_future()
        self._inbox.put(UtilityCall(number, request))
        try:
            return await future
        finally:
            if self._utility_calls.pop(number, None) is not None:
                self._inbox.put(UtilityCall(number, None))

    def _accept(self, requests: Sequence[EngineCoreRequest], arrived_s: float) -> list[RequestStream]:
        """Register the choices of one request and hand them to the engine: all of them or, if it fails, none."""
        streams = [self._stream(request) for request in requests]
        try:
            self._streams.update((stream.request_id, stream) for stream in streams)
            if self._loader is not None and requests[0].found is AdapterTier.DISK:
                # Start reading at once: the engine orders the loads only after its current step.
                for term in requests[0].terms:
                    if self._tier(term.key) is AdapterTier.DISK:
                        self._loader.prefetch(term.key)
            self._inbox.put(AddRequests(tuple(requests)))
            # The engine's outputs reach this thread later, so the observers are told in order.
            self.observers.on_accepted(requests, arrived_s)
        except BaseException:
            for request in requests:
                self._finish(request.request_id)
            for request in requests:
                self._inbox.put(EndRequest(request.request_id, stopped=False))
            raise
        return streams

    def _stream(self, request: EngineCoreRequest) -> RequestStream:
        own = self._own_tokenizers and self._own_tokenizers.of(request.adapter_key)
        detokenizer = Detokenizer(own or self.tokenizer, request.text)
        processor = OutputProcessor(len(request.prompt_token_ids), request.sampling, detokenizer)
        return RequestStream(self, request, processor)

    def _finish(self, request_id: RequestId) -> None:
        """Forget a request, of which no more outputs come or count. Called exactly once for every accepted request."""
        if (stream := self._streams.pop(request_id, None)) is not None:
            self.observers.on_finished(request_id, stream.abort_reason)

    def abort(self, request_id: RequestId) -> None:
        """Have the engine finish a request before its next step. Called by its stream.

        The request counts until the engine's last output has come: an output on its way may have more tokens, or end
        the answer for another reason.
        """
        self._inbox.put(EndRequest(request_id, stopped=False))

    def _abort_with_error(self, request_id: RequestId, error: Exception) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.abort(error)

    def _deliver(self, outputs: list[EngineOutput], results: list[UtilityResult]) -> None:
        for result in results:
            self._complete_call(result)
        with self.profile.span("outputs"):
            self._deliver_outputs(outputs)

    def _deliver_outputs(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            result = stream.deliver(output)
            self.observers.on_output(output.request_id, result)
            if result.finished:
                self._finish(output.request_id)
                if output.finish_reason is None:
                    self._inbox.put(EndRequest(output.request_id, stopped=True))

    def _complete_call(self, result: UtilityResult) -> None:
        future = self._utility_calls.pop(result.number, None)
        if future is None or future.done():
            return
        if isinstance(result.content, Exception):
            future.set_exception(result.content)
        else:
            future.set_result(result.content)

    def _fail_all(self, reason: str, kind: type[EngineDead] = EngineDead) -> None:
        self.error = self.error or reason
        self._deliver_outputs(self._thread.take_unposted())
        for number in list(self._utility_calls):
            self._complete_call(UtilityResult(number, kind(reason)))
        for stream in list(self._streams.values()):
            stream.abort(kind(reason))
            self._finish(stream.request_id)
