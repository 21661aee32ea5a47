"""Token bucket: a rate limit that may be overdrawn once and must then be paid off. A leaf: no torch, no HTTP."""

import math
import time
from collections.abc import Callable

_ROUNDING = 1e-6
"""Error of floating point while a bucket fills."""


class TokenBucket:
    """Fill steadily up to a capacity; a larger `take` leaves a debt.

    Args:
        rate: tokens per second; with 0 it never fills.
        capacity: most tokens that it holds. A new bucket is full.
        clock: monotonic seconds.
    """

    __slots__ = ("_clock", "_filled_s", "_level", "capacity", "lent", "rate")

    def __init__(self, rate: float, capacity: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.capacity = rate, capacity
        # Tokens lent to others, who may still use them. Together with the level they do not exceed the capacity.
        self.lent = 0
        self._clock = clock
        self._level = capacity
        self._filled_s = clock()

    @property
    def level(self) -> float:
        """Return the tokens that may be taken now; a negative number is owed."""
        now_s = self._clock()
        self._level = min(self.capacity - self.lent, self._level + self.rate * max(0.0, now_s - self._filled_s))
        self._filled_s = now_s
        return self._level

    @property
    def is_full(self) -> bool:
        """Return whether everything taken has been refilled."""
        return self.level >= self.capacity

    def take(self, amount: float) -> None:
        """Take tokens, even more than the level."""
        self._level = self.level - amount

    def give_back(self, amount: float) -> None:
        """Undo a `take`, up to the capacity."""
        self.take(-amount)

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` tokens are available if none is taken meanwhile; 0 if they are."""
        missing = amount - self.level
        if missing <= _ROUNDING:
            return 0.0
        return missing / self.rate if self.rate else math.inf

    def resize(self, rate: float, capacity: float) -> None:
        """Change rate and capacity."""
        # Until now it has filled at the old rate.
        self._level = self.level
        self.rate, self.capacity = rate, capacity
