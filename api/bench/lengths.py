"""How many tokens prompts and answers have."""

import itertools
import math
import random
from dataclasses import dataclass

from api.bench.options import InvalidOption

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Lengths:
    """`fixed`: always `a`; `uniform`: any of `a` to `b`; `lognormal`: mean `a`, `b` the spread of the logarithm.

    No length is below 1 or above `most`. A lognormal's mean is that of the whole law: what `most` cuts lowers it.
    """

    kind: str
    a: float
    b: float = 0.0
    most: int = MAX_TOKENS

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        drawn = rng.lognormvariate(math.log(self.a) - self.b**2 / 2, self.b)
        return max(1, min(self.most, round(drawn)))


def parse_lengths(option: str, text: str) -> Lengths:
    """`64`, `uniform:16:256`, `lognormal:128:0.8`, `lognormal:128:0.8:1024`. Raises: InvalidOption."""
    kind, *numbers = text.split(":")
    try:
        if not numbers:
            return _fixed(int(kind))
        if kind == "uniform":
            return _uniform(*(int(number) for number in numbers))
        if kind == "lognormal":
            mean, sigma, *most = numbers
            return _lognormal(float(mean), float(sigma), *(int(number) for number in most))
        raise ValueError("no such law")
    except (TypeError, ValueError):
        raise InvalidOption(
            f"{option} {text!r}: write N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA[:MOST], "
            f"in tokens from 1 to {MAX_TOKENS}"
        ) from None


def _fixed(tokens: int) -> Lengths:
    _within(1, tokens, MAX_TOKENS)
    return Lengths("fixed", tokens)


def _uniform(low: int, high: int) -> Lengths:
    _within(1, low, high, MAX_TOKENS)
    return Lengths("uniform", low, high)


def _lognormal(mean: float, sigma: float, most: int = MAX_TOKENS) -> Lengths:
    _within(1, mean, MAX_TOKENS)
    _within(0, sigma, 5)
    _within(1, most, MAX_TOKENS)
    return Lengths("lognormal", mean, sigma, most)


def _within(*ordered: float) -> None:
    # NaN is in no order.
    if not all(low <= high for low, high in itertools.pairwise(ordered)):
        raise ValueError("out of range")
