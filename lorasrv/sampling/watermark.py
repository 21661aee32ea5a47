"""Mark text with a statistical watermark and detect it: each token makes part of the vocabulary green for the next
one.

Kirchenbauer et al. 2023, "A Watermark for Large Language Models" (arXiv:2301.10226), with one token of context and the
defaults of text-generation-inference: `delta` is added to green logits, and text with far more green tokens than by
chance is recognised as marked. The paper takes the green tokens from a seeded permutation of the vocabulary; here a
keyed hash decides for each token separately, with probability `gamma`. So a detector needs neither torch nor the size
of the vocabulary, and CPU and GPU agree. The hash must never change: text marked today may be examined years later.
Torch-free.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lorasrv.sampling_params import Watermark

_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1


class WatermarkVerdict(StrEnum):
    """Name the result of a detection."""

    WATERMARKED = "watermarked"
    NOT_WATERMARKED = "not_watermarked"
    TOO_SHORT = "too_short"


@dataclass(frozen=True, slots=True)
class Detection:
    """Report the watermark's evidence in a text."""

    verdict: WatermarkVerdict
    # Number of different pairs of neighbouring tokens that are green.
    green: int
    # Number of different pairs of neighbouring tokens.
    scored: int
    z_score: float
    # Probability of so many green pairs in unmarked text.
    p_value: float


def green(watermark: Watermark, previous: int, tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Return [T] bool: which of the [T] tokens are green after the token `previous`."""
    seed = np.uint32(_splitmix64(watermark.key ^ _splitmix64(previous)) & _MASK32)
    return _mix32(_mix32(tokens) ^ seed) < np.uint32(int(watermark.gamma * 2**32))


def detect(token_ids: Sequence[int], watermark: Watermark, threshold: float = 4.0) -> Detection:
    """Test whether a text carries this watermark: z = (green - gamma T) / sqrt(T gamma (1 - gamma)) above the
    threshold.

    T is the number of different pairs of neighbours, because a repeated phrase is no new evidence. p is the normal tail
    at z.
    """
    followers: dict[int, set[int]] = {}
    for previous, token in pairwise(token_ids):
        followers.setdefault(previous, set()).add(token)
    num_green = sum(int(green(watermark, p, np.array([*t], dtype=np.uint32)).sum()) for p, t in followers.items())
    scored, gamma = sum(len(tokens) for tokens in followers.values()), watermark.gamma
    z = (num_green - gamma * scored) / math.sqrt(scored * gamma * (1 - gamma)) if scored else 0.0
    verdict = WatermarkVerdict.WATERMARKED if z > threshold else WatermarkVerdict.NOT_WATERMARKED
    if math.sqrt(scored * (1 - gamma) / gamma) <= threshold:  # z if every pair were green
        verdict = WatermarkVerdict.TOO_SHORT
    return Detection(verdict, num_green, scored, z, math.erfc(z / math.sqrt(2)) / 2)


def _splitmix64(x: int) -> int:
    """Mix 64 bits with Steele, Lea and Flood's function (OOPSLA 2014), a bijection."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Mix 32 bits in the same way, with constants found by Wellons' hash-prospector."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
