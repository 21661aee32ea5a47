"""Weight replicas by the speed of their steps, so that a slow one gets less work. None is removed for being slow."""

from collections.abc import Mapping
from statistics import median

from lorasrv.placement.work import WorkRates

LEAST_WEIGHT = 0.5
STEPS = 4
"""Weights are multiples of a quarter: if they changed with every measurement, keys would move each time."""


def speed_weights(rates: Mapping[str, WorkRates]) -> dict[str, float]:
    """Return the weight of each replica, 1 for a typical one, from its time per answer token."""
    usual_s = median([rate.answer_token_s for rate in rates.values()] or [0.0])
    return {
        name: _weight(usual_s / rate.answer_token_s if rate.answer_token_s else 1.0) for name, rate in rates.items()
    }


def _weight(speed: float) -> float:
    return max(LEAST_WEIGHT, min(1.0, round(speed * STEPS) / STEPS))
