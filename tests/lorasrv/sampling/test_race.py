"""The race: each token wins as often as its probability says, and near distributions mostly have the same winner."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from lorasrv.sampling import race as module
from lorasrv.sampling.race import Floats, race, race_keys, race_together

pytestmark = pytest.mark.aside

DRAWS = 20_000
KEYS = race_keys([(7, count) for count in range(DRAWS)])
MIX = np.random.default_rng(3)
PROBS = {
    "few": np.array([0.05, 0.4, 0.1, 0.25, 0.2]),
    "drawn": MIX.dirichlet(np.ones(24)),
    "all unlikely": MIX.dirichlet(np.ones(3000) * 4),
    "half of them unlikely": np.concatenate([[0.2, 0.0, 0.3], MIX.dirichlet(np.ones(2000)) / 2]),
    "not their sum": np.array([0.01, 0.0, 0.003, 0.02, 0.0005]),
}


def winners(probs: Floats, count: int = DRAWS) -> list[int]:
    keys = torch.from_numpy(KEYS[:count]).split(2000)
    return [at for some in keys for at in race_together(torch.from_numpy(probs).expand(len(some), -1), some).tolist()]


def deviation(tokens: list[int], probs: Floats) -> float:
    """Chi-square of the counts as standard deviations of a normal number (Wilson and Hilferty 1931).

    Neighbours are put together until 20 draws of them are expected.
    """
    wanted, cells, seen = DRAWS * probs / probs.sum(), [], np.bincount(tokens, minlength=len(probs))
    want = got = 0.0
    for expected, count in zip(wanted, seen, strict=True):
        assert expected or not count, "an impossible token"
        want, got = want + expected, got + count
        if want >= 20:
            cells.append((got - want) ** 2 / want)
            want = got = 0.0
    freedom = len(cells) - 1
    return ((sum(cells) / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("name", PROBS)
def test_each_token_wins_as_often_as_its_probability_says(name: str) -> None:
    assert abs(deviation(winners(PROBS[name]), PROBS[name])) < 4


def test_two_tokens_in_a_row_are_independent() -> None:
    probs = PROBS["few"]
    pairs = [5 * one + other for one, other in itertools.pairwise(winners(probs))]
    joint = np.outer(probs, probs).ravel()
    assert abs(deviation(pairs, joint)) < 4


@pytest.mark.parametrize("name", ["few", "half of them unlikely", "not their sum"])
def test_other_times_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are evenly distributed, not exponentially."""
    times: Any = module._times
    monkeypatch.setattr(module, "_times", lambda keys, tokens: 1 - (-times(keys, tokens)).exp())
    assert abs(deviation(winners(PROBS[name]), PROBS[name])) > 4


@pytest.mark.parametrize("name", PROBS)
def test_a_row_alone_is_the_row_among_others(name: str) -> None:
    probs = PROBS[name]
    assert [race(probs, KEYS[at : at + 1]) for at in range(1000)] == winners(probs, 1000)


def test_the_order_does_not_matter() -> None:
    probs, order = PROBS["drawn"], MIX.permutation(24)
    for at in range(400):
        key = KEYS[at : at + 1]
        assert order[race(probs[order], key, order)] == race(probs, key)


@pytest.mark.parametrize("nearness", [0.5, 5.0, 50.0])
def test_near_distributions_have_the_same_winner(nearness: float) -> None:
    """At least (1 - d) / (1 + d) of the time at a distance d, and more often than by one number for both."""
    one = MIX.dirichlet(np.ones(32))
    other = MIX.dirichlet(one * 32 * nearness + 1e-3)
    far = np.abs(one - other).sum() / 2
    agree = np.mean([a == b for a, b in zip(winners(one), winners(other), strict=True)])
    assert agree > (1 - far) / (1 + far) - 3 * math.sqrt(0.25 / DRAWS)
    shared = MIX.random(DRAWS)
    assert agree > np.mean(np.searchsorted(one.cumsum(), shared) == np.searchsorted(other.cumsum(), shared))
