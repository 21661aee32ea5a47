"""Hand usage from a server that follows a registry to that registry, as JSON. Torch-free."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapter_store.spec import AdapterKey
from lorasrv.metrics.histogram import SECONDS, Histogram
from lorasrv.metrics.usage import SUMS, TIMES, Usage
from lorasrv.request import Account

_NUMBERS = frozenset((*SUMS, *TIMES))
_FLOATS = frozenset(name for name in _NUMBERS if isinstance(getattr(Usage(), name), float))
MAX_NUMBER = 1 << 53
"""Beyond this, counts are not exact in JSON."""


@dataclass(frozen=True, slots=True)
class UsageBatch:
    """Hold usage that a registry must count exactly once, however often it arrives."""

    # Identifies one start of a server.
    source: str
    # Counts the batches of the source, from 1.
    sequence: int
    # The accounts, as JSON of `to_rows`.
    body: str

    def to_dict(self) -> dict[str, Any]:
        """Return the batch as it is sent."""
        return {"source": self.source, "sequence": self.sequence, "usage": json.loads(self.body)}


def to_rows(usages: Mapping[Account, Usage]) -> list[list[Any]]:
    """Return the usage of accounts as JSON values, without zeros."""
    return [
        [
            adapter_id,
            key or "",
            {name: value for name in sorted(_NUMBERS) if (value := getattr(usage, name))},
            [[each.counts, each.sum] for each in (usage.hot, usage.cold)],
        ]
        for (adapter_id, key), usage in usages.items()
    ]


def from_rows(rows: Sequence[Any]) -> dict[Account, Usage]:
    """Return the usage of accounts from JSON values.

    Raises:
        ValueError: the values do not have the form that `to_rows` returns.
    """
    found: dict[Account, Usage] = {}
    for row in rows:
        try:
            adapter_id, key, numbers, (hot, cold) = row
            usage = Usage(hot=_histogram(hot), cold=_histogram(cold))
            for name, value in numbers.items():
                setattr(usage, _name(name), _number(name, value))
        except (TypeError, AttributeError):
            raise ValueError(f"{row!r:.100} is no usage of an adapter") from None
        if not isinstance(adapter_id, str) or not isinstance(key, str):
            raise ValueError(f"{row!r:.100} names no adapter")
        found.setdefault((adapter_id, AdapterKey(key)), Usage()).merge(usage)
    return found


def _name(name: str) -> str:
    if name not in _NUMBERS:
        raise ValueError(f"{name!r:.100} is no figure of usage")
    return name


def _number(name: str, value: Any) -> int | float:
    return _amount(name, value) if name in _FLOATS else _count(name, value)


def _amount(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_NUMBER:
        raise ValueError(f"{name} is a number from 0 on, not {value!r:.100}")
    return float(value)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or _amount(name, value) != value:
        raise ValueError(f"{name} is a count, not {value!r:.100}")
    return value


def _histogram(value: Any) -> Histogram:
    counts, seconds = value
    if not isinstance(counts, list) or len(counts) != len(SECONDS) + 1:
        raise ValueError(f"a histogram has {len(SECONDS) + 1} counts")
    return Histogram(SECONDS, [_count("a histogram's count", count) for count in counts], _amount("its sum", seconds))
