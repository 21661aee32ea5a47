"""Deadlines of requests and of the queue, on the bare scheduler, and what is refused because it would be late."""

import weakref

from bare_scheduler import KEYS, Bench
from tiny_scheduler import scheduler

from lorasrv.memory.cost_model import MIN_MEASURED_STEPS
from lorasrv.outputs import FinishReason, Refusal, RequestId
from lorasrv.request import RequestStatus
from lorasrv.scheduler.length_predictor import MIN_ANSWERS


class Hold:
    """What keeps an adapter in the store."""


def test_a_request_ends_when_its_time_is_over_wherever_it_is() -> None:
    bench = scheduler(slots=1, pages=400)
    bench.add("running", max_tokens=100, timeout_s=5.0)
    bench.add("waiting", timeout_s=3.0)
    bench.add("loading", key=KEYS[0], timeout_s=4.0)
    assert bench.step().orders.loads == (KEYS[0],)
    assert bench.step().wake_s == 3.0
    for _ in range(7):
        bench.step()
    assert bench.ends() == dict.fromkeys(("waiting", "loading", "running"), FinishReason.TIMEOUT)
    assert bench.tokens("running") == 4, "what was generated until then"
    assert bench.errors()["running"] == "not done within its timeout_s of 5"
    assert {o.refusal for o in bench.outputs if o.finish_reason} == {Refusal.TIMEOUT}
    assert bench.pool.num_free == 400


def test_who_ends_early_is_not_remembered_until_its_time() -> None:
    bench = scheduler(budget=16, pages=400)
    for i in range(2000):
        bench.add(f"r{i}", timeout_s=80_000.0)
        bench.scheduler.finish(RequestId(f"r{i}"), RequestStatus.FINISHED_ABORTED)
    assert len(bench.scheduler._deadlines._heap) < 600


def test_two_deadlines_at_once_end_it_once() -> None:
    bench = scheduler(slots=1, pages=400, queue_timeout_s=5.0)
    bench.add("long", max_tokens=50)
    bench.add("both", timeout_s=5.0)
    bench.run()
    assert bench.ends()["both"] is FinishReason.TIMEOUT
    assert bench.scheduler.counters.finished["timeout"] == 1


def test_a_queue_has_a_deadline_of_its_own() -> None:
    bench = scheduler(slots=1, pages=400, queue_timeout_s=4.0)
    bench.add("long", max_tokens=50)
    bench.add("late")
    bench.run()
    assert bench.ends() == {"late": FinishReason.TIMEOUT, "long": FinishReason.LENGTH}
    assert bench.errors()["late"] == "waited longer than the server's queue timeout of 4 s"


def _learnt(bench: Bench) -> None:
    """A token costs a second; lengths are known, though none that helps."""
    bench.accounts.costs.step.seconds_each = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    bench.accounts.costs.step.num_observed = MIN_MEASURED_STEPS
    bench.scheduler.predictor._num_answers = MIN_ANSWERS


def test_a_guess_refuses_nobody() -> None:
    bench = scheduler(budget=16, pages=400, early_abort=True)
    bench.accounts.costs.step.seconds_each = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    bench.add("first of all", max_tokens=40, timeout_s=10.0)
    bench.step()
    assert bench.tokens("first of all") == 1


def test_a_flood_of_another_adapter_is_not_ahead() -> None:
    bench = scheduler("fair", slots=2, pages=4000, early_abort=True)
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
    bench = scheduler(slots=2, pages=400, early_abort=True)
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
    bench = scheduler(slots=1, pages=400, early_abort=True, queue_timeout_s=60.0)
    _learnt(bench)
    bench.add("running", max_tokens=50)
    bench.step()
    bench.add("next", max_tokens=4)
    bench.add("behind", max_tokens=4)
    outputs = {o.request_id: o for o in bench.scheduler.take_outputs()}
    assert outputs["behind"].refusal is Refusal.LATE, "two answers of 50 s are ahead"
    assert "queue timeout is 60 s" in (outputs["behind"].error or "")
    assert "next" not in outputs


def test_a_finished_request_does_not_keep_its_adapter_until_its_deadline() -> None:
    bench = scheduler(queue_timeout_s=3600.0, early_abort=True)
    held = Hold()
    bench.add("mia", max_tokens=1, timeout_s=3600.0, hold=held)
    is_held = weakref.ref(held)
    del held
    assert is_held() is not None
    bench.run()
    assert is_held() is None
