"""Rejection sampling: draw from the model's distribution, given draft tokens from other distributions.

A draft token x that was drawn from q is accepted with probability min(1, p(x) / q(x)). Otherwise p is replaced by what
q did not cover, max(0, p - q), and the next draft token is tried; at last a token is drawn from the remaining p.
Whatever q is, the result is distributed as p (Leviathan et al. 2023, arXiv:2211.17192; several tokens: Miao et al.
2023, arXiv:2305.09781).

That holds only if the decision to try a draft token does not depend on that token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Probabilities = npt.NDArray[np.float64]
_STREAM = 0x5EED
"""Keeps these draws independent of those of the race, with which a draft model draws its tokens."""


class DrawnToken(NamedTuple):
    """Hold a draft token and the distribution that it was drawn from."""

    token: int
    # [V]; None: it was chosen without a draw. Tokens of one row that were drawn one after another without replacement
    # have the distribution of the first.
    probs: Probabilities | None


def accept_or_draw(probs: Probabilities, drawn: Sequence[DrawnToken], seed: int, position: int) -> int:
    """Return a token that is distributed as `probs`: one of the draft tokens, or another.

    Args:
        probs: [V], the model's probabilities.
        drawn: different draft tokens of this place, in the order in which they were drawn.
        seed: seed of the request.
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
            # p and q are equal except for rounding: accept the token.
            return token
        left /= left.sum()
        gone.append(token)
    sums = left.cumsum()
    return min(int(np.searchsorted(sums, rng.random() * sums[-1], side="right")), int(np.searchsorted(sums, sums[-1])))


def _without(probs: Probabilities, gone: Sequence[int]) -> Probabilities:
    """Return the distribution of a token that was drawn after the tokens `gone`, without replacement."""
    left = probs.copy()
    left[list(gone)] = 0.0
    left /= left.sum()
    return left
