"""The pool on a real model's memory: whatever is shared, copied, moved, swapped or brought back, the answer is the one
that a roomy engine without any of it gives."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from mispredict import expect_short_answers
from tiny_engine import BLOCK, GREEDY, LONG, PROMPT, ask, collect, drive, offline_engine, tokens, until

from adapter_store.errors import AdapterNotFound
from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.engine.core import EngineCore
from lorasrv.errors import AdapterCold, AdapterLoadFailed, InvalidRequest
from lorasrv.memory.adapter_manager import AdapterState
from lorasrv.memory.eviction import Moves
from lorasrv.outputs import AdapterTier
from lorasrv.request import OnCold, RequestOptions
from lorasrv.sampling_params import SamplingParams

PAGES_OF_THREE = -(-3 * 4 * 8 * (3 * 64 + (64 + 32 + 32) + 64 + 64 + 2 * 64 + 2 * 128 + 128 + 64) // BLOCK)
"""Of the adapter `three`: rank 8 on all linears of three layers in float32."""


async def test_a_prompt_that_was_seen_is_not_computed_again(engine, keys, alone) -> None:
    for name in (None, "two"):
        key = keys[name]
        first, again = await ask(engine, key), await ask(engine, key)
        assert first[-1].timing.num_cached_tokens == 0
        assert again[-1].timing.num_cached_tokens == 32
        assert tokens(first) == tokens(again) == alone(PROMPT, GREEDY, name)
        turn = [*PROMPT, *tokens(first), 5, 6]
        third = await ask(engine, key, turn)
        assert third[-1].timing.num_cached_tokens == 64, "the answer is part of the next turn's prompt"
        assert tokens(third) == alone(turn, GREEDY, name)
    salted = await ask(engine, None, cache_salt="tenant")
    assert salted[-1].timing.num_cached_tokens == 0
    assert tokens(salted) == alone(PROMPT, GREEDY, None)
    assert engine.metrics.stats().cached_tokens_total == 2 * 96


async def test_cached_tokens_of_a_resumed_answer_are_those_of_its_prompt(engine) -> None:
    """Pages of the answer may be there, too: a peer has sent them, or it was cut while it was computed here."""
    whole = tokens(await ask(engine, None))
    resumed = await ask(engine, None, resumed_token_ids=tuple(whole[:19]))
    assert tokens(resumed) == whole
    assert resumed[-1].timing.num_cached_tokens == engine.metrics.stats().cached_tokens_total == len(PROMPT)


@pytest.mark.parametrize("length", [1, 16, 45, *(pytest.param(n, marks=pytest.mark.long) for n in (15, 17, 48))])
@pytest.mark.parametrize("name", [pytest.param(None, marks=pytest.mark.long), "three"])
@pytest.mark.engine(max_num_seqs=16, max_num_batched_tokens=32)
async def test_choices_share_their_prompt_and_are_what_each_alone_would_be(engine, keys, alone, name, length) -> None:
    sampling = SamplingParams(max_tokens=18, temperature=1.4, seed=70, ignore_eos=True)
    key = keys[name]
    streams = await engine.add_choices(LONG[:length], sampling, 4, RequestOptions(adapter_key=key))
    answers = await asyncio.gather(*(collect(stream) for stream in streams))
    expected = [alone(LONG[:length], replace(sampling, seed=70 + i), name) for i in range(4)]
    assert [tokens(answer) for answer in answers] == expected
    assert len({tuple(said) for said in expected}) == 4
    assert [answer[-1].timing.num_cached_tokens for answer in answers] == [0, *[length - 1] * 3]
    if length == 45:
        assert engine.metrics.stats().copied_pages_total == 3, "the last holder writes where it is"


async def test_a_choice_goes_on_when_the_first_one_leaves(engine, alone) -> None:
    sampling = SamplingParams(max_tokens=18, temperature=1.4, seed=3, ignore_eos=True)
    first, second, third = await engine.add_choices(PROMPT, sampling, 3)
    await first.aclose()
    answers = await asyncio.gather(collect(second), collect(third))
    assert [tokens(a) for a in answers] == [alone(PROMPT, replace(sampling, seed=s), None) for s in (4, 5)]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_say_the_same(model, adapter_dirs, alone, preemption) -> None:
    names = [None, "one", "two", "three", None, "one"]
    prompts = [PROMPT[i : i + 20] for i in range(6)]
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with offline_engine(model, adapter_dirs, 32, preemption_mode=preemption, swap_bytes=64 * BLOCK) as llm:
        expect_short_answers(llm.engine._parts.scheduler.predictor)
        answers = llm.generate(prompts, sampling, names)
        stats = llm.engine.metrics.stats()
        llm.engine.check_integrity()
    assert stats.preemptions_total > 0
    assert (stats.swaps_total > 0) == (preemption == "swap")
    assert stats.swap_bytes == 0
    assert [list(a.token_ids) for a in answers] == [alone(p, sampling, n) for p, n in zip(prompts, names, strict=True)]


@pytest.mark.engine(host_cache_bytes=1 << 20)
async def test_accepted_requests_are_served_though_their_adapter_is_deleted(engine, store, keys, alone) -> None:
    """Before it is read, and while it is in use; afterwards nothing of it stays."""
    used = await engine.add(PROMPT, GREEDY, RequestOptions(adapter_key=keys["one"], adapter_id="one"))
    first = await anext(used)
    store.delete("one")
    streams = [
        await engine.add(prompt, GREEDY, RequestOptions(adapter_key=keys["two"], adapter_id="two"))
        for prompt in (PROMPT, LONG)
    ]
    store.delete("two")
    assert [tokens(await collect(stream)) for stream in streams] == [alone(p, GREEDY, "two") for p in (PROMPT, LONG)]
    assert tokens([first, *(await collect(used))]) == alone(PROMPT, GREEDY, "one")
    await until(lambda: store.collector.collect() > 0)
    with pytest.raises(AdapterNotFound):
        store.load(keys["two"])
    with pytest.raises(AdapterNotFound):
        await engine.add(PROMPT, GREEDY, RequestOptions(adapter_key=keys["two"], adapter_id="two"))


def test_pages_that_move_under_running_requests_change_nothing(model, adapter_dirs, alone) -> None:
    """Between any two steps keys, values and adapters are thrown about and pushed together again."""
    names = (None, "one", "two", "three")
    with offline_engine(model, adapter_dirs, 120) as llm:
        messages = [llm._message(PROMPT, GREEDY, llm._find(name)) for name in names]
        answers = drive(llm, messages, lambda number: _throw_about(llm.engine, number))
        assert llm.engine.metrics.stats().moved_pages_total > 100
    said = [[token for output in answer for token in output.new_token_ids] for answer in answers]
    assert said == [alone(PROMPT, GREEDY, name) for name in names]


def _throw_about(engine: EngineCore, number: int) -> None:
    accounts, scheduler = engine._memory, engine._scheduler
    used = sorted({*accounts.kv.references(), *accounts.prefixes.references()}) if accounts.prefixes is not None else []
    free = sorted(page for first, count in accounts.kv_pool.free_runs() for page in range(first, first + count))
    moves = dict(zip(used[number % 3 :: 3], free[:: 1 + number % 4], strict=False))
    for page in moves.values():
        accounts.kv_pool.take_page(page)
    accounts.kv_pool.move(moves)
    runs = {}
    for run in accounts.adapter_manager.runs_in(AdapterState.RESIDENT):
        if (new := accounts.adapter_pool.allocate_run(run[1])) is not None:
            runs[run] = new
    accounts.adapter_pool.move({old + i: new + i for (old, n), (new, _) in runs.items() for i in range(n)})
    for part in (Moves(moves, {}), Moves({}, runs)):
        if part.pages:
            accounts.evictor._follow(part)
    scheduler._allocator.record_moves()


async def test_other_weights_under_the_same_name_meet_none_of_the_old_ones_pages(
    engine, store, keys, adapter_dirs, alone
) -> None:
    await ask(engine, keys["one"])
    peft = read_peft_dir(adapter_dirs["two"])
    store.register("one", peft.config, store.add_blob(peft.weights_path))
    fresh = await ask(engine, store.resolve("one").key)
    assert tokens(fresh) == alone(PROMPT, GREEDY, "two")
    assert fresh[-1].timing.num_cached_tokens == 0
    store.delete("one")
    peft = read_peft_dir(adapter_dirs["one"])
    store.register("one", peft.config, store.add_blob(peft.weights_path))
    back = await ask(engine, store.resolve("one").key)
    assert tokens(back) == alone(PROMPT, GREEDY, "one")
    assert back[-1].timing.num_cached_tokens == 32, "the same content as before, and its pages are still right"


async def test_two_names_of_one_content_share_everything(engine, store, keys, adapter_dirs, alone) -> None:
    peft = read_peft_dir(adapter_dirs["one"])
    store.register("twin", peft.config, store.add_blob(peft.weights_path))
    await ask(engine, keys["one"])
    twin = await ask(engine, store.resolve("twin").key)
    assert tokens(twin) == alone(PROMPT, GREEDY, "one")
    assert twin[-1].timing.tier is AdapterTier.RESIDENT
    assert twin[-1].timing.num_cached_tokens == 32
    assert engine.metrics.stats().adapters_resident == 1


@pytest.mark.engine(pages=2 * PAGES_OF_THREE - 3)
async def test_an_adapter_larger_than_half_the_pool_and_one_more_than_fit(engine, keys, alone) -> None:
    names = ("three", "two", "one", None)
    layouts = [await engine.input_processor.layout(keys[n]) for n in names[:3]]
    assert max(layout.num_pages(BLOCK // 3) for layout in layouts) >= PAGES_OF_THREE - 1
    for _ in range(2):
        answers = await asyncio.gather(*(ask(engine, keys[n], PROMPT[:20]) for n in names))
        assert [tokens(a) for a in answers] == [alone(PROMPT[:20], GREEDY, n) for n in names]
    assert engine.metrics.stats().adapter_evictions_total >= 3


def _hold_load(store: AdapterStore, slow: AdapterKey, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have an adapter's load wait for the event."""
    load, hold = store.load, threading.Event()

    def held_up(key: AdapterKey, *rest: Any) -> Any:
        assert key != slow or hold.wait(30)
        return load(key, *rest)

    monkeypatch.setattr(store, "load", held_up)
    return hold


async def test_a_slow_load_delays_its_own_requests_only(engine, store, keys, alone, monkeypatch) -> None:
    slow, hold = keys["one"], _hold_load(store, keys["one"], monkeypatch)
    waiting = [asyncio.ensure_future(ask(engine, slow)) for _ in range(2)]
    await until(lambda: engine.metrics.stats().requests_waiting_for_adapter == 2)
    for name in (None, "two", "three", None):
        key = keys[name]
        assert tokens(await ask(engine, key)) == alone(PROMPT, GREEDY, name), "no step waits for a load"
    stats = engine.metrics.stats()
    assert stats.requests_waiting_for_adapter == 2
    assert (stats.adapter_loads_disk_total, stats.adapters_arriving) == (2, 1), "one load for two requests"
    gone = asyncio.ensure_future(ask(engine, slow))
    await until(lambda: engine.metrics.stats().requests_waiting_for_adapter == 3)
    gone.cancel()
    hold.set()
    for outputs in await asyncio.gather(*waiting):
        assert tokens(outputs) == alone(PROMPT, GREEDY, "one")
        assert outputs[-1].timing.load_ms > 0
        assert outputs[-1].timing.tier is AdapterTier.DISK


async def test_a_cancelled_load_may_be_asked_for_again(engine, store, keys, alone, monkeypatch) -> None:
    key, hold = keys["one"], _hold_load(store, keys["one"], monkeypatch)
    stream = await engine.add(PROMPT, GREEDY, RequestOptions(adapter_key=key))
    await until(lambda: engine.metrics.stats().adapters_arriving == 1)
    await stream.aclose()
    await until(lambda: engine.metrics.stats().adapters_arriving == 0)
    again = asyncio.ensure_future(ask(engine, key))
    await until(lambda: engine.metrics.stats().adapters_arriving == 1)
    hold.set()
    assert tokens(await again) == alone(PROMPT, GREEDY, "one")
    assert engine.metrics.stats().requests_finished_total == {"abort": 1, "length": 1}
    source = engine._engine._parts.source
    assert source is not None
    await until(lambda: source.host_stats().bytes_pinned == 0)


@pytest.mark.engine(pages=4 * 10 + 8)
async def test_prefetch_into_a_full_pool_takes_nothing_from_those_who_run(engine, keys, alone) -> None:
    """The pool has room for the running requests to their last token, and for nothing else until they end."""
    long = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    running = [asyncio.ensure_future(ask(engine, None, PROMPT[i:], sampling=long)) for i in range(4)]
    await until(lambda: engine.metrics.stats().requests_running == 4)
    adapted = await asyncio.gather(*(ask(engine, keys[n]) for n in ("one", "two", "three")))
    assert [tokens(await task) for task in running] == [alone(PROMPT[i:], long, None) for i in range(4)]
    assert [tokens(a) for a in adapted] == [alone(PROMPT, GREEDY, n) for n in ("one", "two", "three")]
    assert engine.metrics.stats().preemptions_total == 0


async def test_on_cold(engine, keys, alone) -> None:
    key = keys["one"]
    fallback = await ask(engine, key, on_cold=OnCold.FALLBACK_BASE)
    assert tokens(fallback) == alone(PROMPT, GREEDY, None)
    assert fallback[-1].timing.fell_back
    assert fallback[-1].timing.tier is AdapterTier.DISK
    await until(lambda: engine.metrics.stats().adapters_resident == 1)
    warm = await ask(engine, key, on_cold=OnCold.FALLBACK_BASE)
    assert tokens(warm) == alone(PROMPT, GREEDY, "one")
    assert not warm[-1].timing.fell_back
    cold = keys["two"]
    with pytest.raises(AdapterCold, match="brought in") as caught:
        await ask(engine, cold, on_cold=OnCold.REJECT)
    assert 0 < caught.value.retry_after_s < 5
    await until(lambda: engine.metrics.stats().adapters_resident == 2)
    assert tokens(await ask(engine, cold, on_cold=OnCold.REJECT)) == alone(PROMPT, GREEDY, "two")
    assert engine.metrics.stats().requests_finished_total == {"length": 3, "refused": 1}


async def test_warm_pin_and_the_map(engine, store, keys, monkeypatch) -> None:
    key, other = keys["one"], keys["two"]
    reached = await engine.warm(key, 5.0)
    assert reached.tier is AdapterTier.RESIDENT
    assert reached.load_ms > 0
    assert (await engine.warm(key, 5.0)).load_ms == 0
    assert (await engine.warm(other, 0.0)).tier is not AdapterTier.RESIDENT
    await until(lambda: engine.metrics.stats().adapters_resident == 2)
    assert (await engine.pin(key)).tier is AdapterTier.RESIDENT
    stream = await engine.add(PROMPT, replace(GREEDY, max_tokens=400), RequestOptions(adapter_key=key))
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
    weights = [page for a in described.adapters for first, number in a.runs for page in range(first, first + number)]
    assert len(set(held)) == len(held) == described.pages_kv + described.pages_prefix
    assert not set(held) & set(weights)
    assert set(held) | set(weights) <= set(range(described.pages_total))
    monkeypatch.setattr(store, "load", _broken)
    for call in (
        lambda: engine.warm(keys["three"], 5.0),
        lambda: engine.pin(keys["three"]),
    ):
        with pytest.raises(AdapterLoadFailed, match="disk on fire"):
            await call()
    await engine.unpin(key)
    assert [a.pinned for a in (await engine.pool_map()).adapters] == [False, False]


def _broken(*_: object) -> None:
    raise OSError(5, "disk on fire")


@pytest.mark.engine(pages=24)
async def test_pins_are_bounded_and_given_up_only_for_an_accepted_request(engine, keys, alone) -> None:
    await engine.pin(keys["two"])
    with pytest.raises(InvalidRequest, match="half of the pool"):
        await engine.pin(keys["three"])
    assert engine.metrics.stats().adapters_resident == 1
    assert tokens(await ask(engine, keys["one"])) == alone(PROMPT, GREEDY, "one")
    most = replace(GREEDY, max_tokens=300)
    assert len(tokens(await ask(engine, None, sampling=most))) == 300


@pytest.mark.engine(host_cache_bytes=1000)
async def test_what_fits_nowhere_is_refused_with_the_numbers(engine, keys) -> None:
    for call in (ask(engine, keys["three"]), engine.warm(keys["three"], 1.0), engine.pin(keys["three"])):
        with pytest.raises(InvalidRequest, match=r"takes \d+ bytes, but host memory for adapters is 1000"):
            await call


@pytest.mark.engine(pages=20 + PAGES_OF_THREE, max_num_seqs=16, max_num_batched_tokens=16)
async def test_a_long_prompt_in_chunks_keeps_its_adapter_while_others_fight_for_room(engine, keys, alone) -> None:
    prompt = [10 + (5 * i) % 300 for i in range(240)]
    key = keys["one"]
    await engine.warm(key, 5.0)
    chunked = asyncio.ensure_future(ask(engine, key, prompt))
    rivals = [ask(engine, keys[name], PROMPT[:20]) for name in ("two", "three", "two", "three")]
    answers = await asyncio.gather(*rivals)
    assert tokens(await chunked) == alone(prompt, GREEDY, "one")
    assert [tokens(a) for a in answers] == [alone(PROMPT[:20], GREEDY, n) for n in ("two", "three") * 2]


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.long) for how in ("warm", "pin")), "reject", "wait"]
)
@pytest.mark.engine(pages=40)
async def test_a_pool_full_of_old_prompts_gives_way(engine, keys, alone, how: str) -> None:
    key = keys["two"]
    for i in range(12):
        await ask(engine, None, [30 + i, *PROMPT])
    assert engine.metrics.stats().pages_free < 5
    if how == "wait":
        assert tokens(await ask(engine, key)) == alone(PROMPT, GREEDY, "two")
    elif how == "reject":
        with pytest.raises(AdapterCold, match="is being brought in"):
            await ask(engine, key, on_cold=OnCold.REJECT)
        await until(lambda: engine.metrics.stats().adapters_resident == 1)
    else:
        reached = await (engine.warm(key, 5.0) if how == "warm" else engine.pin(key))
        assert reached.tier is AdapterTier.RESIDENT


@pytest.mark.engine(pages=16)
async def test_no_room_for_what_is_cold_is_said(engine, keys) -> None:
    stream = await engine.add(PROMPT, replace(GREEDY, max_tokens=190))
    await until(lambda: engine.metrics.stats().pages_free < 5)
    with pytest.raises(AdapterCold, match="no room for it now") as caught:
        await ask(engine, keys["three"], on_cold=OnCold.REJECT)
    assert caught.value.retry_after_s >= 5
    await stream.aclose()
