"""Which adapter each request names."""

import math
import random
from dataclasses import dataclass

from api.bench.options import InvalidOption

KINDS = ("distinct", "uniform", "zipf", "identical")


@dataclass(frozen=True, slots=True)
class Law:
    """`distinct`: each in turn; `uniform`: any of them; `zipf`: the k-th with weight k^-exponent; `identical`: the
    first alone.
    """

    kind: str
    exponent: float = 0.0

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}" if self.kind == "zipf" else self.kind

    def pick(self, num_names: int, count: int, rng: random.Random) -> list[int]:
        """`count` positions in a list of `num_names` names."""
        if self.kind == "distinct":
            return [number % num_names for number in range(count)]
        if self.kind == "identical":
            return [0] * count
        weights = [(k + 1) ** -self.exponent for k in range(num_names)]
        return rng.choices(range(num_names), weights=weights, k=count)


def parse_law(text: str) -> Law:
    """`distinct`, `uniform`, `identical`, `zipf:S`. Raises: InvalidOption."""
    kind, colon, exponent = text.partition(":")
    if kind not in KINDS or (colon and kind != "zipf"):
        raise InvalidOption(f"--law {text!r} is unknown; write distinct, uniform, identical or zipf:S, as zipf:1.1")
    if kind != "zipf":
        return Law(kind)
    try:
        value = float(exponent)
    except ValueError:
        value = math.nan
    if not 0 < value <= 100:
        raise InvalidOption(f"--law {text!r}: the exponent must be above 0 and at most 100, as in zipf:1.1")
    return Law(kind, value)
