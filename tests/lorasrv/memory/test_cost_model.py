"""Rates of loads, copies and steps: guessed at first, then as they are measured."""

import random
from dataclasses import replace

import pytest

from lorasrv.memory.cost_model import GUESS, MIN_MEASURED_STEPS, PARTS, CostModel, StepCosts, StepShape
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, PlannedDrafts, ScheduledRequest, SchedulerOutput


def _shape(tokens: int) -> StepShape:
    return StepShape(tokens, 1, 0, 0)


def test_rates_begin_with_a_guess_and_follow_what_is_measured() -> None:
    costs = CostModel()
    guess = costs.recompute_s(100)
    costs.observe_step(_shape(100), 2.0)
    assert costs.recompute_s(100) == pytest.approx(2.0) != guess
    for _ in range(20):
        costs.observe_step(_shape(50), 0.5)
    assert costs.recompute_s(100) == pytest.approx(1.0)
    costs.observe_step(_shape(1), 9.0)
    assert costs.recompute_s(100) == pytest.approx(1.0), "a step of single tokens tells little"
    costs.observe_step(_shape(50), 500.0)
    assert costs.recompute_s(100) == pytest.approx(1.0), "one that met a page fault does not count"
    copy = costs.copy.seconds
    costs.copy.observe(1.0, 0)
    assert costs.copy.seconds == copy


def test_an_adapter_on_host_is_cheaper_to_have_back() -> None:
    costs = CostModel()
    assert 0 < costs.reload_s(1000, on_host=True) < costs.reload_s(1000, on_host=False)


def test_a_draft_token_costs_what_another_request_would() -> None:
    """A row to compute, and a row of logits."""
    plain = ScheduledRequest(RequestId("a"), (7,), 9, (0,), None, True, SamplingParams(), 1)
    drafted = replace(plain, token_ids=(7, 8, 9), drafts=PlannedDrafts((8, 9)))
    shapes = [StepShape.of(SchedulerOutput((scheduled,), {}, (), AdapterOrders(), 0)) for scheduled in (plain, drafted)]
    assert [(s.tokens, s.requests, s.pairs) for s in shapes] == [(1, 1, 10), (3, 3, 33)]
    assert drafted.without_drafts() == plain


# Costs of steps.

TRUE = [25e-3, 0.8e-3, 0.1e-3, 0.3e-9, 15e-9, 4e-3]


def _steps(rng: random.Random, count: int) -> list[StepShape]:
    shapes = []
    for _ in range(count):
        answers, prompt = rng.choice([1, rng.randint(1, 32)]), rng.choice([0, 0, 0, 100, 300])
        adapters = rng.randint(0, answers) * 10_000_000
        shapes.append(StepShape(answers + prompt, answers, adapters, 200 * answers + prompt * prompt // 2))
    return shapes


def _true_s(shape: StepShape) -> float:
    return sum(seconds * part for seconds, part in zip(TRUE, shape.parts, strict=True))


def test_steps_are_predicted_by_what_is_in_them() -> None:
    rng = random.Random(1)
    costs = StepCosts()
    for shape in _steps(rng, 600):
        costs.observe(shape, _true_s(shape) * rng.gauss(1.0, 0.05))
    for shape in _steps(rng, 100):
        assert costs.seconds(shape) == pytest.approx(_true_s(shape), rel=0.05)
    assert costs.adapter_s(10_000_000) == pytest.approx(3e-3, rel=0.1)
    assert costs.second_token_s == pytest.approx(4e-3, rel=0.2)


def test_one_long_pause_does_not_rule() -> None:
    rng = random.Random(2)
    costs = StepCosts()
    for i, shape in enumerate(_steps(rng, 600)):
        costs.observe(shape, 30.0 if i % 97 == 96 else _true_s(shape))
    for shape in _steps(rng, 100):
        assert costs.seconds(shape) == pytest.approx(_true_s(shape), rel=0.25)


def test_a_machine_that_gets_slower_is_followed() -> None:
    rng = random.Random(3)
    costs = StepCosts()
    for i, shape in enumerate(_steps(rng, 3000)):
        costs.observe(shape, (2.0 if i >= 1000 else 1.0) * _true_s(shape))
    for shape in _steps(rng, 50):
        assert costs.seconds(shape) == pytest.approx(2 * _true_s(shape), rel=0.1)


def test_before_anything_is_measured_it_is_a_guess_or_what_is_known() -> None:
    shape = StepShape(1, 1, 0, 0)
    assert StepCosts().seconds(shape) == pytest.approx(GUESS[0] + GUESS[1] + GUESS[2])
    known = StepCosts.from_dict(dict(zip(PARTS, TRUE, strict=True)))
    assert known.seconds(shape) == pytest.approx(sum(TRUE[:3]))
    assert known.as_dict() == dict(zip(PARTS, TRUE, strict=True))
    known.observe(StepShape(0, 0, 0, 0), 5.0)
    assert known.num_observed == MIN_MEASURED_STEPS, "a step without tokens says nothing"


def test_no_coefficient_is_ever_negative() -> None:
    rng = random.Random(4)
    costs = StepCosts()
    for shape in _steps(rng, 400):
        costs.observe(shape, rng.uniform(0.001, 0.5))
    assert min(costs.seconds_each) >= 0.0
