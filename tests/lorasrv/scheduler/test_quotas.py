"""Every limit holds, on the bare scheduler; what is refused says which limit, of whom."""

import pytest
from bare_scheduler import KEYS, PAGE_BYTES, Bench, layout_of, names
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_scheduler import scheduler

from adapter_store.spec import AdapterKey
from lorasrv.config import NO_SHARE, WHOLE, Limits, LimitShare, MemoryOptions
from lorasrv.outputs import FinishReason, Refusal, RequestId
from lorasrv.request import RequestStatus
from lorasrv.scheduler.quotas import Blocker
from lorasrv.scheduler.waiting_lanes import MAX_LOADS


def _running(bench: Bench, name: str) -> int:
    return sum(share.startswith(name) for share in names(bench.steps[-1]))


@pytest.mark.parametrize("of", ["adapter", "key"])
def test_requests_of_one_account_in_a_step(of: str) -> None:
    bench = scheduler("fair", pages=400, **{f"{of}_limits": Limits(max_running=2)})
    who = {"adapter": {"adapter_id": "mia"}, "key": {"principal": "studio"}}[of]
    for i in range(5):
        bench.add(f"limited{i}", max_tokens=6, **who)
    bench.add("free", max_tokens=6, adapter_id="leo", principal="other")
    for _ in range(3):
        bench.step()
        assert _running(bench, "limited") == 2
        assert _running(bench, "free") == 1
    bench.run()
    assert set(bench.ends().values()) == {FinishReason.LENGTH}


def test_requests_of_one_account_in_the_queue() -> None:
    bench = scheduler("fair", pages=400, adapter_limits=Limits(max_running=1, max_queued=2))
    for i in range(4):
        bench.add(f"r{i}", adapter_id="mia")
    bench.add("other", adapter_id="leo")
    bench.add("base 0")
    bench.add("base 1")
    bench.add("base 2")
    bench.run()
    ends = bench.ends()
    assert [name for name, why in ends.items() if why is FinishReason.REFUSED] == ["r3"]
    refused = next(o for o in bench.outputs if o.request_id == "r3")
    assert refused.refusal is Refusal.LIMIT
    assert refused.error == "adapter 'mia' has 2 requests waiting; its max_queued is 2"
    assert refused.retry_after_s
    assert refused.retry_after_s >= 1


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("max_running", [None, 1, 2])
def test_who_finds_a_slot_is_not_queued(slots: int, max_running: int | None) -> None:
    """However many come between two steps; and whoever a step has left waiting is."""
    bench = scheduler(slots=slots, pages=400)
    bench.scheduler.quotas.set_limits("mia", Limits(max_running=max_running, max_queued=1))
    places = min(slots, max_running or slots)
    for i in range(9):
        bench.add(f"mia{i}", 4, 5, adapter_id="mia")
    refused = lambda: [name for name, why in bench.ends().items() if why is FinishReason.REFUSED]  # noqa: E731
    bench.step()
    assert refused() == [f"mia{i}" for i in range(places + 1, 9)]
    assert _running(bench, "mia") == places
    bench.add("late", adapter_id="mia")
    bench.run()
    assert refused()[9 - places - 1 :] == ["late"]


@pytest.mark.parametrize("kept_back_by", ["rate", "adapter", "pages"])
def test_whom_a_step_leaves_waiting_is_queued_though_slots_are_free(kept_back_by: str) -> None:
    bench = scheduler("fair", pages=400)
    limits = {"max_queued": 2, "tokens_per_s": 0.01 if kept_back_by == "rate" else None}
    if kept_back_by == "pages":
        limits["resident_bytes"] = bench.kv.pages_for(16 + 9) * PAGE_BYTES
    bench.scheduler.quotas.set_limits("mia", Limits(**limits))
    key = KEYS[0] if kept_back_by == "adapter" else None
    for i in range(12):
        bench.add(f"mia{i}", 16, 9, key, adapter_id="mia")
        bench.step()
    refused = [name for name, why in bench.ends().items() if why is FinishReason.REFUSED]
    assert len(refused) >= 8, refused
    assert len(bench.scheduler._queue.waiting) == 2


def test_who_leaves_between_two_steps_leaves_no_room_behind() -> None:
    bench = scheduler("fair", pages=400)
    bench.scheduler.quotas.set_limits("mia", Limits(max_running=2, max_queued=1))
    for i in range(2):
        bench.add(f"gone{i}", adapter_id="mia")
        bench.scheduler.finish(RequestId(f"gone{i}"), RequestStatus.FINISHED_ABORTED)
    for i in range(5):
        bench.add(f"mia{i}", adapter_id="mia")
    bench.step()
    assert [name for name, why in bench.ends().items() if why is FinishReason.REFUSED] == ["mia3", "mia4"]


@given(rate=st.floats(0.5, 20.0), prompt=st.integers(1, 30), answer=st.integers(1, 10))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_tokens_a_second(rate: float, prompt: int, answer: int) -> None:
    """Never above the rate, but for a burst of two seconds and one chunk of debt; and not far below it."""
    bench = scheduler("fair", pages=400)
    bench.checks, bench.step_s = False, 0.1
    bench.scheduler.quotas.set_limits("mia", Limits(tokens_per_s=rate))
    for i in range(40):
        bench.add(f"mia{i}", prompt, answer, adapter_id="mia")
        bench.add(f"leo{i}", 1, 2, adapter_id="leo")
    wanted = 40 * (prompt + answer - 1)
    for _ in range(300):
        bench.step()
        computed = sum(n for name, n in bench.computed().items() if name.startswith("mia"))
        assert computed <= rate * (bench.now + 2.0) + 64
    assert computed >= min(wanted, rate * bench.now) - 1
    assert sum(name.startswith("leo") for name in bench.ends()) == 40, "nobody else is slower for it"


def test_a_rate_says_when_it_is_paid_and_loses_nothing() -> None:
    bench = scheduler("fair", pages=400)
    bench.scheduler.quotas.set_limits("mia", Limits(tokens_per_s=2.0))
    bench.add("mia", prompt=9, max_tokens=6, adapter_id="mia")
    bench.step()
    idle = bench.step()
    assert not idle.requests
    assert idle.wake_s is not None
    assert bench.now < idle.wake_s <= bench.now + 4
    bench.run()
    assert bench.tokens("mia") == 6
    assert bench.scheduler.counters.preemptions == 0, "it keeps its pages meanwhile"


@given(bytes_=st.integers(6, 40), data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_bytes_of_the_pool(bytes_: int, data: st.DataObject) -> None:
    bench = scheduler("fair", pages=400, adapter_limits=Limits(resident_bytes=bytes_ * PAGE_BYTES))
    key = KEYS[data.draw(st.integers(0, 3))]
    accepted = []
    for i in range(12):
        bench.add(f"r{i}", data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30)), key)
        accepted.append(f"r{i}")
    for _ in range(400):
        bench.arrive()
        bench.step()
        held = sum(len(share.page_table) for share in bench.steps[-1].requests)
        pages = bench.adapters.placed(key).num_pages if bench.steps[-1].requests else 0
        assert held + pages <= bytes_
        if not bench.scheduler.has_requests:
            break
    bench.run()
    ends = bench.ends()
    assert sorted(ends) == sorted(accepted)
    for name, why in ends.items():
        if why is FinishReason.REFUSED:
            assert "ask for fewer tokens or raise the limit" in bench.errors()[name]


def test_what_stands_behind_one_that_can_never_run_goes_on() -> None:
    bench = scheduler("fair", pages=400)
    bench.scheduler.quotas.set_limits("mia", Limits(tokens_per_s=0.5))
    for name, answer in (("first", 20), ("large", 40), ("small", 2)):
        bench.add(name, 8, answer, adapter_id="mia")
        bench.step()
    bench.scheduler.quotas.set_limits("mia", Limits(resident_bytes=8 * PAGE_BYTES))
    step = bench.step()
    for _ in range(80):
        if not bench.scheduler.has_requests:
            break
        assert step.requests or step.wake_s is not None, "the engine would sleep"
        step = bench.step()
    bench.outputs += bench.scheduler.take_outputs()
    assert bench.ends()["large"] is FinishReason.REFUSED
    assert bench.ends()["small"] is FinishReason.LENGTH


def test_two_rates_are_waited_for_and_nobody_spins() -> None:
    bench = scheduler(
        "fair", pages=400, adapter_limits=Limits(tokens_per_s=10.0), key_limits=Limits(tokens_per_s=100.0)
    )
    bench.step_s = 0.01
    bench.add("long", prompt=60, max_tokens=100, adapter_id="mia")
    bench.add("again", prompt=60, max_tokens=100, adapter_id="mia")
    for _ in range(400):
        step = bench.step()
        assert step.requests or (step.wake_s is not None and step.wake_s > bench.now)


def test_lowering_a_limit_ends_what_could_never_run() -> None:
    bench = scheduler("fair", pages=400)
    bench.scheduler.quotas.set_limits("mia", Limits(max_running=1))
    bench.add("first", 8, 20, adapter_id="mia")
    bench.add("second", 8, 20, adapter_id="mia")
    bench.step()
    bench.scheduler.quotas.set_limits("mia", Limits(resident_bytes=3 * PAGE_BYTES))
    bench.run()
    assert bench.ends() == {"first": FinishReason.LENGTH, "second": FinishReason.REFUSED}
    bench.scheduler.quotas.set_limits("mia", None)
    bench.add("third", 8, 20, adapter_id="mia")
    bench.run()
    assert bench.ends()["third"] is FinishReason.LENGTH


def test_a_share_bounds_what_begins_and_not_what_runs() -> None:
    bench = scheduler("fair", pages=400, bench={"step_s": 0.01})
    quotas = bench.scheduler.quotas
    quotas.set_limits("mia", Limits(max_running=4, tokens_per_s=100.0, max_queued=9))
    assert quotas.set_share("mia", NO_SHARE) == NO_SHARE
    for i in range(5):
        bench.add(f"r{i}", 8, 200, adapter_id="mia")
    step = bench.step()
    assert not step.requests
    assert step.wake_s is None, "only another share helps"
    share = LimitShare(3, 50.0)
    assert quotas.set_share("mia", share) == share
    assert len(names(bench.step())) == 3
    assert quotas.set_share("mia", NO_SHARE) == share
    bench.scheduler.finish(RequestId("r0"), RequestStatus.FINISHED_ABORTED)
    bench.now += 10.0
    assert names(bench.step()) == ["r1", "r2"], "they go on, at their rate"
    assert quotas.set_share("mia", NO_SHARE) == LimitShare(2, 50.0)
    for name in ("r1", "r2"):
        bench.scheduler.finish(RequestId(name), RequestStatus.FINISHED_ABORTED)
    assert quotas.set_share("mia", NO_SHARE) == NO_SHARE
    bench.now += 10.0
    assert not bench.step().requests
    assert quotas.set_share("mia", WHOLE) == WHOLE
    assert names(bench.step()) == ["r3", "r4"]


def test_a_share_keeps_its_rate_until_what_it_owes_is_paid() -> None:
    bench = scheduler("fair", pages=400, bench={"step_s": 0.01})
    quotas = bench.scheduler.quotas
    quotas.set_limits("mia", Limits(tokens_per_s=50.0))
    quotas.set_share("mia", LimitShare(None, 10.0))
    bench.add("r", 20, 1, adapter_id="mia")
    bench.run()
    assert quotas.set_share("mia", NO_SHARE) == LimitShare(0, 10.0), "it had no burst, and owes 20 tokens"
    bench.now += 1.9
    assert quotas.set_share("mia", NO_SHARE) == LimitShare(0, 10.0)
    bench.now += 0.2
    assert quotas.set_share("mia", NO_SHARE) == NO_SHARE


def test_a_share_refuses_nothing_that_the_limit_allows() -> None:
    """Beams that run together wait for a larger share."""
    bench = scheduler("fair", pages=400)
    quotas = bench.scheduler.quotas
    quotas.set_limits("mia", Limits(max_running=4))
    quotas.set_share("mia", LimitShare(2, None))
    bench.add_beams("b", 8, 6, 4, adapter_id="mia")
    for _ in range(5):
        assert not bench.step().requests, "what it cannot use, it does not hold"
    quotas.set_share("mia", LimitShare(4, None))
    bench.step()
    assert bench.scheduler.quotas.set_share("mia", NO_SHARE) == LimitShare(4, 0.0), "beams that are still to come count"
    bench.run()
    assert set(bench.ends().values()) == {FinishReason.LENGTH}


def test_a_smaller_share_holds_once_a_group_of_beams_has_ended() -> None:
    """Neither the groups behind it nor plain requests begin in its place."""
    bench = scheduler("fair", pages=900)
    quotas = bench.scheduler.quotas
    quotas.set_limits("mia", Limits(max_running=8))
    quotas.set_share("mia", LimitShare(8, None))
    for number in range(3):
        bench.add_beams(f"b{number}", 8, 6, 8, adapter_id="mia")
    bench.step()
    for number in range(4):
        bench.add(f"plain{number}", 8, 30, adapter_id="mia")
    assert quotas.set_share("mia", LimitShare(1, None)) == LimitShare(8, None)
    while len(bench.ends()) < 8:
        assert {name[:2] for name in names(bench.step())} == {"b0"}
    for _ in range(40):
        assert len(names(bench.step())) <= 1
    assert "plain0" in bench.ends()
    assert quotas.set_share("mia", LimitShare(1, None)) == LimitShare(1, None)
    quotas.set_share("mia", WHOLE)
    bench.run()
    assert set(bench.ends().values()) == {FinishReason.LENGTH}


def test_narrow_searches_do_not_overtake_a_wide_one_within_a_share() -> None:
    bench = scheduler("fair", pages=900)
    bench.scheduler.quotas.set_limits("mia", Limits(max_running=8))
    bench.scheduler.quotas.set_share("mia", LimitShare(5, None))
    for number in range(2):
        bench.add_beams(f"n{number}", 8, 6 + 3 * number, 2, adapter_id="mia")
    bench.step()
    bench.add_beams("wide", 8, 6, 4, adapter_id="mia")
    for number in range(2, 60):
        bench.step()
        bench.add_beams(f"n{number}", 8, 6, 2, adapter_id="mia")
        if "wide" in names(bench.steps[-1]):
            break
    assert "wide" in names(bench.steps[-1])
    bench.run()


def test_a_group_that_leaves_while_it_does_not_run_wakes_those_that_waited_for_its_beams() -> None:
    """It was preempted, and its key has no tokens left."""
    bench = scheduler("fair", pages=400, key_limits=Limits(tokens_per_s=0.5))
    quotas = bench.scheduler.quotas
    quotas.set_limits("mia", Limits(max_running=8))
    quotas.set_share("mia", LimitShare(4, None))
    bench.add_beams("first", 8, 30, 4, adapter_id="mia", principal="slow")
    bench.step()
    bench.add_beams("second", 8, 6, 4, adapter_id="mia")
    for request in [r for r in bench.scheduler.requests() if r.status is RequestStatus.RUNNING]:
        bench.scheduler._planner.preempt(request)
    for _ in range(3):
        assert not bench.step().requests
    bench.scheduler.finish(RequestId("first"), RequestStatus.FINISHED_ABORTED)
    assert names(bench.step()) == ["second"]


def test_a_share_that_ends_takes_nothing_from_others() -> None:
    """Two groups of beams run; the share of one adapter becomes nothing."""
    bench = scheduler("fair", pages=400)
    bench.scheduler.quotas.set_limits("mia", Limits(max_running=4))
    for name in ("mia", "zoe"):
        bench.add_beams(name, 8, 20, 2, adapter_id=name)
    for _ in range(4):
        bench.step()
    assert bench.scheduler.num_running == 4
    bench.scheduler.quotas.set_share("mia", NO_SHARE)
    bench.run()
    assert set(bench.ends().values()) == {FinishReason.LENGTH}
    assert bench.scheduler.counters.preemptions == 0


def test_cold_requests_of_a_key_that_may_go_on_wait_for_their_turn_to_be_loaded() -> None:
    small, large, loading = KEYS[0], KEYS[5], KEYS[3]
    memory = MemoryOptions(host_cache_bytes=layout_of(small).nbytes + layout_of(loading).nbytes)
    bench = scheduler(bench={"memory": memory}, key_limits=Limits(max_running=1))
    for name in ("first", "second"):
        bench.add(name, max_tokens=6, principal="k")
        bench.step()
    bench.add("loading", key=loading, principal="other")
    bench.add("large", key=large, principal="another")
    bench.add("small", key=small, principal="k")
    while bench.ends().keys() != {"first", "second"}:
        bench.step()
    bench.step()
    assert bench.loading == {loading}, "a small adapter overtakes a large one that waits for host memory"
    bench.load(loading)
    bench.run()
    assert bench.first_step("large") < bench.first_step("small")


def test_a_key_that_is_held_while_the_first_in_line_waits_for_host_memory_lets_others_load() -> None:
    small, large, loading = KEYS[0], KEYS[5], KEYS[3]
    memory = MemoryOptions(host_cache_bytes=layout_of(small).nbytes + layout_of(loading).nbytes)
    bench = scheduler(bench={"memory": memory}, key_limits=Limits(max_running=1))
    bench.add("first", max_tokens=60, principal="k")
    bench.add("loading", key=loading, principal="other")
    bench.step()
    bench.add("large", key=large, principal="k")
    bench.add("small", key=small, principal="another")
    assert (bench.step().wake_s, bench.loading) == (None, {loading})
    bench.add("second", principal="k")
    assert bench.step().wake_s == 0.0, "nothing else would wake the engine"
    bench.step()
    assert bench.loading == {loading, small}


def test_a_key_that_may_go_on_begins_no_more_loads_in_a_step_than_others() -> None:
    bench = scheduler(key_limits=Limits(max_running=1))
    for name in ("first", "second"):
        bench.add(name, max_tokens=6, principal="k")
        bench.step()
    for number in range(3 * MAX_LOADS):
        bench.add(f"cold{number}", key=AdapterKey("a" + f"{number:063x}"), principal="k")
    for _ in range(20):
        bench.step()
    loads = [len(step.orders.loads) for step in bench.steps]
    assert (sum(loads), max(loads)) == (3 * MAX_LOADS, MAX_LOADS)


def test_accounts_without_anything_are_forgotten() -> None:
    bench = scheduler("fair", pages=400, adapter_limits=Limits(tokens_per_s=1000.0))
    for i in range(1500):
        bench.add(f"r{i}", adapter_id=f"a{i}")
        bench.scheduler.finish(RequestId(f"r{i}"), RequestStatus.FINISHED_ABORTED)
    assert len(bench.scheduler.quotas._adapters) < 600


def test_a_request_that_is_throttled_while_its_adapter_loads_waits_once() -> None:
    bench = scheduler("fcfs", max_wait_steps=1)
    bench.add("r", key=KEYS[0])
    for _ in range(4):
        bench.step()
    [request] = bench.scheduler.requests()
    queue = bench.scheduler._queue
    assert queue._loading, "it would be starved, but for the load"
    queue.mark_throttled(request, Blocker.limits_of(request.message.adapter_id, request.message.principal)[0])
    bench.scheduler.check_integrity()
    bench.run()
    assert "r" in bench.ends()


@pytest.mark.parametrize(("short", "starved"), [(2, ["large"]), (8, ["large", "old"])], ids=["would be", "is"])
def test_a_starved_request_that_its_rate_throttles_gives_up_its_place_in_the_same_step(
    short: int, starved: list[str]
) -> None:
    """Nothing would wake the engine for another step, in which a starved request ahead of it could have its pages."""
    limits = Limits(tokens_per_s=1000.0, max_running=1)
    bench = scheduler("fcfs", slots=1, pages=10, max_wait_steps=3, adapter_limits=limits)
    bench.add("old", prompt=12, max_tokens=20, adapter_id="mia")
    bench.step()
    bench.add("short", max_tokens=short, adapter_id="short")
    bench.add("large", prompt=28, adapter_id="large")
    while "short" not in bench.ends():
        bench.step()
    queue = bench.scheduler._queue
    assert list(queue.starved) == starved
    assert [request.request_id for request in queue.running] == ["old"]
    bench.scheduler.quotas.charge(queue.running[0], 10_000)
    assert names(bench.step()) == ["large"]
    bench.run()
    assert bench.ends().keys() == {"old", "short", "large"}
