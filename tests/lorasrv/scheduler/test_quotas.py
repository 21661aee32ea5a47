"""Every limit holds, on the bare scheduler, and so do deadlines; what is refused says which limit, of whom."""

import pytest
from bare_scheduler import KEYS, PAGE_BYTES, Bench, names
from hypothesis import given, settings
from hypothesis import strategies as st

from lorasrv.config import Limits, SchedulerOptions
from lorasrv.errors import ConfigError, InvalidLimits
from lorasrv.memory.cost_model import MIN_MEASURED_STEPS
from lorasrv.outputs import FinishReason, Refusal, RequestId
from lorasrv.request import RequestStatus
from lorasrv.scheduler.length_predictor import MIN_ANSWERS


def _bench(**options: object) -> Bench:
    return Bench(pages=400, max_num_batched_tokens=64, options={"policy": "fair", **options})


def _running(bench: Bench, name: str) -> int:
    return sum(share.startswith(name) for share in names(bench.steps[-1]))


@pytest.mark.parametrize("of", ["adapter", "key"])
def test_requests_of_one_account_in_a_step(of: str) -> None:
    bench = _bench(**{f"{of}_limits": Limits(max_running=2)})
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
    bench = _bench(adapter_limits=Limits(max_running=1, max_queued=2))
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


@pytest.mark.parametrize("seats", [1, 2, 3, 8])
@pytest.mark.parametrize("max_running", [None, 1, 2])
def test_who_finds_a_seat_is_not_queued(seats: int, max_running: int | None) -> None:
    """However many come between two steps; and whoever a step has left waiting is."""
    bench = Bench(pages=400, max_num_batched_tokens=64, max_num_seqs=seats)
    bench.scheduler.quotas.set_limits("mia", Limits(max_running=max_running, max_queued=1))
    places = min(seats, max_running or seats)
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
def test_whom_a_step_leaves_waiting_is_queued_though_seats_are_free(kept_back_by: str) -> None:
    bench = _bench()
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
    bench = _bench()
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
    bench = _bench()
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
    bench = _bench()
    bench.scheduler.quotas.set_limits("mia", Limits(tokens_per_s=2.0))
    bench.add("mia", prompt=9, max_tokens=6, adapter_id="mia")
    bench.step()
    idle = bench.step()
    assert not idle.scheduled
    assert idle.wake_s is not None
    assert bench.now < idle.wake_s <= bench.now + 4
    bench.run()
    assert bench.tokens("mia") == 6
    assert bench.scheduler.counters.preemptions == 0, "it keeps its pages meanwhile"


@given(bytes_=st.integers(6, 40), data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_bytes_of_the_pool(bytes_: int, data: st.DataObject) -> None:
    bench = _bench(adapter_limits=Limits(resident_bytes=bytes_ * PAGE_BYTES))
    key = KEYS[data.draw(st.integers(0, 3))]
    accepted = []
    for i in range(12):
        bench.add(f"r{i}", data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30)), key)
        accepted.append(f"r{i}")
    for _ in range(400):
        bench.arrive()
        bench.step()
        held = sum(len(share.page_table) for share in bench.steps[-1].scheduled)
        pages = bench.adapters.placed(key).num_pages if bench.steps[-1].scheduled else 0
        assert held + pages <= bytes_
        if not bench.scheduler.has_requests:
            break
    bench.run()
    ends = bench.ends()
    assert sorted(ends) == sorted(accepted)
    for name, why in ends.items():
        if why is FinishReason.REFUSED:
            assert "lower max_tokens or raise the limit" in bench.errors()[name]


def test_what_stands_behind_one_that_can_never_run_goes_on() -> None:
    bench = _bench()
    bench.scheduler.quotas.set_limits("mia", Limits(tokens_per_s=0.5))
    for name, answer in (("first", 20), ("large", 40), ("small", 2)):
        bench.add(name, 8, answer, adapter_id="mia")
        bench.step()
    bench.scheduler.quotas.set_limits("mia", Limits(resident_bytes=8 * PAGE_BYTES))
    step = bench.step()
    for _ in range(80):
        if not bench.scheduler.has_requests:
            break
        assert step.scheduled or step.wake_s is not None, "the engine would sleep"
        step = bench.step()
    bench.outputs += bench.scheduler.take_outputs()
    assert bench.ends()["large"] is FinishReason.REFUSED
    assert bench.ends()["small"] is FinishReason.LENGTH


def test_two_rates_are_waited_for_and_nobody_spins() -> None:
    bench = _bench(adapter_limits=Limits(tokens_per_s=10.0), key_limits=Limits(tokens_per_s=100.0))
    bench.step_s = 0.01
    bench.add("long", prompt=60, max_tokens=100, adapter_id="mia")
    bench.add("again", prompt=60, max_tokens=100, adapter_id="mia")
    for _ in range(400):
        step = bench.step()
        assert step.scheduled or (step.wake_s is not None and step.wake_s > bench.now)


def test_lowering_a_limit_ends_what_could_never_run() -> None:
    bench = _bench()
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


def test_accounts_without_anything_are_forgotten() -> None:
    bench = _bench(adapter_limits=Limits(tokens_per_s=1000.0))
    for i in range(1500):
        bench.add(f"r{i}", adapter_id=f"a{i}")
        bench.scheduler.finish(RequestId(f"r{i}"), RequestStatus.FINISHED_ABORTED)
    assert len(bench.scheduler.quotas._adapters) < 600


# Deadlines.


def test_a_request_ends_when_its_time_is_over_wherever_it_is() -> None:
    bench = Bench(pages=400, max_num_seqs=1, max_num_batched_tokens=64)
    bench.add("running", max_tokens=100, timeout_s=5.0)
    bench.add("waiting", timeout_s=3.0)
    bench.add("loading", key=KEYS[0], timeout_s=4.0)
    assert bench.step().wake_s == 3.0
    for _ in range(8):
        bench.step()
    assert bench.ends() == dict.fromkeys(("waiting", "loading", "running"), FinishReason.TIMEOUT)
    assert bench.tokens("running") == 4, "what was generated until then"
    assert bench.errors()["running"] == "not done within its timeout_s of 5"
    assert {o.refusal for o in bench.outputs if o.finish_reason} == {Refusal.TIMEOUT}
    assert bench.pool.num_free == 400


def test_who_ends_early_is_not_remembered_until_its_time() -> None:
    bench = Bench(pages=400)
    for i in range(2000):
        bench.add(f"r{i}", timeout_s=80_000.0)
        bench.scheduler.finish(RequestId(f"r{i}"), RequestStatus.FINISHED_ABORTED)
    assert len(bench.scheduler._deadlines._heap) < 600


def test_two_deadlines_at_once_end_it_once() -> None:
    bench = Bench(pages=400, max_num_seqs=1, max_num_batched_tokens=64, options={"queue_timeout_s": 5.0})
    bench.add("long", max_tokens=50)
    bench.add("both", timeout_s=5.0)
    bench.run()
    assert bench.ends()["both"] is FinishReason.TIMEOUT
    assert bench.scheduler.counters.finished["timeout"] == 1


def test_a_queue_has_a_deadline_of_its_own() -> None:
    bench = Bench(pages=400, max_num_seqs=1, max_num_batched_tokens=64, options={"queue_timeout_s": 4.0})
    bench.add("long", max_tokens=50)
    bench.add("late")
    bench.run()
    assert bench.ends() == {"late": FinishReason.TIMEOUT, "long": FinishReason.LENGTH}
    assert bench.errors()["late"] == "waited longer than the server's queue timeout of 4 s"


def _learnt(bench: Bench) -> None:
    """A token costs a second; lengths are known, though none that helps."""
    bench.books.costs.step.seconds_each = [0.0, 1.0, 0.0, 0.0, 0.0]
    bench.books.costs.step.num_observed = MIN_MEASURED_STEPS
    bench.scheduler.predictor._num_answers = MIN_ANSWERS


def test_a_guess_refuses_nobody() -> None:
    bench = Bench(pages=400, options={"early_abort": True})
    bench.books.costs.step.seconds_each = [0.0, 1.0, 0.0, 0.0, 0.0]
    bench.add("first of all", max_tokens=40, timeout_s=10.0)
    bench.step()
    assert bench.tokens("first of all") == 1


def test_a_flood_of_another_adapter_is_not_ahead() -> None:
    options = {"policy": "fair", "early_abort": True}
    bench = Bench(pages=4000, max_num_seqs=2, max_num_batched_tokens=64, options=options)
    for i in range(200):
        bench.add(f"flood {i}", max_tokens=4, adapter_id="hot")
    bench.step()
    _learnt(bench)
    bench.add("alone", max_tokens=4, adapter_id="cool", timeout_s=30.0)
    bench.add("one of the flood", max_tokens=4, adapter_id="hot", timeout_s=30.0)
    outputs = {o.request_id: o for o in bench.scheduler.take_outputs()}
    assert "alone" not in outputs
    assert outputs["one of the flood"].refusal is Refusal.LATE


def test_what_would_be_late_is_refused_before_it_costs_anything() -> None:
    bench = Bench(pages=400, max_num_seqs=2, max_num_batched_tokens=64, options={"early_abort": True})
    _learnt(bench)
    bench.add("hopeless", prompt=3, max_tokens=40, timeout_s=10.0)
    bench.add("possible", prompt=3, max_tokens=4, timeout_s=10.0)
    bench.add("patient", prompt=3, max_tokens=40)
    bench.run()
    assert bench.ends()["hopeless"] is FinishReason.REFUSED
    late = next(o for o in bench.outputs if o.request_id == "hopeless")
    assert late.refusal is Refusal.LATE
    assert late.error == "predicted to take 43.0 s, its timeout_s is 10"
    assert bench.ends()["possible"] is FinishReason.LENGTH
    assert bench.ends()["patient"] is FinishReason.LENGTH
    assert "hopeless" not in bench.computed()


def test_the_queue_ahead_counts_and_so_does_what_passes_while_waiting() -> None:
    options = {"early_abort": True, "queue_timeout_s": 60.0}
    bench = Bench(pages=400, max_num_seqs=1, max_num_batched_tokens=64, options=options)
    _learnt(bench)
    bench.add("running", max_tokens=50)
    bench.step()
    bench.add("next", max_tokens=4)
    bench.add("behind", max_tokens=4)
    outputs = {o.request_id: o for o in bench.scheduler.take_outputs()}
    assert outputs["behind"].refusal is Refusal.LATE, "two answers of 50 s are ahead"
    assert "queue timeout is 60 s" in (outputs["behind"].error or "")
    assert "next" not in outputs


# What is refused at the edge.


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_running", 0), ("max_queued", -1), ("tokens_per_s", 0.0), ("resident_bytes", 0), ("weight", 0.0)],
)
def test_a_limit_is_above_nothing(field: str, value: float) -> None:
    with pytest.raises(InvalidLimits, match=f"{field} must be above 0") as caught:
        Limits(**{field: value})
    assert caught.value.param == field


def test_a_limit_is_a_number_that_others_can_read() -> None:
    with pytest.raises(InvalidLimits, match="max_running must be at most"):
        Limits(max_running=10**400)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1e9, 1e-9])
def test_a_weight_is_a_sane_number(weight: float) -> None:
    with pytest.raises(InvalidLimits, match="weight"):
        Limits(weight=weight)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "fairest"}, "--policy 'fairest' is unknown; choose from fair, fcfs, mlfq, sjf"),
        ({"target_itl_ms": 0.0}, "--target-itl-ms must be positive"),
        ({"max_wait_steps": 0}, "--max-wait-steps must be positive"),
        ({"queue_timeout_s": float("nan")}, "--queue-timeout-s must be positive"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 32},
            "--max-num-batched-tokens 32 is less than --max-num-seqs 64",
        ),
        ({"adapter_limits": Limits(max_running=65)}, "--max-running-per-adapter 65 is more than --max-num-seqs 64"),
        ({"key_limits": Limits(max_running=65)}, "--max-running-per-key 65 is more than --max-num-seqs 64"),
    ],
)
def test_options_that_are_wrong_or_contradict_each_other(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerOptions(**options)
    assert words in str(caught.value)
