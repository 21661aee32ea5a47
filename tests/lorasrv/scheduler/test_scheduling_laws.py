"""What holds for every policy and every load: no idle step, a bound on waiting, no starvation; and under `fair` the
bound of the VTC paper on how far the service of two accounts may differ."""

from collections import Counter
from itertools import count
from typing import Any

import pytest
from bare_scheduler import KEYS, Bench, names
from hypothesis import given, settings
from hypothesis import strategies as st
from mispredict import expect_short_answers
from tiny_scheduler import scheduler

from lorasrv.config import POLICIES, Limits
from lorasrv.scheduler.policies.fair import ANSWER_WEIGHT, PROMPT_WEIGHT, SHARING_TOKENS
from lorasrv.scheduler.request_queue import PROTECTED_TOKENS
from lorasrv.scheduler.token_budget import MIN_CHUNK

policies = pytest.mark.parametrize("policy", POLICIES)


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, int, int, int, int]]:
    """(step of arrival, prompt, answer, adapter, priority) of each request."""
    one = st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 12), st.integers(-1, 3), st.integers(-1, 1))
    return sorted(draw(st.lists(one, min_size=1, max_size=40)))


def _offer(bench: Bench, load: list[tuple[int, int, int, int, int]], step: int) -> None:
    for i, (at, prompt, answer, adapter, priority) in enumerate(load):
        if at == step:
            key = None if adapter < 0 else KEYS[adapter]
            bench.add(f"r{i}", prompt, answer + 4, key, ends_at=answer, priority=priority)


@policies
@given(load=loads(), slots=st.integers(1, 8))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_no_slot_is_empty_while_somebody_could_have_it(policy: str, load, slots: int) -> None:
    """With pages enough, a step has everybody in it who could run, or a full house. Prompts get the whole budget."""
    bench = scheduler(policy, slots=slots, budget=64 + slots, pages=4000, bench={"checks": False})
    for step in count():
        _offer(bench, load, step)
        bench.arrive()
        could = {
            r.request_id
            for r in bench.scheduler.requests()
            if r.adapter_key is None or bench.accounts.adapter_manager.is_resident(r.adapter_key)
        }
        done = bench.step()
        wanting = {r.request_id for r in bench.scheduler.requests()} & could - set(names(done))
        assert len(done.requests) == min(slots, len(could)) or done.num_tokens == 64 + slots or not wanting
        assert bool(done.requests) == bool(could)
        if step > 30 and not bench.scheduler.has_requests:
            break
    assert len(bench.ends()) == len(load)


def _bound(k: int, longest: int, budget: int) -> int:
    """Steps, if prompts can always have so many tokens."""
    return 1 + (PROTECTED_TOKENS + 1 + -(-longest // min(MIN_CHUNK, budget))) * (1 + k)


@policies
@pytest.mark.parametrize(("pages", "answer"), [(24, 20), (80, 150), (400, 150)])
@given(st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_nobody_waits_longer_than_the_bound(policy: str, pages: int, answer: int, data: st.DataObject) -> None:
    """However hot the others are, however urgent they say they are, and with hardly any pages."""
    wait = data.draw(st.integers(1, 40), "max_wait_steps")
    slots = data.draw(st.integers(1, 4), "slots")
    budget = data.draw(st.sampled_from([1, 40, 40]), "budget")
    bench = scheduler(policy, slots=slots, budget=slots + budget, pages=pages, max_wait_steps=wait)
    if data.draw(st.booleans(), "misled"):
        expect_short_answers(bench.scheduler.predictor)
    cold = data.draw(st.sampled_from([None, KEYS[1]]), "adapter")
    number = count()
    for _ in range(slots + 2):
        bench.add(f"hot{next(number)}", 4, answer, KEYS[0], priority=-1)
    bench.add("victim", data.draw(st.integers(1, 30), "prompt"), 8, cold, priority=5)
    ready_at = None
    at_due = _when_due(bench, "victim")
    most = 2 * (wait + _bound(slots + 2, answer + 4, budget))
    for step in range(most):
        bench.arrive()
        if ready_at is None and (cold is None or bench.accounts.adapter_manager.is_resident(cold)):
            ready_at = step
        while sum(name.startswith("hot") for name in _live(bench)) < slots + 2:
            bench.add(f"hot{next(number)}", 4, answer, KEYS[0], priority=-1)
        bench.step()
        if bench.tokens("victim") or "victim" in names(bench.steps[-1]):
            break
    else:
        raise AssertionError("the victim never ran")
    assert ready_at is not None
    assert step <= max(wait, ready_at) + _bound(at_due[0] if at_due else 0, answer + 4, budget)
    for _ in range(8 * (wait + _bound(slots + 2, answer + 4, budget))):
        if "victim" in bench.ends():
            break
        bench.arrive()
        while sum(name.startswith("hot") for name in _live(bench)) < slots + 2:
            bench.add(f"hot{next(number)}", 4, answer, KEYS[0], priority=-1)
        bench.step()
    assert "victim" in bench.ends(), "it began, and starves"


def _when_due(bench: Bench, name: str) -> list[int]:
    """How many are due before it, once it is, before the step has served any of them."""
    lineup, places = bench.scheduler._queue, []
    begin_step = lineup.begin_step

    def begin(*args: Any) -> None:
        begin_step(*args)
        if not places and name in lineup.starved:
            places.append(list(lineup.starved).index(name))

    lineup.begin_step = begin
    return places


def _live(bench: Bench) -> list[str]:
    return [r.request_id for r in bench.scheduler.requests()]


@pytest.mark.parametrize("policy", ["mlfq", "sjf"])
def test_a_long_job_ends_among_endless_short_ones(policy: str) -> None:
    bench = scheduler(policy, slots=2, budget=16, pages=200, bench={"checks": False, "step_s": 0.05}, max_wait_steps=50)
    bench.add("long", prompt=60, max_tokens=60)
    for step in range(4000):
        if "long" in bench.ends():
            break
        for i in range(3 - len(_live(bench)) + 1):
            bench.add(f"short{step}-{i}", prompt=1, max_tokens=3)
        bench.step()
    assert "long" in bench.ends()
    waited = bench.first_step("long")
    assert waited > 10 or policy == "mlfq", "the policy was meant to put the short ones first"


class _Service:
    """Weighted tokens of each account, counted outside the scheduler."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.served: Counter[str] = Counter()

    def count(self, owner: dict[str, str], prompts: dict[str, int]) -> None:
        """What the last step has done."""
        for scheduled in self._bench.steps[-1].requests:
            generated = int(scheduled.samples)
            tokens = PROMPT_WEIGHT * (len(scheduled.token_ids) - generated) + ANSWER_WEIGHT * generated
            self.served[owner[scheduled.request_id]] += tokens


@given(data=st.data())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_two_backlogged_accounts_are_served_alike(data: st.DataObject) -> None:
    """|W_f / w_f - W_g / w_g| stays below 2 max(Wp L, Wq M) / w + the sharing allowance, over any time in which both
    have requests waiting."""
    slots = data.draw(st.integers(1, 6), "slots")
    weights = {"f": data.draw(st.sampled_from([1.0, 2.0, 4.0]), "weight of f"), "g": 1.0}
    shape = {
        name: (data.draw(st.integers(1, 40), f"prompt of {name}"), data.draw(st.integers(1, 20), f"answer of {name}"))
        for name in weights
    }
    by_key = data.draw(st.booleans(), "by key")
    bench = scheduler("fair", slots=slots, budget=slots + 32, bench={"checks": False}, max_wait_steps=1 << 20)
    owner: dict[str, str] = {}
    service = _Service(bench)
    if not by_key:
        for name, weight in weights.items():
            bench.scheduler.quotas.set_limits(name, Limits(weight=weight))
    else:
        weights = {"f": 1.0, "g": 1.0}
    number = count()
    gaps = []
    for _ in range(200):
        for name in weights:
            backlog = sum(owner[r] == name for r in _live(bench))
            for _ in range(2 * slots + 2 - backlog):
                rid = f"{name}{next(number)}"
                owner[rid] = name
                prompt, answer = shape[name]
                who = {"principal": name, "adapter_id": ""} if by_key else {"adapter_id": name}
                bench.add(rid, prompt, answer, None, **who)
        bench.step()
        service.count(owner, {})
        gaps.append(service.served["f"] / weights["f"] - service.served["g"] / weights["g"])
    longest = max(prompt for prompt, _ in shape.values())
    most_running = slots * max(answer for _, answer in shape.values())
    bound = 2 * max(PROMPT_WEIGHT * longest, ANSWER_WEIGHT * most_running) / min(weights.values()) + SHARING_TOKENS
    assert max(gaps) - min(gaps) <= bound
    assert min(service.served.values()) > 0


def _served_under(policy: str) -> Counter[str]:
    """Tokens of a persona at ten times the load of nine others, and of those, when all wait."""
    bench = scheduler(policy, slots=4, bench={"checks": False})
    owner = {}
    for i in range(90):
        owner[f"hot{i}"] = "hot"
        bench.add(f"hot{i}", 8, 8, adapter_id="hot")
    for i in range(9):
        owner[f"p{i}"] = "others"
        bench.add(f"p{i}", 8, 8, adapter_id=f"p{i}")
    for _ in range(30):
        bench.step()
    served: Counter[str] = Counter()
    for name, tokens in bench.computed().items():
        served[owner[name]] += tokens
    return served


def test_one_hot_persona_does_not_starve_nine_others() -> None:
    assert _served_under("fcfs")["others"] == 0
    fair = _served_under("fair")
    assert fair["others"] == 9 * 15, "all nine are through"


@given(data=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_an_account_below_its_share_has_a_slot_within_two_steps(data: st.DataObject) -> None:
    """However long the answers are that hold the slots. Those that pause keep their pages and end, and no request that
    takes a slot pauses more than one of them."""
    slots = data.draw(st.integers(2, 8), "slots")
    count_cool = data.draw(st.integers(1, slots - 1), "accounts that ask one by one")
    by_key = data.draw(st.booleans(), "by key")
    answer = data.draw(st.integers(4, 40), "answer")
    bench = scheduler("fair", slots=slots, budget=9 * slots, bench={"checks": False}, max_wait_steps=400)
    for i in range(3 * slots):
        bench.add(f"hot{i}", 8, 60, adapter_id="hot", principal="hot" if by_key else "all")
    bench.step()
    asked: dict[str, int] = {}
    number = count()
    for step in range(1, 120):
        bench.scheduler.check_integrity()
        for account in range(count_cool):
            if not any(name.startswith(f"cool{account} ") for name in _live(bench)):
                rid = f"cool{account} {next(number)}"
                who = f"cool{account}"
                bench.add(rid, 8, answer, adapter_id=who, principal=who if by_key else "all")
                asked[rid] = step
        bench.step()
    for rid, step in asked.items():
        if step < 118:
            assert bench.first_step(rid) <= step + 1
    bench.run()
    assert bench.scheduler.counters.preemptions == 0
    assert bench.scheduler.num_starved == 0
    assert sum(_num_pauses(bench, f"hot{i}") for i in range(3 * slots)) <= len(asked)


def _num_pauses(bench: Bench, name: str) -> int:
    had = [name in names(step) for step in bench.steps]
    last = max(i for i, has in enumerate(had) if has)
    return sum(had[i] and not had[i + 1] for i in range(last))


def test_of_as_many_accounts_as_slots_nobody_pauses() -> None:
    bench = scheduler("fair", slots=4, bench={"checks": False})
    for i in range(12):
        bench.add(f"r{i}", 8, 30, adapter_id=f"a{i}")
    bench.run()
    assert all(_num_pauses(bench, f"r{i}") == 0 for i in range(12))


def test_a_hot_persona_of_one_key_does_not_touch_another_key() -> None:
    bench = scheduler("fair", slots=2, bench={"checks": False})
    for i in range(60):
        bench.add(f"a{i}", 8, 8, adapter_id=f"of-a{i % 20}", principal="a")
    for i in range(4):
        bench.add(f"b{i}", 8, 8, adapter_id="of-b", principal="b")
    for _ in range(40):
        bench.step()
    assert all(f"b{i}" in bench.ends() for i in range(4)), "one account of b has as much as twenty of a"


def test_whoever_comes_back_has_saved_nothing_up() -> None:
    bench = scheduler("fair", slots=1, bench={"checks": False})
    bench.add("early", 4, 4, adapter_id="idle")
    bench.run()
    for i in range(20):
        bench.add(f"busy{i}", 4, 8, adapter_id="busy")
    for _ in range(100):
        bench.step()
    for i in range(10):
        bench.add(f"idle{i}", 4, 8, adapter_id="idle")
    before = bench.computed()
    for _ in range(64):
        bench.step()
    gained = bench.computed()
    gained.subtract(before)
    of_idle = sum(n for name, n in gained.items() if name.startswith("idle"))
    of_busy = sum(n for name, n in gained.items() if name.startswith("busy"))
    assert abs(of_idle - of_busy) <= 30, "half each, not all of it for whoever was away"


@policies
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@given(load=loads(), seed=st.integers(0, 3))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_hardly_any_pages_and_answers_longer_than_expected(policy: str, preemption: str, load, seed: int) -> None:
    """Several have to give way in one step, of those that were looked at already and those that were not."""
    bench = scheduler(policy, slots=6, budget=40, pages=32, bench={"preemption": preemption}, max_wait_steps=30)
    expect_short_answers(bench.scheduler.predictor)
    for step in range(31):
        _offer(bench, [(at % 4, p, a + 12 * seed, adapter, prio) for at, p, a, adapter, prio in load], step)
        bench.arrive()
        bench.step()
    bench.run(4000)
    assert len(bench.ends()) == len(load)


def test_a_limited_account_saves_nothing_up() -> None:
    bench = scheduler("fair", slots=1, pages=4000, bench={"checks": False})
    bench.scheduler.quotas.set_limits("slow", Limits(tokens_per_s=0.05))
    for i in range(40):
        bench.add(f"slow{i}", 8, 8, adapter_id="slow")
        bench.add(f"busy{i}", 8, 8, adapter_id="busy")
    for _ in range(200):
        bench.step()
    for i in range(20):
        bench.add(f"new{i}", 8, 8, adapter_id="new")
    before = bench.computed()
    for _ in range(100):
        bench.step()
    gained = bench.computed()
    gained.subtract(before)
    of = {name: sum(n for rid, n in gained.items() if rid.startswith(name)) for name in ("busy", "new")}
    assert abs(of["busy"] - of["new"]) <= 45, "the newcomer is lifted to those that compete, not to one that may not"


def test_a_second_choice_does_not_hold_up_others() -> None:
    bench = scheduler("fair", slots=4)
    bench.add("first", prompt=800, max_tokens=4)
    bench.add("second", prompt=800, max_tokens=4, fork_of="first")
    bench.add("short", prompt=3, max_tokens=4)
    assert "short" in {name for _ in range(2) for name in names(bench.step())}


def test_limits_are_nobodys_due() -> None:
    bench = scheduler("fair", slots=4, bench={"checks": False}, max_wait_steps=20, adapter_limits=Limits(max_running=1))
    for i in range(100):
        bench.add(f"r{i}", 4, 8, adapter_id="mia")
    for _ in range(200):
        bench.step()
    assert bench.scheduler.num_starved == 0
