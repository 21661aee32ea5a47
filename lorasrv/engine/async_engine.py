"""One engine thread beside the event loop. Frozen messages without tensors cross between them, nothing else.

The thread drains its inbox, steps, and hands all outputs of a step to the loop in one call; the loop makes text of
them. Every accepted request ends with exactly one finished output, also when the engine dies.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Unpack

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig, Limits, SchedulerOptions
from lorasrv.engine.backpressure import QueueLimiter
from lorasrv.engine.core import EngineCore
from lorasrv.engine.factory import BuiltModel, Progress, build
from lorasrv.engine.input_processor import Reception, RequestOptions
from lorasrv.engine.messages import (
    AdapterStatus,
    AddRequests,
    DescribePool,
    EndRequest,
    GetAdapterTier,
    ListResidents,
    Message,
    PinAdapter,
    SetLimits,
    Shutdown,
    UnpinAdapter,
    UtilityCall,
    UtilityRequest,
    UtilityResult,
    Wake,
    WarmAdapter,
)
from lorasrv.engine.output_processor import InFlightRequests, InFlightUse, OutputProcessor, RequestStream
from lorasrv.engine.pool_snapshot import PoolMap
from lorasrv.engine.step_retry import FaultHook
from lorasrv.errors import EngineDead, ServerStopping
from lorasrv.metrics.request_stats import RequestStats
from lorasrv.metrics.trace_recorder import TraceRecorder
from lorasrv.models.loader import open_checkpoint
from lorasrv.outputs import AdapterTier, EngineOutput, RequestId, RequestOutput
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.structured_output.compiler import GrammarCompiler
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.adapter_loader import ThreadedLoader
from lorasrv.worker.device import compute_alone, compute_in_parallel

_LOG = logging.getLogger(__name__)
PIN_WAIT_S = 10.0
MAX_SLEEP_S = 3600.0
"""A queue cannot wait for ever long."""


class AsyncEngine:
    """The engine as a server sees it. Methods are for the event loop's thread. `recorder` hears of every request."""

    def __init__(self, model: BuiltModel, model_name: str, options: SchedulerOptions) -> None:
        self.recorder: TraceRecorder | None = None
        self.traffic = RequestStats()
        self.model_name = model_name
        self.quantization = model.quantization
        self.spec = model.spec
        self.tokenizer: Tokenizer = model.tokenizer
        self.chat_template = model.chat_template
        self.grammars = GrammarCompiler(model.tokenizer, model.spec.vocab_size, frozenset(model.spec.eos_token_ids))
        self.max_model_len = model.parts.max_model_len
        self.page_size_tokens = model.parts.books.kv.page_size
        self.error: str | None = None
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._loader: ThreadedLoader | None = None
        if model.parts.source is not None:
            write = model.parts.executor.write_adapter
            self._loader = ThreadedLoader(model.parts.source, write, lambda: self._inbox.put(Wake()))
        self._engine = EngineCore(model.parts, self._loader)
        self._reception = Reception(
            self._engine.admission, self.tokenizer, self.max_model_len, self._engine.poison, options.queue_timeout_s
        )
        self.metrics, self.heartbeat = self._engine.metrics, self._engine.heartbeat
        self.waiting_room = QueueLimiter(options, self.metrics.snapshot)
        self.profile = self._engine.profile
        self.book = self._engine.book
        self.uses = InFlightRequests()
        self._streams: dict[RequestId, RequestStream] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def build(
        cls, config: EngineConfig, store: AdapterStore | None = None, progress: Progress | None = None
    ) -> "AsyncEngine":
        """Load the model (seconds; call it in a thread). Raises ModelError or ConfigError."""
        compute_alone()
        checkpoint = open_checkpoint(config.model.model, config.model.load_format, config.model.quantized_weights)
        try:
            built = build(checkpoint, config, store, progress)
            return cls(built, checkpoint.name, config.scheduler)
        finally:
            checkpoint.close()

    @property
    def is_alive(self) -> bool:
        """Whether requests are being answered."""
        return self._thread.is_alive() and self.error is None

    async def start(self) -> None:
        """Begin to answer requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def rehearse(self, faults: FaultHook) -> None:
        """Have steps fail on purpose; before `start`."""
        self._engine.attempts.rehearsal = faults

    def break_off(self, why: str, kind: type[EngineDead] = EngineDead) -> None:
        """End every stream with an error; nothing is answered any more."""
        self._fail_all(why, kind)

    async def shutdown(self) -> None:
        """End the engine thread; requests that still run end with an error."""
        if self._thread.is_alive():
            self._inbox.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
        self._fail_all("the server is shutting down", ServerStopping)
        self._reception.close()
        await self.grammars.aclose()
        await asyncio.to_thread(self._engine.close)

    async def add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Accept a request, or refuse it here and now.

        Args:
            prompt: text, or token ids as they are.
            sampling: `max_tokens` None takes the rest of the context, or of the pool.
            request_id: a label for logs; the engine's own id is made unique.
        Raises:
            InvalidRequest: the prompt is empty or names a token that does not exist, or the adapter fits nowhere.
            ContextLengthExceeded: it can never fit.
            AdapterError: the adapter is not in the store any more, or damaged.
            AdapterDeleted: it was deleted, and whoever did would not wait.
            PoisonRequest: requests like it have made the engine fail.
            EngineOverloaded: too many are queued.
            EngineDead: nothing is answered any more.
        """
        return (await self.add_choices(prompt, sampling, 1, request_id=request_id, **options))[0]

    async def add_choices(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        count: int,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestStream]:
        """As `add`, for several answers to one prompt, whose pages they share. A seed counts up from choice to choice.

        Raises: as `add`; then none of them is accepted.
        """
        arrived_s = time.monotonic()
        label = request_id or "req"
        rids = [RequestId(f"{label}#{next(self._numbers)}") for _ in range(count)]
        use = self.uses.begin(options.get("adapter_id", ""), options.get("adapter"))
        try:
            messages = await self._reception.receive(rids, prompt, sampling, **options)
            # Nothing is awaited from here on, so that no stream is registered after the last one was told of the end.
            use.check()
            if not self.is_alive:
                raise EngineDead(self.error or "the engine is not running")
            self.waiting_room.check(count, len(messages[0].prompt_token_ids), messages[0].principal)
        except BaseException as error:
            self.uses.end(use)
            self.traffic.refused(error)
            raise
        streams = [self._open(message, use) for message in messages]
        self.waiting_room.enter(messages)
        self.traffic.accepted(messages, arrived_s)
        if self.recorder is not None:
            self.recorder.accepted(messages, arrived_s)
        self._inbox.put(AddRequests(tuple(messages)))
        key = messages[0].adapter_key
        if self._loader is not None and key is not None and messages[0].found is AdapterTier.DISK:
            # The engine will order it when its step is over; reading it begins now.
            self._loader.prefetch(key)
        return streams

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """`add`, then its outputs; leaving the loop early aborts the request."""
        stream = await self.add(prompt, sampling, request_id=request_id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def warm(self, adapter: AdapterKey, deadline_s: float) -> AdapterStatus:
        """Bring an adapter to the pool before the deadline; says where it is when it is there, or at the deadline.

        Raises:
            InvalidRequest: it fits nowhere.
            AdapterLoadFailed, AdapterError: it cannot be brought in.
            EngineDead: nothing is answered any more.
        """
        layout = await asyncio.to_thread(self._engine.admission.layout, adapter)
        return await self._reached(WarmAdapter(adapter, layout, deadline_s), deadline_s)

    async def pin(self, adapter: AdapterKey) -> AdapterStatus:
        """Bring an adapter to the pool and keep it there; says where it is when it is there, or after ten seconds.

        Raises: as `warm`; InvalidRequest also if it is one too many.
        """
        layout = await asyncio.to_thread(self._engine.admission.layout, adapter)
        return await self._reached(PinAdapter(adapter, layout), PIN_WAIT_S)

    async def unpin(self, adapter: AdapterKey) -> AdapterStatus:
        """Keep an adapter no longer; nothing happens if it was not kept. Raises: EngineDead."""
        reached: AdapterStatus = await self._ask(UnpinAdapter(adapter))
        return reached

    async def set_limits(self, adapter_id: str, limits: Limits | None) -> None:
        """From the next step on, an adapter has these limits; None: those of every adapter. Raises: EngineDead."""
        await self._ask(SetLimits(adapter_id, limits))

    async def tier(self, adapter: AdapterKey) -> AdapterTier:
        """Where an adapter is now. Raises: EngineDead."""
        reached: AdapterStatus = await self._ask(GetAdapterTier(adapter))
        return reached.tier

    async def pool_map(self) -> PoolMap:
        """Who holds which pages. Raises: EngineDead."""
        described: PoolMap = await self._ask(DescribePool())
        return described

    async def residents(self) -> list[tuple[AdapterKey, int]]:
        """(key, bytes of its pages) of each adapter in the pool. Raises: EngineDead."""
        found: list[tuple[AdapterKey, int]] = await self._ask(ListResidents())
        return found

    async def _reached(self, question: WarmAdapter | PinAdapter, deadline_s: float) -> AdapterStatus:
        try:
            async with asyncio.timeout(deadline_s):
                reached: AdapterStatus = await self._ask(question)
        except TimeoutError:
            reached = await self._ask(GetAdapterTier(question.key))
        return reached

    async def _ask(self, question: UtilityRequest) -> Any:
        """The answer's content; if it is an exception, that is raised."""
        if not self.is_alive:
            raise EngineDead(self.error or "the engine is not running")
        number = next(self._numbers)
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        self._inbox.put(UtilityCall(number, question))
        try:
            return await future
        finally:
            if self._questions.pop(number, None) is not None:
                self._inbox.put(UtilityCall(number, None))

    def _open(self, message: EngineCoreRequest, use: InFlightUse) -> RequestStream:
        num_prompt_tokens = len(message.prompt_token_ids)
        # A grammar's text is exactly its tokens'.
        detokenizer = Detokenizer(self.tokenizer, shown=message.shown_token_ids, strip_start=message.constraint is None)
        processor = OutputProcessor(num_prompt_tokens, message.sampling, detokenizer)
        stream = RequestStream(self, message.request_id, processor, num_prompt_tokens, use)
        self._streams[message.request_id] = stream
        return stream

    def forget(self, request_id: RequestId) -> None:
        """A stream takes no more outputs."""
        self.waiting_room.leave(request_id)
        if (stream := self._streams.pop(request_id, None)) is not None:
            self.uses.leave(stream.use, stream)

    def end(self, request_id: RequestId, *, stopped: bool, why: str = "client") -> None:
        """Have the engine end a request before its next step."""
        if not stopped:
            self.traffic.left(request_id, why)
        if self.recorder is not None and not stopped:
            self.recorder.left(request_id)
        self._inbox.put(EndRequest(request_id, stopped))

    # The engine thread.

    def _run(self) -> None:
        try:
            self.heartbeat.beat()
            compute_in_parallel()
            self._engine.settle()
            idle = True
            while self._drain_inbox(wait=idle):
                outputs = self._engine.step()
                answers = self._engine.take_answers()
                idle = not self._engine.made_progress
                if outputs or answers:
                    self._post(outputs, answers)
        except Exception as error:
            _LOG.exception("the engine thread died")
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._fail_all, f"the engine died: {type(error).__name__}")

    def _drain_inbox(self, *, wait: bool) -> bool:
        """Act on every message; False once the server ends. Waits for the first one if there is nothing to compute, at
        most until the engine has something to do by itself."""
        while wait or not self._inbox.empty():
            if wait:
                self.heartbeat.rest()
            try:
                message = self._inbox.get(timeout=min(self._engine.idle_s, MAX_SLEEP_S) if wait else None)
            except queue.Empty:
                return True
            finally:
                self.heartbeat.beat()
            wait = False
            if not act_on(message, self._engine):
                return False
        return True

    def _post(self, outputs: list[EngineOutput], answers: list[UtilityResult]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, outputs, answers)

    # Back in the event loop.

    def _deliver(self, outputs: list[EngineOutput], answers: list[UtilityResult]) -> None:
        for answer in answers:
            self._reply(answer)
        with self.profile.span("detokenizing"):
            self._deliver_outputs(outputs)

    def _deliver_outputs(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            try:
                self.waiting_room.leave(output.request_id)
                result = stream.deliver(output)
                self.traffic.heard(output.request_id, result)
                if self.recorder is not None:
                    self.recorder.heard(output.request_id, result)
            except Exception as error:
                # One stream's text must not cost the others of this step their outputs.
                _LOG.exception("request %s failed", output.request_id)
                stream.break_off(error)

    def _reply(self, answer: UtilityResult) -> None:
        future = self._questions.pop(answer.number, None)
        if future is None or future.done():
            return
        if isinstance(answer.content, Exception):
            future.set_exception(answer.content)
        else:
            future.set_result(answer.content)

    def _fail_all(self, reason: str, kind: type[EngineDead] = EngineDead) -> None:
        self.error = self.error or reason
        for number in list(self._questions):
            self._reply(UtilityResult(number, kind(reason)))
        for stream in list(self._streams.values()):
            stream.fail(kind(reason))
            self.forget(stream.request_id)
            self.traffic.left(stream.request_id, "engine_dead")


def act_on(message: Message, engine: "EngineCore") -> bool:
    """Do what a message says, in the engine's thread; False if it is the end."""
    match message:
        case AddRequests():
            for added in message.messages:
                engine.add_request(added)
        case UtilityCall():
            if message.question is None:
                engine.forget_question(message.number)
            else:
                engine.ask(message.number, message.question)
        case EndRequest():
            (engine.stop if message.stopped else engine.abort)(message.request_id)
        case Shutdown():
            return False
        case Wake():
            pass
    return True
