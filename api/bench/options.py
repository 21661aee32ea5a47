"""How options of the bench are spelled: lists of numbers for sweeps, bounds of service, sizes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

_Number = TypeVar("_Number", int, float)

_KEYS = ("--key", "--api-key")
SLO_NAMES = ("ttft", "tpot", "e2e")
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class InvalidOption(Exception):
    """One line that names the option, what is wrong with it, and what to write instead."""


def counts(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """`1,4,16`. Raises: InvalidOption."""
    return _list(option, text, int, lambda n: n >= least, f"integers of {least} or more, as 1,4,16")


def rates(option: str, text: str) -> tuple[float, ...]:
    """`0.5,2`, a second each. Raises: InvalidOption."""
    return _list(option, text, float, lambda r: 0 < r < math.inf, "positive numbers, as 0.5,2")


def amount(option: str, text: str) -> float:
    """A positive number with an optional decimal or binary prefix: `134M`, `1.2GB`, `512MiB`. Raises: InvalidOption."""
    body = text.strip().lower().removesuffix("b")
    digits = body.rstrip("kmgti")
    try:
        value = float(digits) * _UNITS[body[len(digits) :]]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidOption(f"{option} {text!r} is no positive number; write 134M, 1.2GB or 512MiB")
    return value


def service_bounds(text: str) -> dict[str, float]:
    """`ttft=500,tpot=100` -> milliseconds by name. Raises: InvalidOption."""
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
    """A command line without the keys in it."""
    parts = [(word, word.partition("=")) for word in words]
    hidden = [f"{option}=***" if equals and option in _KEYS else word for word, (option, equals, _) in parts]
    return ["***" if before in _KEYS else word for before, word in zip(["", *hidden], hidden, strict=False)]


def spelled(bounds: Mapping[str, float]) -> str:
    """The inverse of `service_bounds`."""
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
