"""Choose how many draft tokens each answer gets in a step: as many as raise the tokens per second.

A draft token that is right with chance s and takes c seconds raises the tokens per second E / T of a step if and only
if s / c > E / T. Tokens with the highest s / c are taken first, until one does not pay off: this maximizes E / T. One
stream on a memory-bound machine gets long drafts, a full batch only tokens that are nearly certain. Drafts with a small
gain are left out, because both sides are estimates and handling a draft takes time too.
"""

from collections.abc import Sequence
from typing import NamedTuple

MARGIN = 1.3
"""Smallest ratio of gain to cost for a draft token to be chosen."""


class RowDraft(NamedTuple):
    """Hold the draft of one answer."""

    # For each token, the chance that it and those before it are right; the chances never increase.
    survival: Sequence[float]
    # Seconds, above 0, that each token adds to the step.
    token_s: float


class PlainStep(NamedTuple):
    """Describe a step without drafts."""

    # Tokens that it yields.
    num_tokens: int
    seconds: float
    # Seconds that the first draft token adds, besides its own.
    first_draft_s: float = 0.0


def min_survival(step: PlainStep, token_s: float) -> float:
    """Return a lower bound of the chance that a draft token must exceed to be chosen, whatever the other drafts."""
    return MARGIN * token_s * step.num_tokens / (step.seconds + step.first_draft_s)


def choose_lengths(rows: Sequence[RowDraft], step: PlainStep, most: int) -> list[int]:
    """Return the number of draft tokens of each row, at most `most` in total."""
    slots = [(survival, MARGIN * row.token_s, number) for number, row in enumerate(rows) for survival in row.survival]
    slots.sort(key=lambda slot: -slot[0] / slot[1])
    lengths, tokens = [0] * len(rows), float(step.num_tokens)
    seconds = step.seconds + MARGIN * step.first_draft_s
    for survival, token_s, number in slots[:most]:
        if survival * seconds <= token_s * tokens:
            break
        lengths[number] += 1
        tokens += survival
        seconds += token_s
    return lengths if tokens * step.seconds > step.num_tokens * seconds else [0] * len(rows)
