"""One key's part of what all batches share, so that no key takes all of it from the others."""

import asyncio
from dataclasses import dataclass, field

MAX_AT_A_TIME = 4
"""Batches of one key that are asked at the same time."""


@dataclass(frozen=True, slots=True)
class Share:
    """What the batches of one key wait for: `turns` to be asked at all, and `places` in memory for their lines. A line
    that may not run yet keeps its place for long, which is nobody else's then."""

    places: asyncio.Semaphore
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_AT_A_TIME))
