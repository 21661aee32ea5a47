"""Figures of a verification, and the rule that makes a verdict of them (docs/verify.md). No torch.

Logits alone cannot say much where activations are rounded to int8: so the adapter's error is judged beside the base's
on the same tokens, and every adapted linear is compared by itself, where nothing but the adapter is computed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

EXACT = 1e-4
"""Of the largest logit, and of a linear's delta: what float32 sums of another order come to, with room."""
BASE_ERRORS = 2.0
EFFECT_SHARE = 0.05
BASE_LIMIT = 0.1
"""How much of the logits' spread the base's own error may be: rounded activations make 0.02."""
LINEAR_LIMITS: Mapping[str, float] = {"float32": EXACT, "bfloat16": 0.01}
"""How far the delta of one linear may be off, by the dtype of adapters: rounding A and B to bf16 makes 0.002."""


class ComparisonOutcome(StrEnum):
    """How an adapter does beside PEFT."""

    EXACT = "exact"
    WITHIN = "within"
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True)
class LogitErrors:
    """Served logits less the oracle's, over all compared positions.

    `spread`: standard deviation of the oracle's logits of a position, over all positions. `max_relative`: the largest
    error of a position as a share of its largest logit. `greedy_equal` of `positions` have the same likeliest token;
    where they differ, the oracle prefers its own by at most `largest_gap`, in logits.
    """

    positions: int
    max_abs: float
    mean_abs: float
    rms: float
    spread: float
    max_relative: float
    greedy_equal: int
    largest_gap: float


@dataclass(frozen=True, slots=True)
class Effect:
    """How far the oracle's logits with the adapter are from those without; `tokens_changed`: positions whose likeliest
    token is another."""

    max_abs: float
    mean_abs: float
    rms: float
    tokens_changed: int


@dataclass(frozen=True, slots=True)
class LinearErrors:
    """Deltas of single linears for random inputs: |served - PEFT's| / the larger of both norms, 0 to 2.

    `compared` counts the linears of the base, `adapted` those that PEFT adapts; `worst` is the one of `max_error`, and
    `wrong` up to eight that are above the limit.
    """

    compared: int
    adapted: int
    max_error: float
    worst: str
    wrong: tuple[str, ...]
    num_wrong: int


@dataclass(frozen=True, slots=True)
class ComparisonStats:
    """Everything that was measured; `dtype` is that of adapters."""

    dtype: str
    adapter: LogitErrors
    base: LogitErrors
    effect: Effect
    linears: LinearErrors

    @property
    def allowed_rms(self) -> float:
        """What the adapter's error may be: see `judge`."""
        return BASE_ERRORS * self.base.rms + EFFECT_SHARE * self.effect.rms

    @property
    def has_effect(self) -> bool:
        """Whether the adapter changes any logit beyond float32 rounding."""
        return self.linears.adapted > 0 and self.effect.max_abs > 0

    @property
    def shows_in_logits(self) -> bool:
        """Whether an adapter that were left out, or twice as strong, would show in the logits by itself: its effect is
        more than the error that is allowed."""
        return self.effect.rms > self.allowed_rms


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome, why, and what else should be known."""

    outcome: ComparisonOutcome
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    figures: ComparisonStats

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
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
    """The verdict.

    differs: the delta of a linear is off by more than `LINEAR_LIMITS`, or the rms of the adapter's logit errors by more
        than `BASE_ERRORS` times the base's plus `EFFECT_SHARE` of the adapter's effect, and by more than `EXACT`; or
        those of the base by more than `BASE_LIMIT` of their spread, so that they are no measure.
    exact: no logit, with the adapter or without, is off by more than `EXACT` of the largest of its position, and no
        linear by more than `EXACT`.
    within: all others.
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
            "the comparison of single linears is what counts"
        ]
    return []
