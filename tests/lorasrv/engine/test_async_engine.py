"""The engine behind an event loop, on a tiny model with real adapters: every accepted request ends exactly once."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engine import GREEDY, PROMPT, ask, collect, engine_config, running, tokens, until

from adapter_store.errors import AdapterCorrupt
from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.spec import AdapterKey, AdapterSpec
from adapter_store.store import AdapterStore
from lorasrv.engine import engine_thread
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.engine.async_input_processor import NUM_READERS
from lorasrv.engine.core import EngineCore
from lorasrv.engine.request_stream import JOINED_TOKENS, MAX_SINGLE, RequestStream
from lorasrv.errors import (
    AdapterDeleted,
    AdapterLoadFailed,
    ContextLengthExceeded,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    ServerStopping,
)
from lorasrv.memory.pages_ahead import AHEAD_SHARE, PIECE_BYTES
from lorasrv.metrics.request_observer import RequestObserver
from lorasrv.metrics.trace import read_trace
from lorasrv.metrics.trace_recorder import TraceRecorder
from lorasrv.outputs import AdapterTier, FinishReason, RequestId, RequestOutput
from lorasrv.request import EngineCoreRequest, RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.adapter_loader import ThreadedLoader
from lorasrv.worker.device import ENGINE_THREADS

NAMES = ("one", "two", "three")
LONG = replace(GREEDY, max_tokens=400)


class Ends(RequestObserver):
    """Notes what it is told, by the labels of requests."""

    def __init__(self) -> None:
        self.accepted: list[str] = []
        self.finished: list[tuple[str, str]] = []
        self.refused: list[str] = []
        self.late: list[str] = []

    def on_accepted(self, requests: Sequence[EngineCoreRequest], arrived_s: float) -> None:
        self.accepted += [request.request_id.partition("#")[0] for request in requests]

    def on_output(self, request_id: RequestId, output: RequestOutput) -> None:
        name = request_id.partition("#")[0]
        self.late += [name for ended, _ in self.finished if ended == name]

    def on_finished(self, request_id: RequestId, why: str = "") -> None:
        self.finished.append((request_id.partition("#")[0], why))

    def on_refused(self, error: BaseException) -> None:
        self.refused.append(type(error).__name__)


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def observers(ends: Ends) -> list[RequestObserver]:
    return [ends]


def _broken(*_: object, **__: object) -> Any:
    raise RuntimeError("forced")


async def test_base_and_adapters_at_once_equal_each_alone(engine, store, alone) -> None:
    keys = [None, *(store.resolve(n).key for n in NAMES)]
    answers = await asyncio.gather(*(ask(engine, key) for key in keys))
    assert [tokens(outputs) for outputs in answers] == [alone(PROMPT, GREEDY, name) for name in (None, *NAMES)]
    assert len({str(tokens(outputs)) for outputs in answers}) == 4, "each adapter must say something of its own"
    assert [outputs[-1].timing.tier for outputs in answers] == [None, *[AdapterTier.DISK] * 3]
    assert (await ask(engine, keys[1]))[-1].timing.tier is AdapterTier.RESIDENT


async def test_what_can_never_fit_is_refused(engine) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"512 tokens.*513: 45 of the prompt and 468"):
        await engine.add(PROMPT, SamplingParams(max_tokens=468))
    await (await engine.add(PROMPT, SamplingParams(max_tokens=467, temperature=0.0))).aclose()


async def test_a_text_that_can_never_fit_is_not_tokenized(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of this many characters none is left out, and the longest token has fewer than they would need.
    longest = max(len(engine.tokenizer.token(i) or "") for i in range(engine.tokenizer.vocab_size))
    assert engine.tokenizer.least_tokens("aaaa") <= len(engine.tokenizer.encode("aaaa", add_special_tokens=False))
    monkeypatch.setattr(engine.tokenizer, "encode", _broken)
    with pytest.raises(ContextLengthExceeded, match="512 tokens, but the text of prompt has at least"):
        await engine.add("a" * (4 * longest * 513), GREEDY)


async def test_a_missed_wake_up_delays_a_request_by_a_moment_only(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(await ask(engine, None))
    monkeypatch.setattr(engine_thread, "MAX_WAIT_S", 0.001)
    monkeypatch.setattr(EngineCore, "made_progress", False)
    assert tokens(await ask(engine, None)) == expected


@pytest.mark.engine(pages=19)
async def test_without_max_tokens_a_small_pool_is_the_limit(engine) -> None:
    last = (await ask(engine, None, sampling=SamplingParams(temperature=0.0, ignore_eos=True)))[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert len(PROMPT) + last.num_generated_tokens == 19 * engine.page_size_tokens < 512


def _damaged(store: AdapterStore, root: Path) -> AdapterKey:
    """Flip a bit of the stored weights."""
    key = store.resolve("two").key
    blob = next(p for p in root.rglob("*") if p.name.endswith(store.spec(key).weights_digest))
    data = bytearray(blob.read_bytes())
    data[-3] ^= 1
    blob.chmod(0o600)
    blob.write_bytes(data)
    return key


def _overflowing(store: AdapterStore, folder: Path, scratch: Path) -> AdapterKey:
    """Register weights whose products are no numbers."""
    peft = read_peft_dir(folder)
    huge = {name: torch.full_like(t, 1e30) for name, t in load_file(peft.weights_path).items()}
    save_file(huge, scratch / "huge.safetensors")
    return store.register("huge", peft.config, store.add_blob(scratch / "huge.safetensors")).ref.key


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [("damaged", AdapterCorrupt, "damaged"), ("overflowing", AdapterLoadFailed, "NaN or infinity")],
)
async def test_a_bad_adapter_fails_its_own_requests_only(
    engine, store, adapter_dirs, tmp_path: Path, fault: str, error: type[Exception], words: str
) -> None:
    bad = _damaged(store, tmp_path) if fault == "damaged" else _overflowing(store, adapter_dirs["one"], tmp_path)
    for sampling in (GREEDY, SamplingParams(max_tokens=5, top_p=0.9, min_p=0.1, seed=1)):
        asked = (ask(engine, store.resolve("one").key), ask(engine, bad, sampling=sampling))
        good, failed = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(failed, error)
        assert words in str(failed)
        assert str(tmp_path) not in str(failed)
        assert len(tokens(good)) == 20


@pytest.mark.engine(dies=True)
async def test_a_dead_engine_ends_every_stream_and_refuses_new_ones(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [await engine.add(PROMPT, LONG) for _ in range(3)]
    await anext(streams[0])
    monkeypatch.setattr(engine._engine, "step", _broken)
    for stream in streams:
        with pytest.raises(EngineDead):
            await collect(stream)
    with pytest.raises(EngineDead):
        await engine.add(PROMPT, GREEDY)


@pytest.mark.engine(dies=True)
async def test_shutdown_ends_streams_with_an_error(engine) -> None:
    stream = await engine.add(PROMPT, LONG)
    await anext(stream)
    await engine.shutdown()
    with pytest.raises(EngineDead, match="shutting down"):
        await collect(stream)


@pytest.mark.engine(dies=True)
async def test_what_was_computed_before_a_shutdown_is_told(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, step, deliver = Counter[str](), engine._engine.step, engine._deliver_outputs

    def stepped() -> Any:
        outputs = step()
        counts["computed"] += len(outputs)
        return outputs

    def delivered(outputs: Any) -> None:
        counts["told"] += len(outputs)
        deliver(outputs)

    monkeypatch.setattr(engine._engine, "step", stepped)
    monkeypatch.setattr(engine, "_deliver_outputs", delivered)
    stream = await engine.add(PROMPT, LONG)
    await anext(stream)
    await engine.shutdown()
    assert counts["told"] == counts["computed"] > 0


@pytest.mark.engine(dies=True)
async def test_a_death_while_a_request_is_admitted_is_told(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine dies between the first look and the inbox: the request must not wait for ever."""
    admit = engine.input_processor.processor.process_choices

    def die(*arguments: object, **options: object) -> object:
        engine.error = "died meanwhile"
        return admit(*arguments, **options)

    monkeypatch.setattr(engine.input_processor.processor, "process_choices", die)
    with pytest.raises(EngineDead, match="meanwhile"):
        await engine.add(PROMPT, GREEDY)


async def test_a_seed_repeats_and_no_seed_does_not(engine) -> None:
    free = replace(GREEDY, temperature=1.5)
    seeded = replace(free, seed=42)
    alone = tokens(await ask(engine, None, sampling=seeded))
    mixed = await asyncio.gather(*(ask(engine, None, sampling=p) for p in (free, seeded, free, seeded)))
    first, second, third, fourth = map(tokens, mixed)
    assert second == fourth == alone
    assert first != third


async def test_a_stop_string_ends_the_request_in_the_engine_too(engine) -> None:
    text = "".join(o.text for o in await ask(engine, None, sampling=LONG))
    stop = text[20:24]
    cut = await ask(engine, None, sampling=replace(LONG, stop=(stop,)))
    assert "".join(o.text for o in cut) == text[: text.index(stop)]
    assert (cut[-1].finish_reason, cut[-1].stop_reason) == (FinishReason.STOP, stop)
    await until(lambda: engine.metrics.stats().requests_finished_total == {"length": 1, "stop": 1})


async def test_outputs_are_handed_over_when_the_next_step_computes(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    events, loop, step = [], engine._thread._loop, engine._engine.step

    def noted() -> Any:
        events.append("begin")
        outputs = step()
        events.append(f"end with {len(outputs)}")
        return outputs

    def handed(call: Any, *args: Any) -> None:
        events.append("post")
        loop.call_soon_threadsafe(call, *args)

    monkeypatch.setattr(engine._engine, "step", noted)
    monkeypatch.setattr(engine._thread, "_loop", SimpleNamespace(call_soon_threadsafe=handed, is_closed=loop.is_closed))
    answer = await ask(engine, None, sampling=replace(GREEDY, max_tokens=4))
    first, end = events.index("end with 1"), len(events) - 1 - events[::-1].index("post")
    # Within the step behind it; the last token at once.
    told = events[first : end + 1]
    assert told == [*["end with 1", "begin", "post"] * (len(answer) - 1), "end with 1", "post"]


async def test_pages_get_memory_while_nobody_waits(
    model: Path, store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of the pool gets it, each piece once. A request waits for the piece that is under way, not for all."""
    engine = AsyncEngine.build(engine_config(model, pages=20_000), store)
    layout, pieces = engine._engine._memory.layout, list[tuple[int, int, int]]()
    total = layout.num_slabs * (layout.num_pages // AHEAD_SHARE // (PIECE_BYTES // layout.page_bytes))

    def commit(*piece: int) -> None:
        time.sleep(0.1)
        pieces.append(piece)

    monkeypatch.setattr(engine._executor, "commit_pages", commit)
    async with running(engine):
        await until(lambda: pieces)
        assert await ask(engine, None, PROMPT)
        assert len(pieces) < total
        await until(lambda: len(pieces) == total)
        await asyncio.sleep(0.3)
    assert len(set(pieces)) == total == len(pieces)
    assert {piece[0] for piece in pieces} == set(range(layout.num_slabs))


async def test_a_piece_that_gets_no_memory_in_time_is_noticed(
    model: Path, store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests wait for it, so the watchdog must see it; an engine that waits for work is at rest."""
    engine = AsyncEngine.build(engine_config(model, pages=20_000), store)
    begun, ended = threading.Event(), threading.Event()

    def commit(*_: int) -> None:
        begun.set()
        assert ended.wait(30)

    monkeypatch.setattr(engine._executor, "commit_pages", commit)
    async with running(engine):
        await until(begun.is_set)
        await until(lambda: engine.heartbeat.is_stuck(0.01))
        ended.set()
        await until(lambda: engine.heartbeat._since_s is None)


async def test_a_label_may_be_used_twice_and_answers_do_not_mix(engine) -> None:
    first = await engine.add(PROMPT, GREEDY, request_id="same")
    second = await engine.add(PROMPT[:5], GREEDY, request_id="same")
    await first.aclose()
    assert len(tokens(await collect(second))) == 20


async def test_a_slow_disk_delays_no_other_request(engine, store, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests wait for the header of an adapter."""
    key, spec, go_on = store.resolve("one").key, store.spec, threading.Event()

    def slow(asked: AdapterKey) -> AdapterSpec:
        assert go_on.wait(30)
        return spec(asked)

    monkeypatch.setattr(store, "spec", slow)
    waiting = [asyncio.ensure_future(ask(engine, key)) for _ in range(3 * NUM_READERS)]
    for _ in range(3):
        assert len(tokens(await ask(engine, None))) == 20
    assert not any(one.done() for one in waiting)
    go_on.set()
    assert {len(tokens(one)) for one in await asyncio.gather(*waiting)} == {20}


@pytest.mark.engine(max_num_seqs=1, max_num_queued_seqs=1)
async def test_more_requests_than_may_be_queued_are_told_to_come_back(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run are not queued."""
    first = await engine.add(PROMPT, LONG)
    await anext(first)
    second = await engine.add(PROMPT, LONG)
    with pytest.raises(EngineOverloaded, match="1 requests are queued already; --max-num-queued-seqs is 1") as caught:
        await engine.add(PROMPT, GREEDY, RequestOptions(principal="ann"))
    assert caught.value.retry_after_s >= 1.0
    assert list(engine.queue_limiter._retry_at_s) == ["ann"], "what it was told is its own"
    with pytest.raises(EngineOverloaded, match="max-num-queued-seqs is 1"):
        engine.check_admission("bob")
    assert engine.request_stats.rejected == {"engine_overloaded": 2}, "refused early, and counted all the same"
    with monkeypatch.context() as patch:
        patch.setattr(engine, "error", "died")
        engine.check_admission("bob")
    await second.aclose()
    await first.aclose()
    await until(lambda: engine.metrics.stats().requests_finished_total == {"abort": 2})
    assert len(tokens(await ask(engine, None))) == 20
    assert engine.queue_limiter.num_tokens == engine.queue_limiter.num_queued() == 0


async def test_only_the_engine_thread_computes_in_parallel(engine, store, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, seen = engine._engine._parts.executor.runner, []
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda *step: seen.append(torch.get_num_threads()) or run(*step))
    await ask(engine, store.resolve("one").key)
    loader = engine._engine._loader
    assert isinstance(loader, ThreadedLoader)
    assert loader._load_threads.submit("a", torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == 1, "this thread has built the model"
    assert set(seen) == {ENGINE_THREADS}


async def test_requests_are_recorded(model: Path, store: AdapterStore, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with TraceRecorder(trace) as recorder:
        built = AsyncEngine.build(engine_config(model), store, observers=[recorder])
        async with running(built, dies=True) as engine:
            who = RequestOptions(adapter_key=store.resolve("one").key, adapter_id="one", principal="me")
            for stream in await engine.add_choices(PROMPT, GREEDY, 2, who):
                await collect(stream)
            leaving = await engine.add(PROMPT, replace(GREEDY, max_tokens=200))
            await anext(leaving)
            await leaving.aclose()
            ended = (await ask(engine, None, sampling=replace(LONG, stop=("e", "a", " "))))[-1]
            # Cut off by the end of the engine: left out.
            await anext(await engine.add(PROMPT, LONG))
            engine.abort_all("over")
    first, second, left, stopped = read_trace(trace)
    for choice in (first, second):
        assert (choice.adapter, choice.key, choice.finish, choice.tier) == ("one", "me", "length", AdapterTier.DISK)
        assert (choice.prompt_tokens, choice.output_tokens, choice.max_tokens) == (len(PROMPT), 20, 20)
        assert choice.adapter_bytes
        assert 0 < choice.ttft_ms < choice.total_ms
    assert (left.adapter, left.finish, left.max_tokens) == (None, "abort", 200)
    assert (stopped.finish, stopped.output_tokens) == (ended.finish_reason, ended.num_generated_tokens)
    assert first.arrival_s <= left.arrival_s <= stopped.arrival_s


async def test_requests_are_counted(engine, store) -> None:
    key = store.resolve("one").key
    assert await engine.tier(key) is AdapterTier.DISK
    for stream in await engine.add_choices(
        PROMPT, GREEDY, 2, RequestOptions(adapter_key=key, adapter_id="one"), versions=[("one", 1)]
    ):
        assert len(tokens(await collect(stream))) == 20
    left = await engine.add(PROMPT, LONG)
    await anext(left)
    await left.aclose()
    await until(lambda: engine.metrics.stats().requests_finished_total == {"length": 2, "abort": 1})
    assert engine.metrics.stats().generated_tokens_total < 400
    assert await engine.tier(key) is AdapterTier.RESIDENT
    traffic = engine.request_stats
    account = traffic.of("one")
    assert (account.key, account.requests, account.tokens) == (key, 2, 40)
    assert (traffic.total.requests, traffic.of("").requests) == (3, 1)
    assert sum(traffic.first_token.counts) == 3
    assert traffic.request.count == 2, "an aborted request is no answer"
    assert traffic.inter_token.count >= 2 * 19
    assert traffic.aborted == {"client": 1}
    assert not traffic._open


@pytest.mark.engine(dies=True)
@pytest.mark.parametrize(("kind", "cause"), [(EngineDead, "engine_dead"), (ServerStopping, "server_stopping")])
async def test_observers_are_told_once_of_each_end(
    engine, store, ends, monkeypatch: pytest.MonkeyPatch, kind: type[EngineDead], cause: str
) -> None:
    """However a request ends, and after its last output; one that is not accepted is told once."""
    key = store.resolve("one").key
    whole = await engine.add(PROMPT, GREEDY, request_id="whole")
    text = "".join(output.text for output in await collect(whole))
    await whole.aclose()
    stopped = await ask(engine, None, sampling=replace(GREEDY, stop=(text[2:4],)), request_id="stopped")
    assert stopped[-1].stop_reason == text[2:4]
    left = await engine.add(PROMPT, LONG, request_id="left")
    await anext(left)
    await left.aclose()
    await left.aclose()
    deleted = await engine.add(
        PROMPT, LONG, RequestOptions(adapter_key=key, adapter_id="one"), request_id="deleted", versions=[("one", 1)]
    )
    assert engine.in_flight.abort_adapter("one", [1]) == 1
    with pytest.raises(AdapterDeleted):
        await anext(deleted)
    garbled = await engine.add(PROMPT, LONG, request_id="garbled")
    monkeypatch.setattr(garbled._processor, "process", _broken)
    with pytest.raises(RuntimeError, match="forced"):
        await anext(garbled)
    with pytest.raises(InvalidRequest):
        await engine.add([], GREEDY, request_id="refused")
    cut = await engine.add_choices(PROMPT, LONG, 2, request_id="cut")
    engine.abort_all("over", kind)
    with pytest.raises(EngineDead):
        await engine.add(PROMPT, GREEDY, request_id="dead")
    for stream in cut:
        await stream.aclose()
    assert ends.finished == [
        ("whole", ""),
        ("stopped", ""),
        ("left", "client"),
        ("deleted", "adapter_deleted"),
        ("garbled", "runtime_error"),
        ("cut", cause),
        ("cut", cause),
    ]
    assert ends.accepted == [name for name, _ in ends.finished]
    assert ends.refused == ["InvalidRequest", "EngineDead"]
    assert ends.late == []
    assert engine.request_stats.aborted == {"client": 1, "adapter_deleted": 1, "runtime_error": 1, cause: 2}


@pytest.mark.engine(dies=True)
@pytest.mark.parametrize("end", ["shutdown", "death"])
async def test_the_end_of_the_engine_leaves_no_aborted_request(
    engine, ends, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Whether the engine has heard of the abort or not, and whatever comes of it."""
    left, queued = [await engine.add(PROMPT, LONG, request_id=name) for name in ("left", "queued")]
    await anext(left)
    monkeypatch.setattr(engine._thread, "_deliver", lambda *_: None)
    await left.aclose()
    await until(lambda: engine.metrics.stats().requests_finished_total == {"abort": 1})
    assert ends.finished == []
    if end == "death":
        monkeypatch.setattr(engine._engine, "step", _broken)
    await queued.aclose("why it left")
    await queued.aclose("another reason")
    if end == "shutdown":
        await engine.shutdown()
    await until(lambda: not engine._streams)
    assert sorted(ends.finished) == [("left", "client"), ("queued", "why it left")]
    assert engine.request_stats.aborted == {"client": 1, "why it left": 1}
    assert not list(engine.request_stats.open())
    assert not engine.in_flight.by_adapter
    assert engine.queue_limiter.num_tokens == 0


class Unwritable(dict[RequestId, RequestStream]):
    """Takes one stream, and fails."""

    def update(self, streams: Iterable[tuple[RequestId, RequestStream]]) -> None:  # type: ignore[override]
        self.__setitem__(*next(iter(streams)))
        raise KeyboardInterrupt


@pytest.mark.parametrize("point", ["stream", "registry", "observer", "prefetch", "inbox"])
async def test_a_request_that_fails_on_its_way_to_the_engine_leaves_nothing(
    engine, store, ends, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Wherever it fails, and whatever is thrown: deleting its adapter does not wait, and no queue counts it."""

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    key, opened, stream, inbox = store.resolve("one").key, iter([0, 1]), engine._stream, engine._inbox
    owner, name, fault = {
        # The second choice of two.
        "stream": (engine, "_stream", lambda request: fail() if next(opened) else stream(request)),
        "registry": (engine, "_streams", Unwritable()),
        "observer": (engine.request_stats, "on_accepted", fail),
        "prefetch": (engine._loader, "prefetch", fail),
        "inbox": (engine, "_inbox", SimpleNamespace(put=fail, get=inbox.get, empty=inbox.empty)),
    }[point]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fault)
        with pytest.raises(KeyboardInterrupt):
            await engine.add_choices(
                PROMPT, GREEDY, 2, RequestOptions(adapter_key=key, adapter_id="one"), versions=[("one", 1)]
            )
        assert await engine.in_flight.until_unused("one", [1], 0.0) == 0
        assert not engine._streams
    assert not engine.request_stats._open
    assert engine.queue_limiter.num_tokens == 0
    assert ends.refused == ["KeyboardInterrupt"]
    assert len(tokens(await ask(engine, key))) == 20
    await until(lambda: engine.queue_limiter._num_sent == engine.metrics.stats().requests_arrived_total)
    assert engine.queue_limiter.num_queued() == 0


async def test_a_late_reader_finds_everything_in_few_outputs(engine) -> None:
    sampling = replace(LONG, logprobs=1)
    # Both find the prompt's pages there: a shorter prompt to compute may be rounded otherwise.
    await ask(engine, None, sampling=replace(GREEDY, max_tokens=1))
    prompt = await ask(engine, None, sampling=sampling)
    stream = await engine.add(PROMPT, sampling)
    await until(lambda: engine.metrics.stats().requests_finished_total == {"length": 3})
    late = await collect(stream)
    for name in ("token_ids", "logprobs", "text_offsets"):
        assert [x for o in late for x in getattr(o, name)] == [x for o in prompt for x in getattr(o, name)], name
    assert "".join(o.text for o in late) == "".join(o.text for o in prompt)
    assert [len(o.token_ids) for o in late[:MAX_SINGLE]][:-1] == [1] * (MAX_SINGLE - 1)
    assert (late[-1].finished, late[-1].num_generated_tokens) == (True, 400)
    assert len(late) < MAX_SINGLE + 400 // JOINED_TOKENS + 2 < len(prompt)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_start_waits_for_the_warm_up_and_for_no_dead_engine(
    fails: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let, warm_up = threading.Event(), EngineCore.bind_thread

    def held(core: EngineCore, *arguments: Any) -> None:
        let.wait(60)
        if fails:
            raise RuntimeError("forced")
        warm_up(core, *arguments)

    monkeypatch.setattr(EngineCore, "bind_thread", held)
    async with running(AsyncEngine.build(engine_config(model)), dies=fails) as engine:
        warmed = asyncio.create_task(engine.warmed())
        await asyncio.sleep(0)
        assert not warmed.done()
        let.set()
        await warmed
