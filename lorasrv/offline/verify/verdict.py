"""Judge the figures of a verification (docs/verify.md). Torch-free.

Logits alone show little where activations are rounded to int8. Therefore the adapter's error is judged relative to the
base's on the same tokens, and each adapted linear is compared alone, where only the adapter is computed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

EXACT = 1e-4
"""Share of the largest logit, or of a linear's delta. Float32 sums in another order differ by less, with a margin."""
BASE_ERRORS = 2.0
EFFECT_SHARE = 0.05
BASE_LIMIT = 0.1
"""Largest error of the base itself, as a share of the logits' spread; rounded activations cause 0.02."""
LINEAR_LIMITS: Mapping[str, float] = {"float32": EXACT, "bfloat16": 0.01}
"""Largest error of one linear's delta, by the dtype of adapters; rounding A and B to bf16 causes 0.002."""
ROW_ROUNDING: Mapping[str, float] = {"float32": EXACT, "bfloat16": 2**-8}
"""Largest error from rounding own rows to the adapter dtype, as a share of the output of the head or embedding."""


class ComparisonOutcome(StrEnum):
    """Name the result of comparing an adapter with PEFT."""

    EXACT = "exact"
    WITHIN = "within"
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True)
class LogitErrors:
    """Hold served logits minus the reference's, over all compared positions."""

    positions: int
    max_abs: float
    mean_abs: float
    rms: float
    # Standard deviation of the reference's logits within a position, over all positions.
    spread: float
    # Largest error of a position as a share of its largest logit.
    max_relative: float
    # Positions with the same likeliest token.
    greedy_equal: int
    # Where they differ, the most by which the reference prefers its own token, in logits.
    largest_gap: float


@dataclass(frozen=True, slots=True)
class Effect:
    """Hold the reference's logits with the adapter minus those without."""

    max_abs: float
    mean_abs: float
    rms: float
    # Positions whose likeliest token changes.
    tokens_changed: int


@dataclass(frozen=True, slots=True)
class LinearErrors:
    """Hold the errors of single linears for random inputs: |served - PEFT's| / the larger of both norms, 0 to 2."""

    # Linears of the layers, and the head and the embedding if the adapter changes them.
    compared: int
    # Those of them that PEFT adapts.
    adapted: int
    max_error: float
    # The linear with `max_error`.
    worst: str
    # Up to eight linears above the limit.
    wrong: tuple[str, ...]
    num_wrong: int


@dataclass(frozen=True, slots=True)
class ComparisonStats:
    """Hold the measurements."""

    # Dtype of adapters.
    dtype: str
    adapter: LogitErrors
    base: LogitErrors
    effect: Effect
    linears: LinearErrors

    @property
    def allowed_rms(self) -> float:
        """Return the bound of the adapter's error; see `judge`."""
        return BASE_ERRORS * self.base.rms + EFFECT_SHARE * self.effect.rms

    @property
    def has_effect(self) -> bool:
        """Return whether the adapter changes any logit beyond float32 rounding."""
        return self.effect.max_abs > 0

    @property
    def shows_in_logits(self) -> bool:
        """Return whether a missing or doubled adapter would show in the logits: its effect exceeds the allowed
        error.
        """
        return self.effect.rms > self.allowed_rms


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold the outcome with its reasons and notes."""

    outcome: ComparisonOutcome
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    figures: ComparisonStats

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON data."""
        figures = self.figures
        return {
            "verdict": str(self.outcome),
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "adapter_error": asdict(figures.adapter),
            "base_error": asdict(figures.base),
            "error_over_base": {
                "difference": figures.adapter.rms - figures.base.rms,
                "ratio": figures.adapter.rms / figures.base.rms if figures.base.rms else None,
                "allowed_rms": figures.allowed_rms,
            },
            "effect": {**asdict(figures.effect), "shows_in_logits": figures.shows_in_logits},
            "linears": {**asdict(figures.linears), "limit": LINEAR_LIMITS[figures.dtype]},
        }


def judge(figures: ComparisonStats) -> Verdict:
    """Decide the verdict.

    differs: the delta of a linear is off by more than `LINEAR_LIMITS`, or the rms of the adapter's logit errors by more
        than `BASE_ERRORS` times the base's plus `EFFECT_SHARE` of the adapter's effect, and by more than `EXACT`; or
        the rms of the base's errors exceeds `BASE_LIMIT` of the logits' spread, which makes it useless as a measure.
    exact: no logit, with the adapter or without, is off by more than `EXACT` of the largest of its position, and no
        linear by more than `EXACT`.
    within: everything else.
    """
    linears, limit = figures.linears, LINEAR_LIMITS[figures.dtype]
    reasons = []
    if linears.max_error > limit:
        reasons.append(
            f"{linears.num_wrong} of {linears.compared} linears are off by more than {limit:g}; the worst, "
            f"{linears.worst}, by {linears.max_error:.3g}"
        )
    if figures.base.rms > BASE_LIMIT * figures.base.spread:
        reasons.append(
            f"the base itself, without the adapter, is off by {figures.base.rms:.3g} (rms), more than {BASE_LIMIT:g} "
            f"of the spread of its logits ({figures.base.spread:.3g})"
        )
    rounds_only = max(figures.adapter.max_relative, figures.base.max_relative) <= EXACT
    if figures.adapter.rms > figures.allowed_rms and not rounds_only:
        reasons.append(
            f"logits with the adapter are off by {figures.adapter.rms:.3g} (rms), more than the "
            f"{figures.allowed_rms:.3g} that the base's own error ({figures.base.rms:.3g}) allows"
        )
    if reasons:
        outcome = ComparisonOutcome.DIFFERS
    else:
        outcome = ComparisonOutcome.EXACT if rounds_only and linears.max_error <= EXACT else ComparisonOutcome.WITHIN
    return Verdict(outcome, tuple(reasons), tuple(_notes(figures)), figures)


def _notes(figures: ComparisonStats) -> list[str]:
    if not figures.has_effect:
        return ["the adapter has no effect: with it and without it the logits are the same"]
    if not figures.effect.tokens_changed:
        return ["no likeliest token of these prompts changes with the adapter; its effect may be too small to be seen"]
    if not figures.shows_in_logits:
        return [
            "the adapter's effect on these prompts is below the error that rounding alone may make: "
            + (
                "the comparison of single linears is what counts"
                if figures.linears.adapted
                else "as it adapts no linear of a layer, this says little; verify it with a base of --dtype float32"
            )
        ]
    return []
