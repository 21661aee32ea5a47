"""The pool's doings on a real model's memory: whatever is shared, copied, moved, swapped or brought back, the answer is
the one that a roomy engine without any of it gives."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from mispredict import expect_short_answers
from tiny_engine import BLOCK, GREEDY, LONG, PROMPT, ask, collect, offline_engine, tokens, until

from adapter_store.errors import AdapterNotFound
from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.spec import AdapterKey
from lorasrv.config import Limits, SchedulerOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.engine.core import EngineCore
from lorasrv.errors import AdapterCold, AdapterLoadFailed, InvalidRequest, RequestTimeout
from lorasrv.memory.adapter_manager import AdapterState
from lorasrv.memory.eviction import Moves
from lorasrv.outputs import AdapterTier, RequestId, RequestOutput
from lorasrv.request import OnCold
from lorasrv.sampling_params import SamplingParams


def _timing(outputs: list[RequestOutput]) -> Any:
    return outputs[-1].timing


def test_a_prompt_that_was_seen_is_not_computed_again(serve, store, alone) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        for name in (None, "two"):
            key = store.resolve(name).key if name else None
            first, again = await ask(engine, key), await ask(engine, key)
            assert _timing(first).num_cached_tokens == 0
            assert _timing(again).num_cached_tokens == 32
            assert tokens(first) == tokens(again) == alone(PROMPT, GREEDY, name)
            turn = [*PROMPT, *tokens(first), 5, 6]
            third = await ask(engine, key, turn)
            assert _timing(third).num_cached_tokens == 64, "the answer is part of the next turn's prompt"
            assert tokens(third) == alone(turn, GREEDY, name)
        salted = await ask(engine, None, cache_salt="tenant")
        assert _timing(salted).num_cached_tokens == 0
        assert tokens(salted) == alone(PROMPT, GREEDY, None)
        assert engine.metrics.snapshot().cached_tokens_total == 2 * 96

    serve(scenario)


@pytest.mark.parametrize("length", [1, 16, 45, *(pytest.param(n, marks=pytest.mark.long) for n in (15, 17, 48))])
@pytest.mark.parametrize("name", [pytest.param(None, marks=pytest.mark.long), "three"])
def test_choices_share_their_prompt_and_are_what_each_alone_would_be(serve, store, alone, name, length) -> None:
    sampling = SamplingParams(max_tokens=18, temperature=1.4, seed=70, ignore_eos=True)

    async def scenario(engine: AsyncEngine) -> None:
        key = store.resolve(name).key if name else None
        streams = await engine.add_choices(LONG[:length], sampling, 4, adapter=key)
        answers = await asyncio.gather(*(collect(stream) for stream in streams))
        expected = [alone(LONG[:length], replace(sampling, seed=70 + i), name) for i in range(4)]
        assert [tokens(answer) for answer in answers] == expected
        assert len({tuple(said) for said in expected}) == 4
        assert [_timing(answer).num_cached_tokens for answer in answers] == [0, *[length - 1] * 3]
        if length == 45:
            assert engine.metrics.snapshot().copied_pages_total == 3, "the last holder writes where it is"

    serve(scenario, scheduler=SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=32))


def test_a_choice_goes_on_when_the_first_one_leaves(serve, alone) -> None:
    sampling = SamplingParams(max_tokens=18, temperature=1.4, seed=3, ignore_eos=True)

    async def scenario(engine: AsyncEngine) -> None:
        first, second, third = await engine.add_choices(PROMPT, sampling, 3)
        await first.aclose()
        answers = await asyncio.gather(collect(second), collect(third))
        assert [tokens(a) for a in answers] == [alone(PROMPT, replace(sampling, seed=s), None) for s in (4, 5)]

    serve(scenario)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_say_the_same(model, store, adapter_dirs, alone, preemption) -> None:
    names = [None, "one", "two", "three", None, "one"]
    prompts = [PROMPT[i : i + 20] for i in range(6)]
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    scheduler = SchedulerOptions(preemption_mode=preemption)
    with offline_engine(model, adapter_dirs, 32, scheduler=scheduler, swap_bytes=64 * BLOCK) as llm:
        expect_short_answers(llm.engine._parts.scheduler.predictor)
        answers = llm.generate(prompts, sampling, names)
        snapshot = llm.engine.metrics.snapshot()
        llm.engine.check_integrity()
    assert snapshot.preemptions_total > 0
    assert (snapshot.swaps_total > 0) == (preemption == "swap")
    assert snapshot.swap_bytes == 0
    assert [list(a.token_ids) for a in answers] == [alone(p, sampling, n) for p, n in zip(prompts, names, strict=True)]


def test_who_was_accepted_is_served_though_the_adapter_is_deleted_before_it_is_read(serve, store, alone) -> None:
    """And afterwards nothing of it stays."""

    async def scenario(engine: AsyncEngine) -> None:
        key = store.resolve("two").key
        streams = [await engine.add(prompt, GREEDY, adapter=key, adapter_id="two") for prompt in (PROMPT, LONG)]
        store.delete("two")
        answers = [[t async for output in stream for t in output.token_ids] for stream in streams]
        assert answers == [alone(prompt, GREEDY, "two") for prompt in (PROMPT, LONG)]
        async with asyncio.timeout(10):
            while not store.collect():
                await asyncio.sleep(0.01)
        with pytest.raises(AdapterNotFound):
            store.load(key)
        with pytest.raises(AdapterNotFound):
            await engine.add(PROMPT, GREEDY, adapter=key, adapter_id="two")

    serve(scenario, host_cache_bytes=1 << 20)


def test_pages_that_move_under_running_requests_change_nothing(model, adapter_dirs, alone) -> None:
    """Between any two steps keys, values and adapters are thrown about and pushed together again."""
    names = [None, "one", "two", "three"]
    with offline_engine(model, adapter_dirs, 120) as llm:
        answers: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            key = llm.store.resolve(name).key if name else None
            llm.engine.add_request(llm.input_processor.process(RequestId(f"r{i}"), PROMPT, GREEDY, key))
        number = 0
        while llm.engine.has_requests:
            _throw_about(llm.engine, number)
            number += 1
            for output in llm.engine.step():
                answers.setdefault(output.request_id, []).extend(output.new_token_ids)
            llm.engine.check_integrity()
        assert llm.engine.metrics.snapshot().moved_pages_total > 100
    assert [answers[f"r{i}"] for i in range(4)] == [alone(PROMPT, GREEDY, name) for name in names]


def _throw_about(engine: EngineCore, number: int) -> None:
    books, scheduler = engine._memory, engine._scheduler
    used = sorted({*books.kv.references(), *books.prefixes.references()}) if books.prefixes is not None else []
    free = sorted(page for first, count in books.kv_pool.free_runs() for page in range(first, first + count))
    moves = dict(zip(used[number % 3 :: 3], free[:: 1 + number % 4], strict=False))
    for page in moves.values():
        books.kv_pool.take_page(page)
    books.kv_pool.move(moves)
    runs = {}
    for run in books.adapter_manager.runs_in(AdapterState.RESIDENT):
        if (new := books.adapter_pool.allocate_run(run[1])) is not None:
            runs[run] = new
    books.adapter_pool.move({old + i: new + i for (old, n), (new, _) in runs.items() for i in range(n)})
    for part in (Moves(moves, {}), Moves({}, runs)):
        if part.pages:
            books.evictor._follow(part)
    scheduler._allocator.record_moves()


def test_other_weights_under_the_same_name_meet_none_of_the_old_ones_pages(serve, store, adapter_dirs, alone) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        await ask(engine, store.resolve("one").key)
        peft = read_peft_dir(adapter_dirs["two"])
        store.register("one", peft.config, store.add_blob(peft.weights_path))
        fresh = await ask(engine, store.resolve("one").key)
        assert tokens(fresh) == alone(PROMPT, GREEDY, "two")
        assert _timing(fresh).num_cached_tokens == 0
        store.delete("one")
        peft = read_peft_dir(adapter_dirs["one"])
        store.register("one", peft.config, store.add_blob(peft.weights_path))
        back = await ask(engine, store.resolve("one").key)
        assert tokens(back) == alone(PROMPT, GREEDY, "one")
        assert _timing(back).num_cached_tokens == 32, "the same content as before, and its pages are still right"

    serve(scenario)


def test_two_names_of_one_content_share_everything(serve, store, adapter_dirs, alone) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        peft = read_peft_dir(adapter_dirs["one"])
        store.register("twin", peft.config, store.add_blob(peft.weights_path))
        await ask(engine, store.resolve("one").key)
        twin = await ask(engine, store.resolve("twin").key)
        assert tokens(twin) == alone(PROMPT, GREEDY, "one")
        assert _timing(twin).tier is AdapterTier.RESIDENT
        assert _timing(twin).num_cached_tokens == 32
        assert engine.metrics.snapshot().adapters_resident == 1

    serve(scenario)


def test_an_adapter_larger_than_half_the_pool_and_one_more_than_fit(serve, store, alone) -> None:
    names, pages = ["three", "two", "one", None], 2 * _pages_of_three() - 3

    async def scenario(engine: AsyncEngine) -> None:
        layouts = [engine.input_processor.layout(store.resolve(n).key) for n in names[:3]]
        assert max(layout.num_pages(BLOCK // 3) for layout in layouts) > pages / 2
        for _ in range(2):
            keys = [store.resolve(n).key if n else None for n in names]
            answers = await asyncio.gather(*(ask(engine, key, PROMPT[:20]) for key in keys))
            assert [tokens(a) for a in answers] == [alone(PROMPT[:20], GREEDY, n) for n in names]
        assert engine.metrics.snapshot().adapter_evictions_total >= 3

    serve(scenario, pages=pages)


def _pages_of_three() -> int:
    """Rank 8 on all linears of the tiny llama in float32."""
    h, f, kv = 64, 128, 32
    per_layer = 4 * 8 * (3 * h + (h + kv + kv) + h + h + 2 * h + 2 * f + f + h)
    return -(-3 * per_layer // BLOCK)


def test_a_slow_load_delays_its_own_requests_only(serve, store, alone, monkeypatch) -> None:
    slow, hold = store.resolve("one").key, threading.Event()
    load = store.load

    def held_up(key: AdapterKey, *rest: Any) -> Any:
        if key == slow:
            assert hold.wait(30)
        return load(key, *rest)

    async def scenario(engine: AsyncEngine) -> None:
        monkeypatch.setattr(store, "load", held_up)
        waiting = [asyncio.ensure_future(ask(engine, slow)) for _ in range(2)]
        await until(lambda: engine.metrics.snapshot().requests_waiting_for_adapter == 2)
        for name in (None, "two", "three", None):
            key = store.resolve(name).key if name else None
            assert tokens(await ask(engine, key)) == alone(PROMPT, GREEDY, name), "no step waits for a load"
        snapshot = engine.metrics.snapshot()
        assert snapshot.requests_waiting_for_adapter == 2
        assert (snapshot.adapter_loads_disk_total, snapshot.adapters_arriving) == (2, 1), "one load for two requests"
        gone = asyncio.ensure_future(ask(engine, slow))
        await until(lambda: engine.metrics.snapshot().requests_waiting_for_adapter == 3)
        gone.cancel()
        hold.set()
        for outputs in await asyncio.gather(*waiting):
            assert tokens(outputs) == alone(PROMPT, GREEDY, "one")
            assert _timing(outputs).load_ms > 0
            assert _timing(outputs).tier is AdapterTier.DISK

    serve(scenario)


def test_a_cancelled_load_is_forgotten_and_may_be_asked_for_again(serve, store, alone, monkeypatch) -> None:
    key, hold = store.resolve("one").key, threading.Event()
    load = store.load

    def held_up(*arguments: Any) -> Any:
        assert hold.wait(30)
        return load(*arguments)

    async def scenario(engine: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(store, "load", held_up)
            stream = await engine.add(PROMPT, GREEDY, adapter=key)
            await until(lambda: engine.metrics.snapshot().adapters_arriving == 1)
            await stream.aclose()
            await until(lambda: engine.metrics.snapshot().adapters_arriving == 0)
            again = asyncio.ensure_future(ask(engine, key))
            await until(lambda: engine.metrics.snapshot().adapters_arriving == 1)
            hold.set()
            assert tokens(await again) == alone(PROMPT, GREEDY, "one")
        assert engine.metrics.snapshot().requests_finished_total == {"abort": 1, "length": 1}
        source = engine._engine._parts.source
        assert source is not None
        await until(lambda: source.host_stats().bytes_pinned == 0)

    serve(scenario)


def test_deleted_while_in_use_it_answers_to_the_end(serve, store, alone) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        stream = await engine.add(PROMPT, GREEDY, adapter=store.resolve("two").key)
        first = await anext(stream)
        store.delete("two")
        assert tokens([first, *(await collect(stream))]) == alone(PROMPT, GREEDY, "two")

    serve(scenario)


def test_prefetch_into_a_full_pool_takes_nothing_from_those_who_run(serve, store, alone) -> None:
    """The pool has room for the running requests to their last token, and for nothing else until they end."""
    long = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)

    async def scenario(engine: AsyncEngine) -> None:
        running = [asyncio.ensure_future(ask(engine, None, PROMPT[i:], sampling=long)) for i in range(4)]
        await until(lambda: engine.metrics.snapshot().requests_running == 4)
        adapted = await asyncio.gather(*(ask(engine, store.resolve(n).key) for n in ("one", "two", "three")))
        for i, task in enumerate(running):
            assert tokens(await task) == alone(PROMPT[i:], long, None)
        assert [tokens(a) for a in adapted] == [alone(PROMPT, GREEDY, n) for n in ("one", "two", "three")]
        assert engine.metrics.snapshot().preemptions_total == 0

    serve(scenario, pages=4 * 10 + 8)


def test_on_cold(serve, store, alone) -> None:
    key = store.resolve("one").key

    async def scenario(engine: AsyncEngine) -> None:
        fallback = await ask(engine, key, on_cold=OnCold.FALLBACK_BASE)
        assert tokens(fallback) == alone(PROMPT, GREEDY, None)
        assert _timing(fallback).fell_back
        assert _timing(fallback).tier is AdapterTier.DISK
        await until(lambda: engine.metrics.snapshot().adapters_resident == 1)
        warm = await ask(engine, key, on_cold=OnCold.FALLBACK_BASE)
        assert tokens(warm) == alone(PROMPT, GREEDY, "one")
        assert not _timing(warm).fell_back
        cold = store.resolve("two").key
        with pytest.raises(AdapterCold, match="brought in") as caught:
            await ask(engine, cold, on_cold=OnCold.REJECT)
        assert 0 < caught.value.retry_after_s < 5
        await until(lambda: engine.metrics.snapshot().adapters_resident == 2)
        assert tokens(await ask(engine, cold, on_cold=OnCold.REJECT)) == alone(PROMPT, GREEDY, "two")
        assert engine.metrics.snapshot().requests_finished_total == {"length": 3, "refused": 1}

    serve(scenario)


def test_warm_pin_and_the_map(serve, store, monkeypatch) -> None:
    key, other = store.resolve("one").key, store.resolve("two").key

    async def scenario(engine: AsyncEngine) -> None:
        reached = await engine.warm(key, 5.0)
        assert reached.tier is AdapterTier.RESIDENT
        assert reached.load_ms > 0
        assert (await engine.warm(key, 5.0)).load_ms == 0
        assert (await engine.warm(other, 0.0)).tier is not AdapterTier.RESIDENT
        await until(lambda: engine.metrics.snapshot().adapters_resident == 2)
        assert (await engine.pin(key)).tier is AdapterTier.RESIDENT
        stream = await engine.add(PROMPT, replace(GREEDY, max_tokens=400), adapter=key)
        await anext(stream)
        described = await engine.pool_map()
        await stream.aclose()
        assert [(a.key, a.pinned, a.requests, a.state) for a in described.adapters] == [
            (key, True, 1, "ready"),
            (other, False, 0, "ready"),
        ]
        assert all(0 < a.bytes_used <= a.bytes_held for a in described.adapters)
        assert [(r.adapter, r.pages >= 3) for r in described.requests] == [(key, True)]
        of_all = described.pages_kv + described.pages_prefix + described.pages_adapters + described.pages_free
        assert of_all == described.pages_total
        held = [page for request in described.requests for page in request.page_ids] + list(described.prefix_page_ids)
        weights = [
            page for a in described.adapters for first, number in a.runs for page in range(first, first + number)
        ]
        assert len(set(held)) == len(held) == described.pages_kv + described.pages_prefix
        assert not set(held) & set(weights)
        assert set(held) | set(weights) <= set(range(described.pages_total))
        monkeypatch.setattr(store, "load", _broken)
        for call in (
            lambda: engine.warm(store.resolve("three").key, 5.0),
            lambda: engine.pin(store.resolve("three").key),
        ):
            with pytest.raises(AdapterLoadFailed, match="disk on fire"):
                await call()
        await engine.unpin(key)
        assert [a.pinned for a in (await engine.pool_map()).adapters] == [False, False]

    serve(scenario)


def _broken(*_: object) -> None:
    raise OSError(5, "disk on fire")


def test_pins_are_bounded_and_given_up_only_for_an_accepted_request(serve, store, alone) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        await engine.pin(store.resolve("two").key)
        with pytest.raises(InvalidRequest, match="half of the pool"):
            await engine.pin(store.resolve("three").key)
        assert engine.metrics.snapshot().adapters_resident == 1
        assert tokens(await ask(engine, store.resolve("one").key)) == alone(PROMPT, GREEDY, "one")
        most = replace(GREEDY, max_tokens=300)
        assert len(tokens(await ask(engine, None, sampling=most))) == 300

    serve(scenario, pages=24)


def test_what_fits_nowhere_is_refused_with_the_numbers(serve, store) -> None:
    key = store.resolve("three").key

    async def small_host(engine: AsyncEngine) -> None:
        for call in (lambda: ask(engine, key), lambda: engine.warm(key, 1.0), lambda: engine.pin(key)):
            with pytest.raises(InvalidRequest, match=r"takes \d+ bytes, but host memory for adapters is 1000"):
                await call()

    async def small_pool(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequest, match=r"takes \d+ pages, but the pool has 6 for adapters"):
            await ask(engine, key)

    serve(small_host, host_cache_bytes=1000)
    serve(small_pool, pages=6)


def test_a_long_prompt_in_chunks_keeps_its_adapter_while_others_fight_for_room(serve, store, alone) -> None:
    prompt = [10 + (5 * i) % 300 for i in range(240)]

    async def scenario(engine: AsyncEngine) -> None:
        key = store.resolve("one").key
        await engine.warm(key, 5.0)
        chunked = asyncio.ensure_future(ask(engine, key, prompt))
        rivals = [ask(engine, store.resolve(name).key, PROMPT[:20]) for name in ("two", "three", "two", "three")]
        answers = await asyncio.gather(*rivals)
        assert tokens(await chunked) == alone(prompt, GREEDY, "one")
        assert [tokens(a) for a in answers] == [alone(PROMPT[:20], GREEDY, n) for n in ("two", "three") * 2]

    scheduler = SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=16)
    serve(scenario, pages=20 + _pages_of_three(), scheduler=scheduler)


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.long) for how in ("warm", "pin")), "reject", "wait"]
)
def test_a_pool_full_of_old_prompts_gives_way(serve, store, alone, how: str) -> None:
    key = store.resolve("two").key

    async def scenario(engine: AsyncEngine) -> None:
        for i in range(12):
            await ask(engine, None, [30 + i, *PROMPT])
        assert engine.metrics.snapshot().pages_free < 5
        if how == "wait":
            assert tokens(await ask(engine, key)) == alone(PROMPT, GREEDY, "two")
        elif how == "reject":
            with pytest.raises(AdapterCold, match="is being brought in"):
                await ask(engine, key, on_cold=OnCold.REJECT)
            await until(lambda: engine.metrics.snapshot().adapters_resident == 1)
        else:
            reached = await (engine.warm(key, 5.0) if how == "warm" else engine.pin(key))
            assert reached.tier is AdapterTier.RESIDENT

    serve(scenario, pages=40)


def test_no_room_for_what_is_cold_is_said(serve, store) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        stream = await engine.add(PROMPT, replace(GREEDY, max_tokens=190))
        await until(lambda: engine.metrics.snapshot().pages_free < 5)
        with pytest.raises(AdapterCold, match="no room for it now") as caught:
            await ask(engine, store.resolve("three").key, on_cold=OnCold.REJECT)
        assert caught.value.retry_after_s >= 5
        await stream.aclose()

    serve(scenario, pages=16)


def test_offline_a_rate_is_waited_for_and_a_deadline_is_an_error(model, adapter_dirs, alone) -> None:
    limits = SchedulerOptions(max_num_seqs=1, adapter_limits=Limits(tokens_per_s=60.0))
    with offline_engine(model, adapter_dirs, scheduler=limits) as llm:
        answers = llm.generate([PROMPT] * 4, GREEDY, ["one"] * 4)
        assert [list(answer.token_ids) for answer in answers] == [alone(PROMPT, GREEDY, "one")] * 4
    hasty = SchedulerOptions(max_num_seqs=1, queue_timeout_s=1e-6)
    with offline_engine(model, scheduler=hasty) as llm, pytest.raises(RequestTimeout, match="queue timeout"):
        llm.generate([PROMPT, PROMPT], GREEDY)
