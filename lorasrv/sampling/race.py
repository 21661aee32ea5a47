"""Exponential race: draw a token so that two models that nearly agree nearly always draw the same one.

Each token gets a random time, exponentially distributed with its probability as rate; the token with the shortest time
wins, with exactly its probability. The times depend on the request's seed, the number of tokens and the token itself,
so a draft model and the model that verifies it run the same race (Daliri et al. 2024, arXiv:2408.07978), and the order
of the tokens does not matter. The unlikely tokens enter as one, and the winner among them is drawn by cumulative sums.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UNLIKELY = 2.0**-10
"""Probability below which tokens enter the race as one."""
TOGETHER, INSIDE = -1, -2
"""Token numbers that stand for the unlikely tokens in the race, and for the draw among them."""
_ROUNDING = 1e-5
Floats = npt.NDArray[np.floating]
Int64 = npt.NDArray[np.int64]
A = TypeVar("A", Int64, Tensor)


def race_keys(draws: Sequence[tuple[int, int]]) -> Int64:
    """Return int64 [B], one key for each seed and number of tokens."""
    seeds, counts = np.array([(seed % 2**64, count) for seed, count in draws], np.uint64).astype(np.int64).T
    return _mixed(_mixed(seeds) + counts)


def race(probs: Floats, key: Int64, tokens: Int64 | None = None) -> int:
    """Return the place of the winner in one row.

    Args:
        probs: [N], need not add up to 1.
        key: [1].
        tokens: [N], if these are others than the places.
    """
    likely = np.flatnonzero(probs >= UNLIKELY)
    times = _times(key, likely if tokens is None else tokens[likely]) / probs[likely]
    first = times.min(initial=np.inf)
    # The probability that the likely tokens leave, plus a margin for rounding.
    left = probs.sum() - probs[likely].sum() + _ROUNDING
    if (together := _times(key, np.array([TOGETHER]))[0]) < first * left:
        sums = np.where(probs < UNLIKELY, probs, 0.0).cumsum(dtype=np.float64)
        if together < first * sums[-1]:
            at = np.searchsorted(sums, _uniforms(key, np.array([INSIDE]))[0] * sums[-1], side="right")
            # If the draw was rounded up to the total: the last token with a probability above 0.
            return min(int(at), int(np.searchsorted(sums, sums[-1])))
    return int(likely[times.argmin()])


def race_together(probs: Tensor, keys: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return int64 [B], the places that `race` returns for each row, without waiting for the device.

    Args:
        probs: [B, N].
        keys: int64 [B].
        tokens: [B, N], if these are others than the places.
    """
    keys, probs = keys[:, None], probs.double()
    numbers = torch.arange(probs.shape[1], device=probs.device)[None] if tokens is None else tokens
    likely = probs >= UNLIKELY
    times, winners = torch.where(likely, _times(keys, numbers) / probs, torch.inf).min(dim=-1)
    sums = torch.where(likely, 0.0, probs).cumsum(dim=-1)
    mass = sums[:, -1:].contiguous()
    drawn = torch.searchsorted(sums, _uniforms(keys, torch.full_like(keys, INSIDE)) * mass, right=True)
    inside = torch.minimum(drawn, torch.searchsorted(sums, mass))[:, 0]
    return torch.where((_times(keys, torch.full_like(keys, TOGETHER)) / mass)[:, 0] < times, inside, winners)


def _times(keys: A, tokens: A) -> Any:
    """Return a time for each token, float64, exponentially distributed."""
    uniforms = _uniforms(keys, tokens)
    return -uniforms.log() if isinstance(uniforms, Tensor) else -np.log(uniforms)


def _uniforms(keys: A, tokens: A) -> Any:
    """Return a number in the open interval (0, 1) for each token: float64, by SplitMix64 (Steele et al. 2014)."""
    bits = _shifted(_mixed(keys + (tokens + 3) * _GOLDEN), 12)
    return ((bits.double() if isinstance(bits, Tensor) else bits) + 0.5) * 2.0**-52


def _mixed(x: A) -> A:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: A, bits: int) -> A:
    """Shift right, filling with zeros: the numbers are signed only because torch has no unsigned arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of SplitMix64 as signed numbers."""
