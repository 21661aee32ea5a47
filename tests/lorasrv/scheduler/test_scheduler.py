"""The bare scheduler with hand-made model outputs: order, budget, preemption, adapters, and exactly one end each."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from bare_scheduler import EOS, KEYS, PAGE_BYTES, PAGE_SIZE, Bench, layout_of, names, terms_of
from mispredict import expect_short_answers

import lorasrv
from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions
from lorasrv.kv_policy import SelectPolicy
from lorasrv.outputs import FinishReason, Refusal, RequestId
from lorasrv.request import AdapterTerm, OnCold, RequestStatus
from lorasrv.scheduler_output import ModelRunnerOutput
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims


def test_a_long_prompt_is_chunked_beside_running_requests() -> None:
    bench = Bench()
    bench.add("short", prompt=2, max_tokens=20)
    bench.step()
    bench.add("long", prompt=40)
    chunks = [{s.request_id: len(s.token_ids) for s in bench.step().requests} for _ in range(3)]
    assert chunks == [{"short": 1, "long": 15}, {"short": 1, "long": 15}, {"short": 1, "long": 10}]
    assert bench.tokens("long") == 1, "only the last chunk samples"
    assert bench.tokens("short") == 4


def test_ends_by_length_eos_and_stop_id() -> None:
    bench = Bench()
    bench.add("length", max_tokens=2)
    bench.add("eos", max_tokens=9)
    bench.add("ignores", max_tokens=3, ignore_eos=True)
    bench.add("stop", max_tokens=9, stop_token_ids=(EOS,), ignore_eos=True)
    bench.step()
    bench.step(token=EOS)
    bench.step(token=EOS)
    assert bench.ends() == {
        "length": FinishReason.STOP,
        "eos": FinishReason.STOP,
        "ignores": FinishReason.LENGTH,
        "stop": FinishReason.STOP,
    }
    assert {o.request_id: o.stop_token_id for o in bench.outputs if o.finish_reason} == {
        "length": None,
        "eos": None,
        "ignores": None,
        "stop": EOS,
    }


def test_max_num_seqs_and_order_of_arrival() -> None:
    bench = Bench(max_num_seqs=2)
    for name in ("a", "b", "c"):
        bench.add(name, max_tokens=2)
    assert names(bench.step()) == ["a", "b"]
    bench.step()
    assert names(bench.step()) == ["c"]


def test_pool_exhaustion_preempts_the_newest_and_nobody_fails() -> None:
    bench = Bench(pages=8, max_num_batched_tokens=64)
    expect_short_answers(bench.scheduler.predictor)
    bench.add("old", prompt=8, max_tokens=20)
    bench.add("new", prompt=8, max_tokens=20)
    for _ in range(80):
        bench.step()
    assert bench.ends() == {"old": FinishReason.LENGTH, "new": FinishReason.LENGTH}
    assert bench.tokens("old") == bench.tokens("new") == 20
    preempted = {o.request_id: o.timing.num_preemptions for o in bench.outputs if o.finish_reason}
    assert preempted["old"] == 0
    assert preempted["new"] >= 1
    assert bench.pool.num_free == 8


def test_a_request_waits_for_its_adapter_and_nobody_else_does() -> None:
    bench = Bench()
    bench.add("cold", key=KEYS[0])
    bench.add("base", max_tokens=9)
    step = bench.step()
    assert names(step) == ["base"]
    assert step.orders.loads == (KEYS[0],)
    assert bench.scheduler.num_waiting_for_adapter == 1
    bench.add("cold too", key=KEYS[0])
    assert bench.step().orders.loads == (), "one load for two requests"
    bench.load(KEYS[0])
    step = bench.step()
    assert [key for key, _ in step.orders.copies] == [KEYS[0]]
    assert names(bench.step()) == ["base"], "nobody reads what is being copied"
    bench.copy(KEYS[0])
    step = bench.step()
    assert sorted(names(step)) == ["base", "cold", "cold too"]
    assert bench.adapters.pins() == {KEYS[0]: 2}


def test_a_failed_load_fails_its_own_requests_only() -> None:
    bench = Bench()
    bench.add("bad", key=KEYS[0])
    bench.add("good", key=KEYS[1], max_tokens=1)
    bench.step()
    bench.scheduler.on_adapter_failed(KEYS[0], "corrupt")
    bench.bring(KEYS[1])
    bench.step()
    assert bench.ends() == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert next(o.error for o in bench.outputs if o.request_id == "bad") == "corrupt"
    bench.add("again", key=KEYS[0])
    assert bench.step().orders.loads == (KEYS[0],), "a later request tries again"


def test_logits_that_are_no_numbers_are_laid_to_an_adapter_only_where_there_is_one() -> None:
    bench = Bench()
    bench.add("adapted", key=KEYS[0])
    bench.step()
    bench.bring(KEYS[0])
    bench.add("plain")
    step = bench.scheduler.schedule()
    assert names(step) == ["adapted", "plain"]
    outputs = {o.request_id: o for o in bench.scheduler.update_from_output(step, ModelRunnerOutput({}, {}, masses={}))}
    assert "its adapter's weights are too large" in (outputs[RequestId("adapted")].error or "")
    plain = outputs[RequestId("plain")]
    assert plain.refusal is Refusal.STEP
    assert "which has no adapter: the base overflows" in (plain.error or "")


def test_a_cancelled_request_takes_its_load_along_wherever_it_is() -> None:
    bench = Bench()
    for state in ("loading", "on host"):
        bench.add(state, key=KEYS[0])
        bench.step()
        if state == "on host":
            bench.load(KEYS[0])
        bench.scheduler.finish(RequestId(state), RequestStatus.FINISHED_ABORTED)
        step = bench.step()
        assert step.orders.cancels == (KEYS[0],)
        assert step.orders.copies == ()
        assert bench.accounts.adapter_manager.num_loading == 0
    bench.add("copying", key=KEYS[0])
    bench.step()
    bench.load(KEYS[0])
    bench.step()
    bench.scheduler.finish(RequestId("copying"), RequestStatus.FINISHED_ABORTED)
    assert bench.step().orders.cancels == (), "its pages are being written"
    bench.copy(KEYS[0])
    assert bench.accounts.adapter_manager.is_resident(KEYS[0])
    assert set(bench.ends().values()) == {FinishReason.ABORT}


def test_a_choice_on_another_adapter_than_the_first_one_shares_nothing_with_it() -> None:
    """The adapter arrives between the two, which fall back where it is cold: the first has the base's pages."""
    bench = Bench(max_num_batched_tokens=64)
    bench.add("first", prompt=9, max_tokens=9, key=KEYS[0], on_cold=OnCold.FALLBACK_BASE)
    bench.step()
    bench.bring(KEYS[0])
    bench.add("second", prompt=9, max_tokens=9, key=KEYS[0], on_cold=OnCold.FALLBACK_BASE, fork_of=RequestId("first"))
    step = bench.step()
    requests = {s.request_id: s for s in step.requests}
    assert requests["first"].adapter_key is None
    assert requests["second"].adapter_key == KEYS[0]
    assert requests["second"].start == 0
    assert not set(requests["first"].page_table) & set(requests["second"].page_table)


def test_idle_adapters_make_room_for_growing_requests() -> None:
    bench = Bench(pages=12)
    bench.add("persona", max_tokens=1, key=KEYS[3])
    bench.step()
    bench.bring(KEYS[3])
    bench.step()
    assert KEYS[3] in bench.adapters
    bench.add("greedy", prompt=4, max_tokens=44)
    for _ in range(60):
        bench.step()
    assert bench.ends()["greedy"] is FinishReason.LENGTH
    assert KEYS[3] not in bench.adapters
    assert bench.scheduler.counters.preemptions == 0


def test_an_adapter_without_room_holds_back_later_requests_until_it_fits() -> None:
    layout = layout_of(KEYS[5])
    bench = Bench(pages=layout.num_pages(PAGE_BYTES) + 3, max_num_batched_tokens=64)
    bench.add("running", prompt=8, max_tokens=4)
    bench.step()
    bench.add("persona", prompt=2, max_tokens=2, key=KEYS[5])
    bench.step()
    bench.load(KEYS[5])
    bench.add("later", prompt=2, max_tokens=2)
    assert names(bench.step()) == ["running"]
    bench.run()
    assert set(bench.ends()) == {"running", "persona", "later"}


def test_an_adapter_placed_in_pieces_gives_way_to_itself() -> None:
    """In pieces it holds a page more than its size. Alone, its request grows to the very last page that admission
    promised: the adapter must leave and come back in one run, or the request waits for itself for ever."""
    bench = Bench(pages=24, max_num_seqs=32, max_num_batched_tokens=128)
    expect_short_answers(bench.scheduler.predictor)
    size = layout_of(KEYS[4]).num_pages(PAGE_BYTES)
    for i in range(8):
        bench.add(f"r{i}", prompt=5, max_tokens=40)
    for _ in range(5):
        bench.step()
    for i in range(1, 8, 2):
        bench.scheduler.finish(RequestId(f"r{i}"), RequestStatus.FINISHED_ABORTED)
    most = (24 - size) * PAGE_SIZE - 3
    bench.add("X", prompt=3, max_tokens=most, key=KEYS[4])
    bench.step()
    bench.bring(KEYS[4])
    bench.step()
    assert bench.adapters.num_pages > size, "the pool was meant to be too scattered for one run"
    for i in range(0, 8, 2):
        bench.scheduler.finish(RequestId(f"r{i}"), RequestStatus.FINISHED_ABORTED)
    bench.add("base", prompt=3, max_tokens=2)
    bench.run()
    assert bench.tokens("X") == most
    assert bench.ends()["X"] is FinishReason.LENGTH
    assert bench.ends()["base"] is FinishReason.LENGTH


def test_terms_of_a_sum_do_not_push_each_other_out() -> None:
    """A pinned adapter has the rest of the pool: it goes before what the first request of all waits for."""
    pinned, one, other = KEYS[2], KEYS[3], KEYS[4]
    sizes = [layout_of(key).num_pages(PAGE_BYTES) for key in (one, other)]
    bench = Bench(pages=sum(sizes) + 2, max_num_batched_tokens=64)
    bench.accounts.adapter_manager.pin(pinned, layout_of(pinned))
    for _ in range(3):
        bench.step()
        bench.arrive()
    bench.add("before", prompt=2, max_tokens=1, key=one)
    bench.run(steps=20)
    assert pinned in bench.adapters
    bench.add("sum", prompt=3, max_tokens=3, key=AdapterKey("s"), terms=terms_of(one, other))
    bench.run(steps=60)
    assert bench.ends()["sum"] is FinishReason.LENGTH
    placed = [key for step in bench.steps for key, _ in step.orders.copies]
    assert placed == [pinned, one, other], "each is loaded once"
    assert pinned not in bench.adapters
    assert [len(step.placements) for step in bench.steps if "sum" in names(step)] == [2, 2, 2]


@pytest.mark.parametrize("others", [(4,), (2, 3)], ids=["an adapter", "another sum"])
def test_a_sum_beside_others_in_a_small_pool_comes_about(others: tuple[int, ...]) -> None:
    """Loads are done at once and copies take three steps: what has come waits for the rest, and could be pushed out."""
    one, other, last = KEYS[0], KEYS[1], KEYS[others[-1]]
    size = {key: layout_of(key).num_pages(PAGE_BYTES) for key in KEYS}
    pages = max(size[one] + size[other], size[other] + size[last], sum(size[KEYS[i]] for i in others))
    bench = Bench(pages=pages + 2, max_num_batched_tokens=64)
    since: dict[AdapterKey, int] = {}

    def step() -> None:
        bench.step()
        for key in sorted(bench.loading):
            bench.load(key)
        now = len(bench.steps)
        since.update(dict.fromkeys(bench.copying - since.keys(), now))
        for key in [key for key, begun in since.items() if now - begun >= 3]:
            del since[key]
            bench.copy(key)

    def run_until(done: Callable[[], object]) -> None:
        for _ in range(100):
            if done():
                return
            step()
        raise AssertionError(f"they push each other out: {[key for s in bench.steps for key, _ in s.orders.copies]}")

    for key in (other, last):
        bench.add(f"before {key}", prompt=2, max_tokens=1, key=key)
        run_until(lambda: not bench.scheduler.has_requests)
    bench.add("sum", prompt=3, max_tokens=3, key=AdapterKey("s"), terms=terms_of(one, other))
    run_until(lambda: bench.copying)
    bench.add("other", prompt=3, max_tokens=3, key=AdapterKey("t"), terms=terms_of(*(KEYS[i] for i in others)))
    run_until(lambda: not bench.scheduler.has_requests)
    assert {bench.ends()[name] for name in ("sum", "other")} == {FinishReason.LENGTH}


def test_a_sum_for_which_nothing_lies_well_begins_anew() -> None:
    """A term in the middle of the pool leaves no run for the other one, though there are pages enough."""
    shapes = ((160, 160, 16), (128, 224, 24))
    layouts = [AdapterLayout((SiteDims(width, (out,)),), (((rank,),),), 2) for width, out, rank in shapes]
    one, other = (AdapterTerm(key, 1.0, layout) for key, layout in zip(KEYS, layouts, strict=False))
    bench = Bench(pages=2 + sum(layout.num_pages(PAGE_BYTES) for layout in layouts), max_num_batched_tokens=64)
    bench.checks = False
    taken = bench.pool.allocate_run(3)
    assert taken is not None
    bench.add("one", prompt=2, max_tokens=1, key=one.key, terms=(one,))
    bench.step()
    bench.bring(one.key)
    bench.step()
    bench.pool.release(range(taken[0], sum(taken)))
    bench.checks = True
    bench.add("sum", prompt=3, max_tokens=3, key=AdapterKey("s"), terms=(one, other))
    bench.run(steps=60)
    assert bench.ends() == {"one": FinishReason.LENGTH, "sum": FinishReason.LENGTH}


def test_a_sum_waits_for_all_of_its_terms() -> None:
    bench = Bench(max_num_batched_tokens=64)
    bench.add("one", key=KEYS[0])
    bench.step()
    bench.bring(KEYS[0])
    bench.add("sum", key=AdapterKey("s"), terms=terms_of(KEYS[0], KEYS[1], KEYS[2]))
    assert set(bench.step().orders.loads) == {KEYS[1], KEYS[2]}, "both at once"
    for key in (KEYS[1], KEYS[2]):
        assert "sum" not in names(bench.step())
        bench.bring(key)
    assert "sum" in names(bench.step())
    bench.add("failing", key=AdapterKey("t"), terms=terms_of(KEYS[0], KEYS[3], KEYS[4]))
    bench.step()
    bench.loading.discard(KEYS[4])
    bench.scheduler.on_adapter_failed(KEYS[4], "broken")
    bench.run()
    assert bench.errors() == {"failing": "broken"}
    assert {key for key, _, _ in bench.adapters.placements()} <= set(KEYS[:4])


def test_a_status_changes_in_one_place() -> None:
    """Else one of those that keep account of requests is forgotten somewhere."""
    changes = []
    for path in Path(lorasrv.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                targets = [t for n in ast.walk(function) if isinstance(n, ast.Assign) for t in n.targets]
                parts = [p for t in targets for p in (t.elts if isinstance(t, ast.Tuple) else [t])]
                changes += [function.name for p in parts if isinstance(p, ast.Attribute) and p.attr == "status"]
    assert changes == ["_set_status"]


def test_a_recomputed_request_that_selects_wants_no_more_than_it_was_promised() -> None:
    """Steps are larger than the pages between two checks, and the pool has none for a step."""
    policy = SelectPolicy(budget=32, sink=4, recent=16, every=32).placed(4, 256)
    bench = Bench(pages=40, max_num_batched_tokens=256)
    for name, prompt in (("a", 10), ("b", 11)):
        bench.add(name, prompt=prompt, max_tokens=400, kv_policy=policy)
    for _ in range(300):
        bench.step()
    bench.add("urgent", prompt=60, max_tokens=40, priority=-1)
    bench.run()
    assert bench.ends().keys() == {"a", "b", "urgent"}
    assert any(step.num_preempted for step in bench.steps)


def test_a_request_that_waits_for_pages_is_one_use_of_what_it_needs() -> None:
    """It is tried in every step: its adapter would outlive one of many requests, and its prefix all others."""
    cached = MemoryOptions(host_cache_bytes=1 << 20, swap_bytes=1 << 16, enable_prefix_caching=True)
    bench = Bench(pages=20, memory=cached)
    bench.add("runs", prompt=2 * PAGE_SIZE + 1, max_tokens=1000, key=KEYS[0])
    bench.arrive()
    while bench.pool.num_free > 1:
        bench.arrive()
        bench.step()
    prefixes = bench.accounts.prefixes
    assert prefixes is not None

    def uses() -> tuple[int, set[int]]:
        return bench.adapters._adapters[KEYS[0]].uses, {entry.uses for entry in prefixes._entries.values()}

    assert uses() == (1, {0})
    bench.add("waits", prompt=8 * PAGE_SIZE, max_tokens=1, key=KEYS[0])
    for _ in range(3):
        bench.step()
    assert not bench.computed()["waits"]
    assert uses() == (1, {0})
    bench.scheduler.finish(RequestId("runs"), RequestStatus.FINISHED_ABORTED)
    bench.run()
    assert uses() == (2, {0, 1}), "the pages of its prompt that the other had computed"
