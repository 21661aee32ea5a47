"""A fake `AsyncEngine` for tests of HTTP: it answers with scripted outputs, and records requests.

tests/api/test_fake_engine.py checks its public names and signatures against those of the real one.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from tiny_adapter import BASE, FFN, HIDDEN, LAYERS

from adapter_store.errors import AdapterError
from adapter_store.spec import AdapterKey
from lorasrv.config import Limits, LimitShare
from lorasrv.engine.in_flight_requests import InFlightRequests
from lorasrv.engine.messages import AdapterStatus, SnapshotStatus
from lorasrv.engine.pool_map import PoolMap
from lorasrv.engine.watchdog import Heartbeat
from lorasrv.errors import (
    AdapterCold,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    LeaseEnded,
    LorasrvError,
    name_of,
)
from lorasrv.metrics.engine_stats import EngineMetrics, EngineStats
from lorasrv.metrics.request_stats import RequestStats
from lorasrv.metrics.step_stats import StepProfile, StepStats
from lorasrv.models.quantization.served import ServedWeights
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import CLIENT, AdapterTier, FinishReason, RequestId, RequestOutput, RequestTiming
from lorasrv.request import NO_OPTIONS, EngineCoreRequest, FixedPrefix, OnCold, RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.tool_parsers.formats import HERMES, ToolFormat
from lorasrv.worker.disk_threads import DiskReadStats

VOCAB, CONTEXT = 384, 512
SPEC = ModelSpec("llama", LAYERS, HIDDEN, FFN, 2, 1, 4, VOCAB, CONTEXT, 1e-5)
EMPTY_POOL = PoolMap(10, 10, 0, 0, 0, 16, 1024, 1, 10, 0, (), (), 0)
TEXT = "Hello wörld"
DEAD = EngineDead("the engine died: Test")
HANG = None
"""In place of an output: no more outputs come."""

Asked = SimpleNamespace
"""A request's `id`, `prompt`, `sampling`, `count` and options."""
Said = Sequence[RequestOutput | Exception | None]
Script = Callable[[RequestId, int, Asked], Said]
"""(id, choice, request) -> its outputs; an exception in the list is raised instead of an output."""


def say(
    *texts: str,
    chars: int = 1,
    reason: FinishReason = FinishReason.STOP,
    error: str | None = None,
    choice: int | None = None,
    cached: int = 0,
) -> Script:
    """Script texts, one for each choice or one for all, with a token for every `chars` characters; an adapter answers
    with its key instead.

    A NUL is a token whose text is held back, as for half a character. `error` ends `choice`, or all choices.
    """

    def script(rid: RequestId, index: int, asked: Asked) -> Said:
        text = (texts or (TEXT,))[index if len(texts) > 1 else 0]
        text = text if asked.adapter_key is None else f"I am {asked.adapter_key[:12]}"
        cut = text[: asked.sampling.max_tokens or None]
        prompt = len(asked.prompt)
        if asked.sampling.prompt_only:
            return [RequestOutput(rid, "", (), prompt, 0, RequestTiming(), finish_reason=FinishReason.LENGTH)]
        # As in the real engine, further choices share all of the prompt except its last token.
        timing = RequestTiming(1.5, num_preemptions=index, num_cached_tokens=prompt - 1 if index else cached)
        if asked.adapter_key is not None:
            timing = replace(timing, tier=AdapterTier.DISK, load_ms=2.5)
        outputs = [
            RequestOutput(rid, cut[at : at + chars].replace("\0", ""), (number,), prompt, number + 1, timing)
            for number, at in enumerate(range(0, len(cut), chars))
        ]
        end = reason if cut == text else FinishReason.LENGTH
        fails = error is not None and choice in (None, index)
        last = replace(outputs[-1], finish_reason=FinishReason.ERROR if fails else end, error=error if fails else None)
        return [*outputs[:-1], last]

    return script


def base_only(script: Script) -> Script:
    """Script the base's answer for every adapter."""
    return lambda rid, index, asked: script(rid, index, Asked(**vars(asked) | {"adapter_key": None}))


def cold(retry_after_s: float) -> Script:
    """Script a pool without any adapter, so that `on_cold` decides."""

    def script(rid: RequestId, index: int, asked: Asked) -> Said:
        if asked.adapter_key is None or asked.on_cold is OnCold.WAIT:
            return say()(rid, index, asked)
        if asked.on_cold is OnCold.REJECT:
            return [AdapterCold("the adapter is not in the pool yet", retry_after_s=retry_after_s)]
        said = base_only(say())(rid, index, asked)
        outputs = [out for out in said if isinstance(out, RequestOutput)]
        return [
            replace(out, timing=replace(out.timing, tier=AdapterTier.DISK, load_ms=2.5, fell_back=True))
            for out in outputs
        ]

    return script


class FakeTemplate:
    """A template that renders a conversation as `role:content` lines, with one token per byte."""

    source = ""
    variables: frozenset[str] = frozenset()
    tool_format: ToolFormat | None = None

    @property
    def tool_source(self) -> str:
        return self.source

    def take_tools(self) -> None:
        """Support tools from now on."""
        self.variables, self.tool_format = frozenset({"tools"}), HERMES

    def checked_variables(self, given: dict[str, Any]) -> dict[str, Any]:
        return given

    def encode(self, messages: Sequence[dict[str, str]], tokenizer: object, *_: object, **__: object) -> list[int]:
        return list("\n".join(f"{m['role']}:{m['content']}" for m in messages).encode())

    def control_tokens(self, text: str, tokenizer: object) -> list[str]:
        return [token for token in ("<|im_end|>",) if token in text]


class FakeGrammars:
    """A compiler that returns each grammar as its own constraint."""

    async def compile(self, grammar: object, principal: str, own: None) -> object:
        return grammar


class FakeStream(AsyncIterator[RequestOutput]):
    """The scripted outputs of one choice."""

    def __init__(self, engine: "FakeEngine", request_id: RequestId, index: int, asked: Asked) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = len(asked.prompt)
        self.num_generated_tokens = 0
        self._engine = engine
        self._script = iter(engine.script(request_id, index, asked))
        self._take: Callable[[RequestOutput], bool] = lambda _: False
        self._finished = False

    def pass_to(self, take: Callable[[RequestOutput], bool]) -> None:
        self._take = take

    async def __anext__(self) -> RequestOutput:
        """Return the next output that the function of `pass_to`, as for the engine's streams, does not take."""
        while True:
            output = await self._next()
            if output.finished or not self._take(output):
                return output

    async def _next(self) -> RequestOutput:
        await asyncio.sleep(0)
        try:
            output = next(self._script)
        except StopIteration:
            raise StopAsyncIteration from None
        while output is HANG:
            await asyncio.Event().wait()
        if isinstance(output, Exception):
            # An exception from a bug does not end the request.
            self._finished = isinstance(output, LorasrvError | AdapterError)
            if self._finished:
                self._engine.request_stats.on_finished(self.request_id, name_of(type(output)))
            raise output
        self._finished = output.finished
        self.num_generated_tokens = output.num_generated_tokens
        self._engine.request_stats.on_output(self.request_id, output)
        if output.finished:
            self._engine.request_stats.on_finished(self.request_id)
        return output

    async def aclose(self, why: str = CLIENT) -> None:
        if not self._finished:
            self._finished = True
            self._engine.aborted.append(self.request_id)
            self._engine.request_stats.on_finished(self.request_id, why)


class NoPages:
    """The lent pages of a server without a prefix cache."""

    facts = None
    page_bytes = 0

    def num_pages(self, lease_id: str) -> int:
        raise LeaseEnded("the lease has ended")


class FakeEngine:
    """The parts of an engine that HTTP needs. `script` answers requests, `add_error` refuses them, `ask_error` refuses
    everything else.

    `before_add` is awaited before each request, with its number from 0.
    `reached` is the tier that is reported for adapters; with None, a warm request waits forever.
    """

    CONTROLS = frozenset({"script", "breaks", "add_error", "before_add", "ask_error", "reached", "pool", "resident"})
    RECORDS = frozenset({"added", "aborted", "asked", "limits", "shares", "forgotten"})

    def __init__(self) -> None:
        self.script: Script = say()
        self.add_error: Exception | None = None
        self.before_add: Callable[[int], Awaitable[None]] | None = None
        self.ask_error: Exception | None = None
        self.reached: AdapterStatus | None = AdapterStatus(AdapterTier.RESIDENT, 12.34)
        self.pool = EMPTY_POOL
        self.resident: list[tuple[AdapterKey, int]] = []
        self.added: list[Asked] = []
        self.aborted: list[str] = []
        self.asked: list[tuple[object, ...]] = []
        self.forgotten: list[AdapterKey | None] = []
        self.limits: dict[str, Limits | None] = {}
        self.shares: dict[str, LimitShare] = {}
        # The rest is as in the real engine.
        self.model_name = BASE
        self.weights = ServedWeights("int8")
        self.quantization = self.weights.format
        self.is_batch_invariant = True
        self.spec = SPEC
        self.max_model_len = CONTEXT
        self.page_size_tokens = 16
        self.tokenizer: Any = object()
        self.chat_template: Any = FakeTemplate()
        self.grammars: Any = FakeGrammars()
        self.fingerprint = "double"
        self.metrics = EngineMetrics(
            EngineStats(
                pages_total=10,
                pages_free=7,
                requests_finished_total={"stop": 3},
                step_costs={"step": 16e-3, "token": 1e-3, "request": 1e-3},
            )
        )
        self.heartbeat = Heartbeat()
        self.profile = StepProfile()
        self.step_stats = StepStats()
        self.queue_limiter: Any = SimpleNamespace(num_tokens=0)
        self.pages: Any = NoPages()
        self.in_flight = InFlightRequests(lambda *_: None)
        self.request_stats = self.observers = RequestStats()
        self.is_alive = False
        self.error: str | None = None
        self._numbers, self._tries = itertools.count(), itertools.count()

    def breaks(self, after: int, then: Exception | None = DEAD, choice: int | None = None) -> None:
        """From now on, let `choice`, or every choice, end after `after` outputs, with `then` as the next one."""
        script = self.script
        self.script = lambda rid, index, asked: (
            [*script(rid, index, asked)[:after], then] if choice in (None, index) else script(rid, index, asked)
        )

    silence: str | None = None

    def check_computes(self, without: str) -> None:
        """Do nothing: the engine computes."""

    def check_admission(self, principal: str) -> None:
        assert principal

    async def own_tokenizer(self, adapter: AdapterKey | None) -> None:
        """Return None: the base's tokenizer is used."""

    async def start(self) -> None:
        self.is_alive = True

    async def warmed(self) -> None:
        """Do nothing: nothing is computed."""

    async def shutdown(self) -> None:
        self.is_alive = False

    def disk_reads(self) -> DiskReadStats:
        return DiskReadStats()

    def abort_all(self, why: str, kind: type[EngineDead] = EngineDead) -> None:
        self.error = why

    async def add_choices(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        count: int,
        options: RequestOptions = NO_OPTIONS,
        *,
        request_id: str | None = None,
        versions: Collection[tuple[str, int]] = (),
    ) -> list[Any]:
        """Return a `FakeStream` for each choice."""
        if self.before_add is not None:
            await self.before_add(next(self._tries))
        if self.add_error is not None:
            raise self.add_error
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if not all(0 <= token < VOCAB for token in ids):
            raise InvalidRequest(f"token ids must lie in [0, {VOCAB})", param="prompt")
        tokens = sampling.max_tokens or 1
        if len(ids) + tokens > self.max_model_len:
            raise ContextLengthExceeded(f"{len(ids)} + {tokens} > {self.max_model_len}", param="max_tokens")
        label = request_id or f"req-{next(self._numbers)}"
        given = {option.name: getattr(options, option.name) for option in fields(options)}
        asked = Asked(id=label, prompt=ids, sampling=sampling, count=count, versions=list(versions), **given)
        streams = [FakeStream(self, RequestId(f"{label}#{index}"), index, asked) for index in range(count)]
        self.added.append(asked)
        first = EngineCoreRequest(
            streams[0].request_id,
            tuple(ids),
            tokens,
            sampling,
            adapter_key=asked.adapter_key,
            adapter_id=asked.adapter_id,
            charged_key=asked.charged_key,
            principal=asked.principal,
        )
        further = [replace(first, request_id=s.request_id, fork_of=first.request_id) for s in streams[1:]]
        self.request_stats.on_accepted([first, *further], time.monotonic())
        return streams

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        for stream in await self.add_choices(prompt, sampling, 1, options, request_id=request_id):
            async for output in stream:
                yield output

    async def warm(self, adapter: AdapterKey, deadline_s: float) -> AdapterStatus:
        self.asked.append(("warm", adapter, deadline_s))
        if self.reached is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted.append("warm")
        return self._reply()

    async def pin(self, adapter: AdapterKey) -> AdapterStatus:
        self.asked.append(("pin", adapter, True))
        return self._reply()

    async def unpin(self, adapter: AdapterKey) -> AdapterStatus:
        self.asked.append(("pin", adapter, False))
        return self._reply()

    async def forget_answers(self, adapter: AdapterKey | None = None, salt: str | None = None) -> None:
        assert self.is_alive
        self.forgotten.append(adapter)

    async def make_snapshot(
        self, adapter: AdapterKey | None, prefix: FixedPrefix, token_ids: tuple[int, ...]
    ) -> SnapshotStatus:
        assert self.is_alive
        return SnapshotStatus(len(token_ids), 4096)

    async def find_snapshot(
        self, adapter: AdapterKey | None, prefix: FixedPrefix, token_ids: tuple[int, ...]
    ) -> SnapshotStatus | None:
        return None

    async def set_limits(self, adapter_id: str, limits: Limits | None) -> None:
        assert self.is_alive
        self.limits[adapter_id] = limits

    async def set_share(self, adapter_id: str, share: LimitShare) -> LimitShare:
        assert self.is_alive
        self.shares[adapter_id] = share
        return share

    async def tier(self, adapter: AdapterKey) -> AdapterTier:
        return self._reply().tier

    async def residents(self) -> list[tuple[AdapterKey, int]]:
        return self.resident

    async def pool_map(self) -> PoolMap:
        self._reply()
        return self.pool

    def _reply(self) -> AdapterStatus:
        if self.ask_error is not None:
            raise self.ask_error
        assert self.reached is not None
        return self.reached
