"""What things cost on this machine, learnt while serving: seconds of loads, copies and recomputation.

Each rate is the median of the newest measurements: one that met a page fault or a busy moment does not count. Before
the first measurement it is a guess on the slow side of today's machines.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field

from lorasrv.step_costs import StepCosts, StepShape

NUM_NEWEST = 15
PARALLEL_LOADS = 8
"""Adapters that are read from disk side by side."""
MIN_TOKENS = 32
"""A step of fewer tokens says little about what a token of a long prompt costs."""


@dataclass(slots=True)
class Rate:
    """Seconds for one unit (a byte, a token)."""

    seconds: float
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_NEWEST))

    def observe(self, seconds: float, units: int) -> None:
        """Something of `units` units took that long."""
        if units > 0:
            self._newest.append(seconds / units)
            self.seconds = statistics.median(self._newest)


@dataclass(slots=True)
class AgingClock:
    """How much what was evicted last was worth. What is used now is worth that much more, so that old fame fades
    (greedy-dual-size-frequency, Cherkasova 1998). One clock for all that compete for the same pages.
    """

    now: float = 0.0

    def passes(self, worth: float) -> None:
        """Something of this worth is evicted."""
        self.now = max(self.now, worth)


@dataclass(slots=True)
class CostModel:
    """Rates by byte and by token. Changed by the engine thread only."""

    load: Rate = field(default_factory=lambda: Rate(1 / 0.5e9))
    """A byte from disk to host memory, verified and packed."""
    copy: Rate = field(default_factory=lambda: Rate(1 / 4e9))
    """A byte from host memory to the pool."""
    page_copy: Rate = field(default_factory=lambda: Rate(1 / 4e9))
    """A byte between the pool and the swap."""
    token: Rate = field(default_factory=lambda: Rate(1e-3))
    """A token of a prompt."""

    step: StepCosts = field(default_factory=StepCosts)
    """A whole step."""

    def observe_step(self, shape: StepShape, seconds: float) -> None:
        """A step has taken that long."""
        self.step.observe(shape, seconds)
        if shape.tokens >= MIN_TOKENS:
            self.token.observe(seconds, shape.tokens)

    def seconds_to_return(self, nbytes: int, *, on_host: bool) -> float:
        """An adapter that is evicted now comes back in about this time."""
        return nbytes * (self.copy.seconds + (0.0 if on_host else self.load.seconds))

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens * self.token.seconds

    def swap_s(self, nbytes: int) -> float:
        """Out and in again."""
        return 2 * nbytes * self.page_copy.seconds
