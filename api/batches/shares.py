"""One key's part of what all batches share, so that no key takes all of it from the others."""

import asyncio
from dataclasses import dataclass, field

from adapter_store.quota import ANONYMOUS

MAX_AT_A_TIME = 4
"""Batches of one key that are asked at the same time."""


@dataclass(frozen=True, slots=True)
class Share:
    """What the batches of one key wait for: `turns` to be asked at all, and `places` in memory for their lines. A line
    that may not run yet keeps its place for long, which is nobody else's then."""

    places: asyncio.Semaphore
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_AT_A_TIME))


def most_of(bound: int, principal: str) -> int:
    """How much of a bound one key may have: half of it. Without keys there is nobody to share with."""
    return bound if principal == ANONYMOUS else max(1, bound // 2)
