"""Rejection sampling: draw from the model's distribution, starting from draft tokens that were drawn from others.

A draft token x that was drawn from q is taken with probability min(1, p(x) / q(x)); otherwise p is replaced by what q
did not cover, max(0, p - q), and the next draft token is tried, at last a draw from what is left. Whatever q, the
result is distributed as p (Leviathan et al. 2023, arXiv:2211.17192; several tokens: Miao et al. 2023,
arXiv:2305.09781).

That holds only if nothing that depends on a draft token decides whether it is tried.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Probabilities = npt.NDArray[np.float64]
_STREAM = 0x5EED
"""Keeps these draws apart from those of the race, by which a draft model draws its tokens."""


class DrawnToken(NamedTuple):
    """Hold a draft token and what it was drawn from."""

    token: int
    # [V]; None: from nothing, it was chosen. Tokens of one row that were drawn one after the other without putting back
    # have the distribution of the first.
    probs: Probabilities | None


def accept_or_draw(probs: Probabilities, drawn: Sequence[DrawnToken], seed: int, position: int) -> int:
    """Return a token that is distributed as `probs`: one of the draft tokens, or another.

    Args:
        probs: [V], the model's probabilities.
        drawn: different draft tokens of this place, in the order in which they were drawn.
        seed: of the request.
        position: number of the answer's tokens so far.
    """
    rng = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, position * 2**16 + _STREAM], np.uint64)))
    left = probs / probs.sum()
    gone: list[int] = []
    for token, drawn_from in drawn:
        if drawn_from is None:
            share, covered = 1.0, left[token] * (np.arange(len(left)) == token)
        else:
            covered = _without(drawn_from, gone)
            share = covered[token]
        if rng.random() * share < left[token]:
            return token
        left = np.maximum(left - covered, 0.0)
        if not left.any():
            # The same distribution but for rounding: the token was as good as taken.
            return token
        left /= left.sum()
        gone.append(token)
    sums = left.cumsum()
    return min(int(np.searchsorted(sums, rng.random() * sums[-1], side="right")), int(np.searchsorted(sums, sums[-1])))


def _without(probs: Probabilities, gone: Sequence[int]) -> Probabilities:
    """Return the distribution that a token was drawn from, after others of the same one."""
    left = probs.copy()
    left[list(gone)] = 0.0
    left /= left.sum()
    return left
