"""A watermark that text alone shows: each token makes some of the vocabulary green for the token after it. No torch.

Kirchenbauer et al. 2023, "A Watermark for Large Language Models" (arXiv:2301.10226), with one token of context, and the
defaults of text-generation-inference: green logits get `delta` more, and text with far more green tokens than chance
gives was made so. There a seeded permutation of the vocabulary says which are green; here a keyed hash says it of each
token by itself, with probability `gamma`. So a detector needs neither torch nor the size of the vocabulary, and CPU and
GPU agree. The hash may never change: text that is marked today is looked at years later.
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
    """What the green tokens of a text say."""

    WATERMARKED = "watermarked"
    NOT_WATERMARKED = "not_watermarked"
    TOO_SHORT = "too_short"


@dataclass(frozen=True, slots=True)
class Detection:
    """`green` of `scored` pairs of tokens are green. `p_value`: how likely so many are in text without the mark."""

    verdict: WatermarkVerdict
    green: int
    scored: int
    z_score: float
    p_value: float


def green(watermark: Watermark, previous: int, tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """[T]: which of the tokens [T] are green after the token `previous`."""
    seed = np.uint32(_splitmix64(watermark.key ^ _splitmix64(previous)) & _MASK32)
    return _mix32(_mix32(tokens) ^ seed) < np.uint32(int(watermark.gamma * 2**32))


def detect(token_ids: Sequence[int], watermark: Watermark, threshold: float = 4.0) -> Detection:
    """Whether a text carries this watermark: z = (green - gamma T) / sqrt(T gamma (1 - gamma)) above the threshold.

    T counts different pairs of neighbours: a phrase that a text repeats is no new evidence. p is the normal tail at z.
    """
    followers: dict[int, set[int]] = {}
    for previous, token in pairwise(token_ids):
        followers.setdefault(previous, set()).add(token)
    num_green = sum(int(green(watermark, p, np.array([*t], dtype=np.uint32)).sum()) for p, t in followers.items())
    scored, gamma = sum(len(tokens) for tokens in followers.values()), watermark.gamma
    z = (num_green - gamma * scored) / math.sqrt(scored * gamma * (1 - gamma)) if scored else 0.0
    verdict = WatermarkVerdict.WATERMARKED if z > threshold else WatermarkVerdict.NOT_WATERMARKED
    if math.sqrt(scored * (1 - gamma) / gamma) <= threshold:  # not even if all were green
        verdict = WatermarkVerdict.TOO_SHORT
    return Detection(verdict, num_green, scored, z, math.erfc(z / math.sqrt(2)) / 2)


def _splitmix64(x: int) -> int:
    """Steele, Lea and Flood's mixing function (OOPSLA 2014): a bijection of 64-bit numbers."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The same for 32 bits, with the constants that Wellons' hash-prospector found."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
