"""In which order each policy serves, and in what chunks, on the bare scheduler."""

import pytest
from bare_scheduler import KEYS, Bench, names
from tiny_scheduler import scheduler

from lorasrv.config import POLICIES, Limits
from lorasrv.outputs import FinishReason
from lorasrv.scheduler.policies.fair import MIN_SWEEP, _Ledger


def _order(bench: Bench) -> list[str]:
    """Names by their first step."""
    bench.run()
    seen = dict.fromkeys(name for step in bench.steps for name in names(step))
    return list(seen)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lower_priority_number_goes_first(policy: str) -> None:
    bench = scheduler(policy, slots=1)
    for priority in (1, 0, -1):
        bench.add(f"p{priority}", priority=priority, adapter_id=str(priority))
    assert _order(bench) == ["p-1", "p0", "p1"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_least_urgent_gives_way_first(policy: str) -> None:
    bench = scheduler(policy, slots=4, pages=8)
    bench.scheduler.predictor.planned_remaining = lambda request: 1
    bench.add("idle talk", prompt=8, max_tokens=20, priority=3)
    bench.add("urgent", prompt=8, max_tokens=20, priority=-3)
    bench.run()
    preempted = {o.request_id: o.timing.num_preemptions for o in bench.outputs if o.finish_reason}
    assert preempted["urgent"] == 0
    assert preempted["idle talk"] > 0
    assert set(bench.ends().values()) == {FinishReason.LENGTH}


def test_what_waits_behind_others_costs_no_memory() -> None:
    """A batch waits while one account comes again and again, and each time it is compared with the batch."""
    ledger = _Ledger(lambda name: 1.0)
    ledger.add_waiting("batch")
    online = ledger.account("online")
    for _ in range(5 * MIN_SWEEP):
        ledger.add_waiting("online")
        ledger.remove_waiting("online")
        online.served += 30
    assert len(ledger._least) <= MIN_SWEEP + 4
    ledger.add_waiting("online")
    assert ledger._least_served() == ledger.account("batch").served
    ledger.remove_waiting("batch")
    assert ledger._least_served() == online.served


def test_fcfs_is_the_order_of_arrival() -> None:
    bench = scheduler("fcfs", slots=1)
    for name in ("hot 1", "hot 2", "cool"):
        bench.add(name, adapter_id=name.split()[0])
    assert _order(bench) == ["hot 1", "hot 2", "cool"]


def test_fair_takes_turns() -> None:
    bench = scheduler("fair", slots=1)
    for name in ("hot 1", "hot 2", "cool 1", "cool 2"):
        bench.add(name, adapter_id=name.split()[0])
    assert _order(bench) == ["hot 1", "cool 1", "hot 2", "cool 2"]


def test_fair_weighs() -> None:
    bench = scheduler("fair", slots=1, adapter_limits=Limits())
    bench.scheduler.quotas.set_limits("gold", Limits(weight=3.0))
    for i in range(12):
        bench.add(f"gold {i}", adapter_id="gold")
        bench.add(f"tin {i}", adapter_id="tin")
    first = _order(bench)[:12]
    assert sum(name.startswith("gold") for name in first) == 9


def _who_is_next(adapter_s: float) -> list[str]:
    """A slot becomes free beside a running request on the first adapter, whose account is a little ahead by now."""
    bench = scheduler("fair", slots=2)
    bench.accounts.costs.step.seconds_each = [0.0, 1e-3, 0.0, adapter_s, 0.0, 0.0]
    for key in KEYS[:2]:
        bench.add(f"bring {key[0]}", max_tokens=1, key=key)
    bench.run()
    bench.add("streams", max_tokens=60, key=KEYS[0])
    bench.add("ends", max_tokens=10)
    bench.step()
    bench.add("same", prompt=4, key=KEYS[0])
    bench.add("other", prompt=4, key=KEYS[1])
    return [name for name in _order(bench) if name in ("same", "other")]


def test_fair_shares_an_adapter_if_the_gap_is_worth_less() -> None:
    assert _who_is_next(adapter_s=0.0) == ["other", "same"]
    assert _who_is_next(adapter_s=1.0) == ["same", "other"]


def test_sjf_learns_who_is_short() -> None:
    bench = scheduler("sjf", slots=1)
    for i in range(10):
        bench.add(f"terse {i}", max_tokens=200, adapter_id="terse", ends_at=2)
        bench.add(f"verbose {i}", max_tokens=200, adapter_id="verbose", ends_at=50)
    bench.run()
    bench.add("busy", adapter_id="x")
    bench.step()
    bench.add("verbose", max_tokens=200, adapter_id="verbose", ends_at=50)
    bench.add("terse", max_tokens=200, adapter_id="terse", ends_at=2)
    assert _order(bench)[-2:] == ["terse", "verbose"]


def test_sjf_counts_prompts_and_ages() -> None:
    bench = scheduler("sjf", slots=1)
    bench.accounts.costs.step.seconds_each = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    bench.add("busy", max_tokens=2)
    bench.step()
    bench.add("long prompt", prompt=9, max_tokens=2)
    bench.add("short prompt", prompt=2, max_tokens=2)
    bench.now += 1000.0
    bench.add("later but shorter", prompt=1, max_tokens=2)
    assert _order(bench)[1:] == ["short prompt", "long prompt", "later but shorter"]


def test_mlfq_gives_a_newcomer_the_slot_of_one_that_has_run_long() -> None:
    bench = scheduler("mlfq", slots=1)
    bench.add("old", max_tokens=120)
    for _ in range(40):
        bench.step()
    bench.add("new", max_tokens=10)
    steps = [names(bench.step()) for _ in range(10)]
    assert steps == [["new"]] * 10
    assert names(bench.step()) == ["old"]
    assert bench.scheduler.counters.preemptions == 0, "it has kept its pages"
    bench.run()
    assert bench.tokens("old") == 120


def test_mlfq_falls_level_by_level_and_skips_those_a_prompt_uses_up() -> None:
    bench = scheduler("mlfq", slots=1)
    bench.add("long prompt", prompt=640, max_tokens=30)
    bench.step()
    bench.add("short prompt", prompt=4, max_tokens=30)
    assert [names(bench.step()) for _ in range(30)] == [["short prompt"]] * 30


# Chunks.


def _streams(bench: Bench, count: int) -> None:
    for i in range(count):
        bench.add(f"stream {i}", prompt=2, max_tokens=400, adapter_id=f"s{i}")
    bench.step()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("target_ms", "ratio", "chunk"),
    [(None, 2.0, 200 - 4), (100.0, None, 76), (1.0, None, 16), (100.0, 3.0, 2 * 24), (60.0, 3.0, 36)],
)
def test_a_prompt_comes_in_chunks_and_every_answer_goes_on(
    policy: str, target_ms: float | None, ratio: float | None, chunk: int
) -> None:
    """A step costs 20 ms and a ms for each token: 4 answers leave 76 tokens to a target of 100 ms."""
    bench = scheduler(policy, slots=6, budget=200, target_itl_ms=target_ms, target_itl_ratio=ratio)
    _streams(bench, 4)
    bench.accounts.costs.step.seconds_each = [20e-3, 1e-3, 0.0, 0.0, 0.0, 0.0]
    bench.add("prompt", prompt=500, max_tokens=2)
    while bench.tokens("prompt") == 0:
        requests = {s.request_id: len(s.token_ids) for s in bench.step().requests}
        left = 500 - sum(n for step in bench.steps[:-1] for n in [_share(step, "prompt")])
        assert requests.pop("prompt") == min(chunk, left)
        assert requests == {f"stream {i}": 1 for i in range(4)}


def _share(step: object, name: str) -> int:
    return sum(len(s.token_ids) for s in step.requests if s.request_id == name)  # type: ignore[attr-defined]


def test_without_answers_a_chunk_is_the_whole_budget() -> None:
    bench = scheduler("fair", slots=4, budget=200, target_itl_ms=1.0)
    bench.add("prompt", prompt=500)
    assert [bench.step().num_tokens for _ in range(3)] == [200, 200, 100]


def test_adapters_in_the_step_make_chunks_shorter() -> None:
    bench = scheduler("fair", slots=4, budget=200, target_itl_ms=100.0)
    bench.add("on an adapter", max_tokens=300, key=KEYS[0])
    bench.step()
    bench.bring(KEYS[0])
    bench.step()
    nbytes = bench.adapters.placed(KEYS[0]).layout.nbytes
    bench.accounts.costs.step.seconds_each = [0.0, 1e-3, 0.0, 40e-3 / nbytes, 0.0, 0.0]
    bench.add("prompt", prompt=500)
    assert _share(bench.step(), "prompt") == 100 - 40 - 1


def test_a_long_prompt_leaves_half_of_the_chunk_to_a_short_one() -> None:
    bench = scheduler("fcfs", slots=4, budget=64)
    bench.add("long", prompt=600)
    assert _share(bench.step(), "long") == 64
    bench.add("short", prompt=20)
    step = bench.step()
    assert {s.request_id: len(s.token_ids) for s in step.requests} == {"long": 64 - 20, "short": 20}
    assert _share(bench.step(), "long") == 63, "nobody else is there"


# What a review found.


def test_a_newcomer_has_a_token_although_answers_take_them_all() -> None:
    bench = scheduler("mlfq", slots=4, budget=4)
    for i in range(4):
        bench.add(f"old {i}", prompt=1, max_tokens=200)
    for _ in range(60):
        bench.step()
    bench.add("new", prompt=1, max_tokens=5)
    assert "new" in names(bench.step())


def test_an_old_version_does_not_wait_for_a_new_one_of_its_name() -> None:
    bench = scheduler("fair", slots=4)
    bench.add("bring", max_tokens=1, key=KEYS[0], adapter_id="mia")
    bench.run()
    bench.add("of the cold version", key=KEYS[1], adapter_id="mia")
    bench.add("of the warm version", key=KEYS[0], adapter_id="mia")
    assert names(bench.step()) == ["of the warm version"]


def test_who_runs_is_charged_however_many_accounts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorasrv.scheduler.policies.fair.MIN_SWEEP", 4)
    bench = scheduler("fair", slots=8)
    bench.add("long", max_tokens=100, adapter_id="long")
    for i in range(30):
        bench.add(f"short {i}", prompt=20, max_tokens=2, adapter_id=f"a{i}")
        bench.step()
    bench.add("again", adapter_id="long")
    account = bench.scheduler.policy._adapters["anonymous"].account("long")
    assert account.served >= 3 + 2 * bench.tokens("long")


def test_accounts_of_what_comes_and_goes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing else waits, and each has had more service than a newcomer; what runs keeps its account."""
    monkeypatch.setattr("lorasrv.scheduler.policies.fair.MIN_SWEEP", 8)
    bench = scheduler("fair", slots=8)
    bench.add("long", max_tokens=200, adapter_id="long", principal="long")
    for i in range(60):
        bench.add(f"one of many adapters {i}", prompt=20, max_tokens=1, adapter_id=f"a{i}")
        bench.add(f"one of many keys {i}", prompt=20, max_tokens=1, principal=f"key {i}")
        bench.step()
        bench.step()
    policy = bench.scheduler.policy
    assert len(policy._adapters["anonymous"]._accounts) <= 2 * 8
    assert len(policy._keys._accounts) <= 2 * 8
    assert policy._adapters.keys() == policy._keys._accounts.keys() >= {"long", "anonymous"}
    assert policy._adapters["long"].account("long").served > 100
