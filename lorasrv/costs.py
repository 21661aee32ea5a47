"""What things cost on this machine, learnt while serving: seconds of loads, copies and recomputation.

Each rate is an exponential mean of what was measured. Before the first measurement it is a guess on the slow side of
today's machines.
"""

from dataclasses import dataclass, field

_WEIGHT = 0.1
MIN_TOKENS = 32
"""A step of fewer tokens says little about what a token of a long prompt costs."""


@dataclass(slots=True)
class Rate:
    """Seconds for one unit (a byte, a token)."""

    seconds: float
    is_measured: bool = False

    def observe(self, seconds: float, units: int) -> None:
        """Something of `units` units took that long."""
        if units <= 0:
            return
        new = seconds / units
        self.seconds = new if not self.is_measured else (1 - _WEIGHT) * self.seconds + _WEIGHT * new
        self.is_measured = True


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

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step has computed that many tokens."""
        if num_tokens >= MIN_TOKENS:
            self.token.observe(seconds, num_tokens)

    def seconds_to_return(self, nbytes: int, *, on_host: bool) -> float:
        """An adapter that is evicted now comes back in about this time."""
        return nbytes * (self.copy.seconds + (0.0 if on_host else self.load.seconds))

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens * self.token.seconds

    def swap_s(self, nbytes: int) -> float:
        """Out and in again."""
        return 2 * nbytes * self.page_copy.seconds
