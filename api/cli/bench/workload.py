"""Define workloads: parse lists, SLO bounds and sizes; draw prompt and answer lengths; choose adapters."""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Number = TypeVar("_Number", int, float)
_KEYS = ("--key", "--api-key", "--registry-key", "--cluster-secret", "--watermark-key")
SLO_NAMES = ("ttft", "tpot", "e2e")
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class InvalidOption(Exception):
    """Report an option in one line: its name, the problem, and what to write instead."""


def counts(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """Parse integers such as `1,4,16`.

    Raises: InvalidOption.
    """
    return _list(option, text, int, lambda n: n >= least, f"integers of {least} or more, as 1,4,16")


def rates(option: str, text: str) -> tuple[float, ...]:
    """Parse rates per second such as `0.5,2`.

    Raises: InvalidOption.
    """
    return _list(option, text, float, lambda r: 0 < r < math.inf, "positive numbers, as 0.5,2")


def amount(option: str, text: str) -> float:
    """Parse a positive number with an optional decimal or binary prefix: `134M`, `1.2GB`, `512MiB`.

    Raises: InvalidOption.
    """
    body = text.strip().lower().removesuffix("b")
    digits = body.rstrip("kmgti")
    try:
        value = float(digits) * _UNITS[body[len(digits) :]]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidOption(f"{option} {text!r} is not a positive number; write 134M, 1.2GB or 512MiB")
    return value


def service_bounds(text: str) -> dict[str, float]:
    """Parse SLO bounds such as `ttft=500,tpot=100` to milliseconds by name.

    Raises: InvalidOption.
    """
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in SLO_NAMES or name in bounds:
            raise InvalidOption(
                f"--slo {part.strip()!r}: write each of {', '.join(SLO_NAMES)} at most once, as ttft=500,tpot=100"
            )
        try:
            bounds[name] = float(value)
        except ValueError:
            bounds[name] = math.nan
        if not 0 < bounds[name] < math.inf:
            raise InvalidOption(f"--slo {name} must be a positive number of milliseconds, not {value!r}")
    return bounds


def hidden_key(words: Sequence[str]) -> list[str]:
    """Replace secrets in a command line by asterisks."""
    parts = [(word, word.partition("=")) for word in words]
    hidden = [f"{option}=***" if equals and option in _KEYS else word for word, (option, equals, _) in parts]
    return ["***" if before in _KEYS else word for before, word in zip(["", *hidden], hidden, strict=False)]


def spelled(bounds: Mapping[str, float]) -> str:
    """Format SLO bounds as `service_bounds` parses them."""
    return ",".join(f"{name}={value:g}" for name, value in bounds.items())


def _list(
    option: str, text: str, kind: Callable[[str], _Number], holds: Callable[[_Number], bool], rule: str
) -> tuple[_Number, ...]:
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(holds(value) for value in values):
        raise InvalidOption(f"{option} {text!r}: write one or several {rule}")
    return values


MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Lengths:
    """Define a distribution of lengths, clamped to 1 and `most`."""

    # fixed, uniform or lognormal.
    kind: str
    # fixed: the length; uniform: the least; lognormal: the mean, which clamping to `most` lowers.
    a: float
    # uniform: the most; lognormal: standard deviation of the logarithm.
    b: float = 0.0
    most: int = MAX_TOKENS

    def draw(self, rng: random.Random) -> int:
        """Draw one length in tokens."""
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        drawn = rng.lognormvariate(math.log(self.a) - self.b**2 / 2, self.b)
        return max(1, min(self.most, round(drawn)))


def parse_lengths(option: str, text: str) -> Lengths:
    """Parse `64`, `uniform:16:256`, `lognormal:128:0.8` or `lognormal:128:0.8:1024`.

    Raises: InvalidOption.
    """
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
    # NaN fails every comparison.
    if not all(low <= high for low, high in itertools.pairwise(ordered)):
        raise ValueError("out of range")


KINDS = ("distinct", "uniform", "zipf", "identical")


@dataclass(frozen=True, slots=True)
class Law:
    """Define which adapter each request names."""

    # distinct: in turn; uniform: random; zipf: the k-th with weight k^-exponent; identical: always the first.
    kind: str
    exponent: float = 0.0

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}" if self.kind == "zipf" else self.kind

    def pick(self, num_names: int, count: int, rng: random.Random) -> list[int]:
        """Return `count` positions in a list of `num_names` names."""
        if self.kind == "distinct":
            return [number % num_names for number in range(count)]
        if self.kind == "identical":
            return [0] * count
        weights = [(k + 1) ** -self.exponent for k in range(num_names)]
        return rng.choices(range(num_names), weights=weights, k=count)


def parse_law(text: str) -> Law:
    """Parse `distinct`, `uniform`, `identical` or `zipf:S`.

    Raises: InvalidOption.
    """
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
