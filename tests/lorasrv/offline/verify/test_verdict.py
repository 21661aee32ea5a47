"""The rule of docs/verify.md, figure by figure."""

from dataclasses import replace

import pytest
import torch

from lorasrv.offline.verify.compare import EffectComparison, LogitComparison, ModuleDeltas, linear_errors
from lorasrv.offline.verify.verdict import ComparisonOutcome, ComparisonStats, Effect, LinearErrors, LogitErrors, judge

BASE = LogitErrors(36, 0.3, 0.05, 0.06, 3.0, 0.02, 35, 0.01)
EFFECT = Effect(9.0, 2.0, 3.0, 20)
LINEARS = LinearErrors(8, 8, 0.002, "layers.0.mlp.up_proj", (), 0)
GOOD = ComparisonStats("bfloat16", BASE, BASE, EFFECT, LINEARS)
EXACT = replace(BASE, rms=1e-6, max_abs=1e-5, max_relative=1e-6)
ROUNDING_ONLY = replace(GOOD, adapter=EXACT, base=replace(EXACT, rms=0.0), effect=Effect(1e-5, 1e-5, 1e-5, 0))
"""Nothing but float32 rounding, though it is many times the base's, which happens to have none."""


@pytest.mark.parametrize(
    ("figures", "outcome"),
    [
        (GOOD, ComparisonOutcome.WITHIN),
        (replace(GOOD, adapter=replace(BASE, rms=0.12 + 0.15)), ComparisonOutcome.WITHIN),
        (replace(GOOD, adapter=replace(BASE, rms=0.12 + 0.15 + 1e-9)), ComparisonOutcome.DIFFERS),
        (replace(GOOD, linears=replace(LINEARS, max_error=0.01)), ComparisonOutcome.WITHIN),
        (replace(GOOD, linears=replace(LINEARS, max_error=0.011)), ComparisonOutcome.DIFFERS),
        (replace(GOOD, dtype="float32"), ComparisonOutcome.DIFFERS),
        (replace(GOOD, base=replace(BASE, rms=0.31), adapter=replace(BASE, rms=0.31)), ComparisonOutcome.DIFFERS),
        (replace(GOOD, adapter=EXACT, base=EXACT), ComparisonOutcome.WITHIN),
        (replace(GOOD, adapter=EXACT, base=EXACT, linears=replace(LINEARS, max_error=1e-6)), ComparisonOutcome.EXACT),
        (replace(GOOD, adapter=EXACT, linears=replace(LINEARS, max_error=1e-6)), ComparisonOutcome.WITHIN),
        (ROUNDING_ONLY, ComparisonOutcome.WITHIN),
    ],
)
def test_outcomes(figures: ComparisonStats, outcome: ComparisonOutcome) -> None:
    verdict = judge(figures)
    assert verdict.outcome is outcome
    assert bool(verdict.reasons) == (outcome is ComparisonOutcome.DIFFERS)


def test_every_reason_is_given() -> None:
    bad = replace(BASE, rms=9.0)
    verdict = judge(replace(GOOD, adapter=replace(BASE, rms=30.0), base=bad, linears=replace(LINEARS, max_error=1.0)))
    assert len(verdict.reasons) == 3


@pytest.mark.parametrize(
    ("effect", "note"),
    [
        (EFFECT, None),
        (Effect(0.0, 0.0, 0.0, 0), "no effect"),
        (Effect(0.1, 0.1, 0.1, 0), "no likeliest token"),
        (Effect(0.1, 0.1, 0.1, 1), "below the error"),
    ],
)
def test_notes(effect: Effect, note: str | None) -> None:
    notes = judge(replace(GOOD, effect=effect)).notes
    assert (len(notes) == 1 and note in notes[0]) if note else notes == ()


def test_errors_of_logits() -> None:
    oracle = torch.tensor([[0.0, 10.0, -20.0], [1.0, 2.0, 3.0]])
    comparison = LogitComparison()
    comparison.add(oracle + torch.tensor([[0.0, 0.0, 2.0], [0.0, 1.5, 0.0]]), oracle)
    errors = comparison.errors()
    assert (errors.positions, errors.greedy_equal, errors.largest_gap) == (2, 1, 1.0)
    assert (errors.max_abs, errors.max_relative) == (2.0, 0.5)
    assert errors.mean_abs == pytest.approx(3.5 / 6)
    assert errors.rms == pytest.approx(((4 + 2.25) / 6) ** 0.5)
    assert errors.spread == pytest.approx(float(oracle.var(dim=1, correction=0).mean().sqrt()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_figures_of_no_numbers(bad: float) -> None:
    comparison = LogitComparison()
    comparison.add(torch.tensor([[0.0, bad]]), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="not finite"):
        comparison.errors()


def test_effects_add_up() -> None:
    comparison = EffectComparison()
    comparison.add(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    comparison.add(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    assert comparison.effect() == Effect(1.0, 0.5, pytest.approx(0.5**0.5), 1)


def test_errors_of_linears() -> None:
    one = torch.ones(4, 3)
    cases = [
        (("right", one, one), 0.0),
        (("none", 0 * one, 0 * one), 0.0),
        (("left out", 0 * one, one), 1.0),
        (("too many", one, 0 * one), 1.0),
        (("twice", 2 * one, one), 0.5),
        (("nan", one * float("nan"), one), 2.0),
        (("rounded", one * 1.01, one, 0.01 * 12**0.5), 0.0),
    ]
    for case, error in cases:
        found = linear_errors([ModuleDeltas(*case)], 0.01)
        assert found.max_error == pytest.approx(error)
        assert found.adapted == bool(case[2].any())
        assert found.wrong == ((case[0],) if error else ())
    everything = linear_errors([ModuleDeltas(*case) for case, _ in cases], 0.01)
    assert (everything.compared, everything.adapted, everything.num_wrong) == (7, 5, 4)
    assert everything.worst == everything.wrong[0] == "nan"
