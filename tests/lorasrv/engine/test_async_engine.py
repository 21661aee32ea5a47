"""The engine behind an event loop, on a tiny model with real adapters: every accepted request ends exactly once."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adapter_store.errors import AdapterCorrupt
from adapter_store.spec import AdapterKey, AdapterSpec
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.engine.input_processor import NUM_READERS
from lorasrv.engine.output_processor import JOINED_TOKENS, MAX_SINGLE, RequestStream
from lorasrv.errors import (
    AdapterDeleted,
    AdapterLoadFailed,
    ContextLengthExceeded,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    PoisonRequest,
    RequestTimeout,
)
from lorasrv.llm import LLM
from lorasrv.metrics.request_observer import RequestObserver
from lorasrv.metrics.trace import read_trace
from lorasrv.metrics.trace_recorder import TraceRecorder
from lorasrv.outputs import AdapterTier, FinishReason, RequestId, RequestOutput
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.adapter_loader import ThreadedLoader
from lorasrv.worker.device import ENGINE_THREADS

NAMES = ("one", "two", "three")
PROMPT = list(range(10, 30))
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def _config(model: Path, pool_bytes: int = 4 << 20) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(model=str(model), quantization="none", dtype="float32"),
        memory=MemoryOptions(pool_bytes=pool_bytes),
    )


@pytest.fixture
def serve(model: Path, store: AdapterStore) -> Callable[..., None]:
    """serve(scenario) runs `await scenario(engine)` with a live engine, then checks that nothing is held any more."""

    def run(
        scenario: Callable[[AsyncEngine], Awaitable[None]],
        *,
        settles: bool = True,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        async def main() -> None:
            engine = AsyncEngine.build(_config(model), store, observers=observers)
            await engine.start()
            try:
                await scenario(engine)
                if settles:
                    await _settled(engine)
            finally:
                await engine.shutdown()
            engine._engine.check_integrity()

        asyncio.run(main())

    return run


async def _settled(engine: AsyncEngine) -> None:
    for _ in range(500):
        snapshot = engine.metrics.snapshot()
        if not snapshot.requests_running + snapshot.requests_waiting + snapshot.requests_waiting_for_adapter:
            break
        await asyncio.sleep(0.01)
    assert snapshot.pages_kv == 0
    assert snapshot.requests_running == snapshot.requests_waiting == 0


async def _collect(engine: AsyncEngine, sampling: SamplingParams, key: AdapterKey | None) -> list[RequestOutput]:
    return [output async for output in engine.generate(PROMPT, sampling, adapter=key)]


def _tokens(outputs: list[RequestOutput]) -> list[int]:
    assert [o.finished for o in outputs].count(True) == 1
    assert outputs[-1].finished
    return [token for output in outputs for token in output.token_ids]


def test_base_and_adapters_at_once_equal_each_alone(serve, store, model, adapter_dirs) -> None:
    with LLM(str(model), _config(model)) as llm:
        for name, folder in adapter_dirs.items():
            llm.add_adapter(name, folder)
        alone = [list(llm.generate([PROMPT], GREEDY, [n])[0].token_ids) for n in (None, *NAMES)]
    assert len({tuple(tokens) for tokens in alone}) == 4, "each adapter must say something of its own"

    async def scenario(engine: AsyncEngine) -> None:
        keys = [None, *(store.resolve(n).key for n in NAMES)]
        answers = await asyncio.gather(*(_collect(engine, GREEDY, key) for key in keys))
        assert [_tokens(outputs) for outputs in answers] == alone
        assert [outputs[-1].timing.tier for outputs in answers] == [None, *[AdapterTier.DISK] * 3]
        again = await _collect(engine, GREEDY, keys[1])
        assert again[-1].timing.tier is AdapterTier.RESIDENT

    serve(scenario)


def test_closing_a_stream_aborts_it(serve, store) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        endless = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        stream = await engine.add(PROMPT, endless, adapter=store.resolve("one").key)
        await anext(stream)
        await stream.aclose()
        await _settled(engine)
        assert engine.metrics.snapshot().requests_finished_total == {"abort": 1}
        assert engine.metrics.snapshot().generated_tokens_total < 400

    serve(scenario)


def test_refusals_name_the_field_and_the_numbers(serve) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequest, match="empty"):
            await engine.add([], GREEDY)
        with pytest.raises(InvalidRequest, match=r"\[0, 384\)"):
            await engine.add([5, 384], GREEDY)
        with pytest.raises(InvalidRequest):
            await engine.add([-1], GREEDY)
        with pytest.raises(ContextLengthExceeded, match=r"512 tokens.*521: 20 of the prompt and 501"):
            await engine.add(PROMPT, SamplingParams(max_tokens=501))
        exactly = await engine.add(PROMPT, SamplingParams(max_tokens=492, temperature=0.0))
        await exactly.aclose()

    serve(scenario)


def test_a_request_larger_than_the_pool_is_refused(model: Path) -> None:
    engine = AsyncEngine.build(_config(model, pool_bytes=120_000))

    async def main() -> None:
        await engine.start()
        with pytest.raises(ContextLengthExceeded, match=r"pool has .* pages, but the request needs"):
            await engine.add(PROMPT, SamplingParams(max_tokens=400))
        await engine.shutdown()

    asyncio.run(main())


def test_a_damaged_adapter_fails_its_own_requests_only(serve, store, tmp_path: Path) -> None:
    key = store.resolve("two").key
    blob = next(p for p in (tmp_path / "store").rglob("*") if p.name.endswith(store.spec(key).weights_digest))
    data = bytearray(blob.read_bytes())
    data[-3] ^= 1
    blob.chmod(0o600)
    blob.write_bytes(data)

    async def scenario(engine: AsyncEngine) -> None:
        good, bad = await asyncio.gather(
            _collect(engine, GREEDY, store.resolve("one").key),
            _collect(engine, GREEDY, key),
            return_exceptions=True,
        )
        assert isinstance(bad, AdapterCorrupt)
        assert "damaged" in str(bad)
        assert str(tmp_path) not in str(bad)
        assert isinstance(good, list)
        assert len(_tokens(good)) == 12
        assert engine.is_alive

    serve(scenario)


def test_a_dead_engine_ends_every_stream_and_refuses_new_ones(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        streams = [await engine.add(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True)) for _ in range(3)]
        await anext(streams[0])
        monkeypatch.setattr(engine._engine, "step", _broken)
        for stream in streams:
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
        assert not engine.is_alive
        with pytest.raises(EngineDead):
            await engine.add(PROMPT, GREEDY)

    serve(scenario, settles=False)


def _broken(*_: object) -> None:
    raise RuntimeError("forced")


def test_shutdown_ends_streams_with_an_error(model: Path) -> None:
    engine = AsyncEngine.build(_config(model))

    async def main() -> None:
        await engine.start()
        stream = await engine.add(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(stream)
        await engine.shutdown()
        with pytest.raises(EngineDead, match="shutting down"):
            async for _ in stream:
                pass

    asyncio.run(main())


def test_a_seed_repeats_and_no_seed_does_not(serve) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        seeded = SamplingParams(max_tokens=12, temperature=1.5, seed=42, ignore_eos=True)
        free = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)
        alone = _tokens(await _collect(engine, seeded, None))
        mixed = await asyncio.gather(*(_collect(engine, p, None) for p in (free, seeded, free, seeded)))
        tokens = [_tokens(outputs) for outputs in mixed]
        assert tokens[1] == tokens[3] == alone
        assert tokens[0] != tokens[2]

    serve(scenario)


def test_a_stop_string_ends_the_request_in_the_engine_too(serve) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        whole = await _collect(engine, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True), None)
        text = "".join(o.text for o in whole)
        stop = text[20:24]
        cut = await _collect(
            engine, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, stop=(stop,)), None
        )
        assert "".join(o.text for o in cut) == text[: text.index(stop)]
        assert cut[-1].finish_reason is FinishReason.STOP
        assert cut[-1].stop_reason == stop
        await _settled(engine)
        assert engine.metrics.snapshot().requests_finished_total == {"length": 1, "stop": 1}

    serve(scenario)


def test_a_label_may_be_used_twice_and_answers_do_not_mix(serve) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        first = await engine.add(PROMPT, GREEDY, request_id="same")
        second = await engine.add(PROMPT[:5], GREEDY, request_id="same")
        await first.aclose()
        assert len(_tokens([output async for output in second])) == 12

    serve(scenario)


def test_weights_that_overflow_fail_their_own_request_only(serve, store, adapter_dirs, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from adapter_store.formats.peft_dir import read_peft_dir

    peft = read_peft_dir(adapter_dirs["one"])
    huge = {name: torch.full_like(t, 1e30) for name, t in load_file(peft.weights_path).items()}
    save_file(huge, tmp_path / "huge.safetensors")
    key = store.register("huge", peft.config, store.add_blob(tmp_path / "huge.safetensors")).ref.key

    async def scenario(engine: AsyncEngine) -> None:
        for sampling in (GREEDY, SamplingParams(max_tokens=5, top_p=0.9, min_p=0.1, seed=1)):
            good, bad = await asyncio.gather(
                _collect(engine, GREEDY, None), _collect(engine, sampling, key), return_exceptions=True
            )
            assert isinstance(bad, AdapterLoadFailed)
            assert "NaN or infinity" in str(bad)
            assert isinstance(good, list)
            assert len(_tokens(good)) == 12
        assert engine.is_alive

    serve(scenario)


def test_a_slow_disk_holds_up_nobody_else(serve, store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests wait for the header of an adapter; and their own time runs meanwhile."""
    key, spec, go_on = store.resolve("one").key, store.spec, threading.Event()

    def slow(asked: AdapterKey) -> AdapterSpec:
        assert go_on.wait(30)
        return spec(asked)

    monkeypatch.setattr(store, "spec", slow)

    async def scenario(engine: AsyncEngine) -> None:
        waiting = [asyncio.ensure_future(_collect(engine, GREEDY, key)) for _ in range(3 * NUM_READERS)]
        for _ in range(3):
            assert len(_tokens(await _collect(engine, GREEDY, None))) == 12
        with pytest.raises(RequestTimeout, match=r"timeout_s, 0\.05 s"):
            await engine.add(PROMPT, GREEDY, adapter=key, adapter_id="one", timeout_s=0.05)
        engine.input_processor._queue_timeout_s = 0.01
        for timeout_s in (None, 5.0):
            with pytest.raises(RequestTimeout, match=r"the server's queue timeout of 0\.01 s"):
                await engine.add(PROMPT, GREEDY, adapter=key, adapter_id="one", timeout_s=timeout_s)
        assert not any(one.done() for one in waiting)
        go_on.set()
        for one in await asyncio.gather(*waiting):
            assert len(_tokens(one)) == 12
        engine._engine.check_integrity()

    serve(scenario)


def test_a_death_while_a_request_is_admitted_is_told(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine dies between the first look and the inbox: the request must not wait for ever."""

    async def scenario(engine: AsyncEngine) -> None:
        admit = engine.input_processor.process_choices

        def die(*arguments: object, **options: object) -> object:
            engine.error = "died meanwhile"
            return admit(*arguments, **options)

        monkeypatch.setattr(engine.input_processor, "process_choices", die)
        with pytest.raises(EngineDead, match="meanwhile"):
            await engine.add(PROMPT, GREEDY)

    serve(scenario, settles=False)


def test_more_requests_than_may_be_queued_are_told_to_come_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run are not queued."""
    config = replace(_config(model), scheduler=SchedulerOptions(max_num_seqs=1, max_num_queued_seqs=1))
    engine = AsyncEngine.build(config)
    long = SamplingParams(max_tokens=400, ignore_eos=True)

    async def main() -> None:
        await engine.start()
        first = await engine.add(PROMPT, long)
        await anext(first)
        second = await engine.add(PROMPT, long)
        with pytest.raises(
            EngineOverloaded, match="1 requests are queued already; --max-num-queued-seqs is 1"
        ) as caught:
            await engine.add(PROMPT, GREEDY, principal="ann")
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
        await _settled(engine)
        assert len([output async for output in engine.generate(PROMPT, GREEDY)]) == 12
        assert engine.queue_limiter.num_tokens == engine.queue_limiter.num_queued() == 0
        await engine.shutdown()

    asyncio.run(main())


def test_a_text_that_can_never_fit_is_not_tokenized(serve, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Online and offline."""

    async def scenario(engine: AsyncEngine) -> None:
        # Of this many characters none is left out, and the longest token has fewer than they would need.
        longest = max(len(engine.tokenizer.token(i) or "") for i in range(engine.tokenizer.vocab_size))
        with monkeypatch.context() as patch:
            patch.setattr(engine.tokenizer, "encode", _broken)
            with pytest.raises(ContextLengthExceeded, match=f"{engine.max_model_len} tokens, .* at least"):
                await engine.add("a" * (4 * longest * (engine.max_model_len + 1)), GREEDY)
            with LLM(str(model), _config(model)) as llm:
                patch.setattr(llm.tokenizer, "encode", _broken)
                with pytest.raises(ContextLengthExceeded, match="tokens, but the text has at least"):
                    llm.generate(["a" * (4 * longest * (engine.max_model_len + 1))], GREEDY)
        assert engine.tokenizer.least_tokens("aaaa") <= len(engine.tokenizer.encode("aaaa", add_special_tokens=False))

    serve(scenario)


def test_only_the_engine_thread_computes_in_parallel(serve, store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        run, seen = engine._engine._parts.executor.runner.run, []
        monkeypatch.setattr(
            engine._engine._parts.executor.runner,
            "run",
            lambda *step: seen.append(torch.get_num_threads()) or run(*step),
        )
        await _collect(engine, GREEDY, store.resolve("one").key)
        loader = engine._engine._loader
        assert isinstance(loader, ThreadedLoader)
        assert loader._load_threads.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 1, "this thread has built the model"
        assert set(seen) == {ENGINE_THREADS}

    serve(scenario)


def test_offline_refuses_what_the_server_refuses_and_survives_it(model: Path) -> None:
    with LLM(str(model), _config(model)) as llm:
        with pytest.raises(InvalidRequest, match=r"\[0, 384\)"):
            llm.generate([[384]], GREEDY)
        with pytest.raises(InvalidRequest, match="empty"):
            llm.generate([PROMPT, []], GREEDY)
        for _ in range(2):
            llm.engine.poison.record([llm.input_processor.process(RequestId("bad"), PROMPT[1:], GREEDY)])
        with pytest.raises(PoisonRequest, match="2 times"):
            llm.generate([PROMPT, PROMPT[1:]], GREEDY)
        assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 12
        llm.engine.check_integrity()


def test_an_interrupted_generate_leaves_nothing_behind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(model), _config(model)) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm, "_step", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT] * 3, GREEDY)
        assert not llm.engine.has_requests
        assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 12


def _interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_without_max_tokens_a_small_pool_is_the_limit(model: Path) -> None:
    engine = AsyncEngine.build(_config(model, pool_bytes=240_000))

    async def main() -> None:
        await engine.start()
        outputs = [o async for o in engine.generate(PROMPT, SamplingParams(temperature=0.0, ignore_eos=True))]
        snapshot = engine.metrics.snapshot()
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert len(PROMPT) + outputs[-1].num_generated_tokens == snapshot.pages_total * engine.page_size_tokens < 512
        await engine.shutdown()

    asyncio.run(main())


def test_what_is_served_is_recorded(serve, store, tmp_path) -> None:
    key = store.resolve("one").key

    async def scenario(engine: AsyncEngine) -> None:
        streams = await engine.add_choices(PROMPT, GREEDY, 2, adapter=key, adapter_id="one", principal="me")
        for stream in streams:
            assert [output async for output in stream][-1].finished
        leaving = await engine.add(PROMPT, replace(GREEDY, max_tokens=200))
        await anext(leaving)
        await leaving.aclose()
        stopping = replace(GREEDY, stop=("e", "a", " "), max_tokens=60)
        ended = [output async for output in engine.generate(PROMPT, stopping)][-1]
        # Cut off by the end of the engine: left out.
        await anext(await engine.add(PROMPT, replace(GREEDY, max_tokens=400)))
        engine.abort_all("over")
        first, second, left, stopped = read_trace(tmp_path / "trace.jsonl")
        for choice in (first, second):
            assert (choice.adapter, choice.key, choice.finish) == ("one", "me", "length")
            assert (choice.prompt_tokens, choice.output_tokens, choice.max_tokens) == (len(PROMPT), 12, 12)
            assert choice.tier is AdapterTier.DISK
            assert choice.adapter_bytes
            assert 0 < choice.ttft_ms < choice.total_ms
        assert (left.adapter, left.finish, left.max_tokens) == (None, "abort", 200)
        assert (stopped.finish, stopped.output_tokens) == (ended.finish_reason, ended.num_generated_tokens)
        assert first.arrival_s <= left.arrival_s <= stopped.arrival_s

    with TraceRecorder(tmp_path / "trace.jsonl") as recorder:
        serve(scenario, settles=False, observers=[recorder])


def test_what_is_asked_is_counted(serve, store) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        key = store.resolve("one").key
        assert await engine.tier(key) is AdapterTier.DISK
        streams = await engine.add_choices(PROMPT, GREEDY, 2, adapter=key, adapter_id="one")
        for stream in streams:
            assert len(_tokens([output async for output in stream])) == 12
        left = await engine.add(PROMPT, replace(GREEDY, max_tokens=200))
        await anext(left)
        await left.aclose()
        await _settled(engine)
        assert await engine.tier(key) is AdapterTier.RESIDENT
        traffic = engine.request_stats
        account = traffic.of("one")
        assert (account.key, account.requests, account.tokens) == (key, 2, 24)
        assert (traffic.total.requests, traffic.of("").requests) == (3, 1)
        assert sum(traffic.first_token.counts) == 3
        assert traffic.request.count == 2, "who left is no answer"
        assert traffic.inter_token.count >= 2 * 11
        assert traffic.aborted == {"client": 1}
        assert not traffic._open

    serve(scenario)


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


def test_each_accepted_request_ends_once_for_those_who_look_on(serve, store, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it ends, and after its last output; one that is not accepted is told once."""
    ends, key = Ends(), store.resolve("one").key
    long = replace(GREEDY, max_tokens=400)

    async def scenario(engine: AsyncEngine) -> None:
        whole = await engine.add(PROMPT, GREEDY, request_id="whole")
        assert len(_tokens([output async for output in whole])) == 12
        await whole.aclose()
        text = "".join([output.text async for output in engine.generate(PROMPT, GREEDY, request_id="again")])
        stopping = replace(GREEDY, stop=(text[2:4],))
        assert [o async for o in engine.generate(PROMPT, stopping, request_id="stopped")][-1].stop_reason == text[2:4]
        left = await engine.add(PROMPT, long, request_id="left")
        await anext(left)
        await left.aclose()
        await left.aclose()
        deleted = await engine.add(PROMPT, long, request_id="deleted", adapter=key, adapter_id="one")
        assert engine.in_flight.abort_adapter("one", [key]) == 1
        with pytest.raises(AdapterDeleted):
            await anext(deleted)
        garbled = await engine.add(PROMPT, long, request_id="garbled")
        monkeypatch.setattr(garbled._processor, "process", _broken)
        with pytest.raises(RuntimeError, match="forced"):
            await anext(garbled)
        with pytest.raises(InvalidRequest):
            await engine.add([], GREEDY, request_id="refused")
        cut = await engine.add_choices(PROMPT, long, 2, request_id="cut")
        engine.abort_all("over")
        with pytest.raises(EngineDead):
            await engine.add(PROMPT, GREEDY, request_id="dead")
        for stream in cut:
            await stream.aclose()
        assert ends.finished == [
            ("whole", ""),
            ("again", ""),
            ("stopped", ""),
            ("left", "client"),
            ("deleted", "adapter_deleted"),
            ("garbled", "runtime_error"),
            ("cut", "engine_dead"),
            ("cut", "engine_dead"),
        ]
        assert ends.accepted == [name for name, _ in ends.finished]
        assert ends.refused == ["InvalidRequest", "EngineDead"]
        assert ends.late == []
        assert engine.request_stats.aborted == {"client": 1, "adapter_deleted": 1, "runtime_error": 1, "engine_dead": 2}

    serve(scenario, settles=False, observers=[ends])


@pytest.mark.parametrize("point", ["stream", "registry", "observer", "prefetch", "inbox"])
def test_a_request_that_fails_on_its_way_to_the_engine_leaves_nothing(serve, store, monkeypatch, point: str) -> None:
    """Wherever it fails, and whatever is thrown: deleting its adapter does not wait, and no queue counts it."""
    key, ends = store.resolve("one").key, Ends()

    async def scenario(engine: AsyncEngine) -> None:
        def fail(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        opened, stream = iter([0, 1]), engine._stream
        with monkeypatch.context() as patch:
            match point:
                case "stream":
                    # The second choice of two.
                    patch.setattr(engine, "_stream", lambda request: fail() if next(opened) else stream(request))
                case "registry":
                    patch.setattr(engine, "_streams", Unwritable())
                case "observer":
                    patch.setattr(engine.request_stats, "on_accepted", fail)
                case "prefetch":
                    patch.setattr(engine._loader, "prefetch", fail)
                case "inbox":
                    patch.setattr(
                        engine, "_inbox", SimpleNamespace(put=fail, get=engine._inbox.get, empty=engine._inbox.empty)
                    )
            with pytest.raises(KeyboardInterrupt):
                await engine.add_choices(PROMPT, GREEDY, 2, adapter=key, adapter_id="one")
            assert await engine.in_flight.until_unused("one", [key], 0.0) == 0
            assert not engine._streams
        assert not engine.request_stats._open
        assert engine.queue_limiter.num_tokens == 0
        assert ends.refused == ["KeyboardInterrupt"]
        assert len(_tokens(await _collect(engine, GREEDY, key))) == 12
        await _settled(engine)
        assert engine.queue_limiter._num_sent == engine.metrics.snapshot().requests_arrived_total
        assert engine.queue_limiter.num_queued() == 0

    serve(scenario, observers=[ends])


class Unwritable(dict[RequestId, RequestStream]):
    """Takes one stream, and fails."""

    def update(self, streams: Iterable[tuple[RequestId, RequestStream]]) -> None:  # type: ignore[override]
        self.__setitem__(*next(iter(streams)))
        raise KeyboardInterrupt


def test_a_reader_who_is_late_finds_everything_in_few_outputs(serve) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        sampling = replace(GREEDY, max_tokens=400, logprobs=1)
        # Both find the prompt's pages there: a shorter prompt to compute may be rounded otherwise.
        await _collect(engine, replace(GREEDY, max_tokens=1), None)
        prompt = await _collect(engine, sampling, None)
        stream = await engine.add(PROMPT, sampling)
        while engine.metrics.snapshot().requests_finished_total != {"length": 3}:
            await asyncio.sleep(0.01)
        late = [output async for output in stream]
        for name in ("token_ids", "logprobs", "text_offsets"):
            assert [x for o in late for x in getattr(o, name)] == [x for o in prompt for x in getattr(o, name)], name
        assert "".join(o.text for o in late) == "".join(o.text for o in prompt)
        assert [len(o.token_ids) for o in late[:MAX_SINGLE]][:-1] == [1] * (MAX_SINGLE - 1)
        assert (late[-1].finished, late[-1].num_generated_tokens) == (True, 400)
        assert len(late) < MAX_SINGLE + 400 // JOINED_TOKENS + 2 < len(prompt)

    serve(scenario)
