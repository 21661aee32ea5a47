"""How long a step takes, learnt from the steps that were measured: a linear model of what the step has in it.

    seconds = a + b · tokens + c · requests + d · adapter bytes + e · attention pairs

On a CPU the adapters' bytes rule a step of many personas, which schedulers that count tokens alone do not see. Ridge
regression with forgetting over five sums; no coefficient is negative, so that more work never looks like less.

What things cost on this machine, learnt while serving: seconds of loads, copies and recomputation.

Each rate is the median of the newest measurements: one that met a page fault or a busy moment does not count. Before
the first measurement it is a guess on the slow side of today's machines.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lorasrv.scheduler_output import SchedulerOutput

FORGETTING = 0.998
"""A step counts half after some 350 further ones."""
PRIOR_STEPS = 0.05
"""How many measured steps the first guess is worth, for each of its parts."""
MAX_SURPRISE = 4.0
"""A step that took longer than so many times its prediction met something else; it counts as that long."""
REFIT_EVERY = 8
MIN_MEASURED_STEPS = 4 * REFIT_EVERY
SWEEPS = 60
PARTS = ("step", "token", "request", "adapter_byte", "attention_pair")
"""What each coefficient is the cost of."""
GUESS = (10e-3, 1e-3, 0.2e-3, 0.2e-9, 20e-9)
"""Seconds for each part, on the slow side of today's machines."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step has in it. `adapter_bytes`: its distinct adapters. `pairs`: of a token and one that it attends to.
    A draft token is one of the `tokens`, and counts as a request: its row's logits are wanted, too."""

    tokens: int
    requests: int
    adapter_bytes: int
    pairs: int

    @classmethod
    def of(cls, step: SchedulerOutput) -> "StepShape":
        return cls(
            tokens=step.num_tokens,
            requests=len(step.scheduled) + step.num_draft_tokens,
            adapter_bytes=sum(placed.layout.nbytes for placed in step.placements.values()),
            pairs=sum(len(s.token_ids) * (s.start + (len(s.token_ids) + 1) // 2) for s in step.scheduled),
        )

    @property
    def parts(self) -> tuple[float, ...]:
        """How often each of `PARTS` is in it."""
        return (1.0, self.tokens, self.requests, self.adapter_bytes, self.pairs)


@dataclass(slots=True)
class StepCosts:
    """Seconds for each of `PARTS`. Changed by the engine thread only.

    Args:
        seconds_each: what is known already; the measurements begin where that ends.
    """

    seconds_each: list[float] = field(default_factory=lambda: list(GUESS))
    num_observed: int = 0
    _prior: list[float] = field(default_factory=list)
    _moments: list[list[float]] = field(default_factory=list)
    _targets: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        # In units of the guess every part is about 1 a step, so that one weight of the prior fits all.
        self._prior = [s / g for s, g in zip(self.seconds_each, GUESS, strict=True)]
        self._moments = [[0.0] * len(PARTS) for _ in PARTS]
        self._targets = [0.0] * len(PARTS)

    @classmethod
    def known(cls, seconds_each: Mapping[str, float]) -> "StepCosts":
        """From what was learnt elsewhere, by part."""
        return cls([seconds_each[part] for part in PARTS], MIN_MEASURED_STEPS)

    def as_dict(self) -> dict[str, float]:
        """What was learnt, by part."""
        return dict(zip(PARTS, self.seconds_each, strict=True))

    @property
    def is_learnt(self) -> bool:
        """Whether it is more than a guess."""
        return self.num_observed >= MIN_MEASURED_STEPS

    @property
    def token_s(self) -> float:
        """A further token in a step that is computed anyway."""
        return self.seconds_each[1]

    @property
    def request_s(self) -> float:
        """A further request in it, beside its tokens."""
        return self.seconds_each[2]

    def seconds(self, shape: StepShape) -> float:
        """How long such a step would take."""
        return _dot(self.seconds_each, shape.parts)

    def adapter_s(self, nbytes: int) -> float:
        """What one more distinct adapter adds to each step that it is in."""
        return self.seconds_each[3] * nbytes

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step took that long. Counted relative to its own length, so that long steps do not rule the short ones."""
        if shape.tokens == 0:
            return
        predicted = self.seconds(shape)
        if self.is_learnt:
            seconds = min(seconds, MAX_SURPRISE * predicted)
        scale = 1.0 / max(seconds, 1e-6)
        row = [part * guess * scale for part, guess in zip(shape.parts, GUESS, strict=True)]
        for i, value in enumerate(row):
            moments = self._moments[i]
            for j, other in enumerate(row):
                moments[j] = FORGETTING * moments[j] + value * other
            self._targets[i] = FORGETTING * self._targets[i] + value
        self.num_observed += 1
        if self.num_observed % REFIT_EVERY == 0:
            self._refit()

    def _refit(self) -> None:
        """Least squares without negative coefficients, by coordinate descent from the last solution."""
        solution = [s / g for s, g in zip(self.seconds_each, GUESS, strict=True)]
        for _ in range(SWEEPS):
            for i, moments in enumerate(self._moments):
                target = self._targets[i] + PRIOR_STEPS * self._prior[i]
                rest = _dot(moments, solution) - moments[i] * solution[i]
                solution[i] = max(0.0, (target - rest) / (moments[i] + PRIOR_STEPS))
        self.seconds_each = [x * g for x, g in zip(solution, GUESS, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


NUM_NEWEST = 15
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
class GdsfClock:
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

    def reload_s(self, nbytes: int, *, on_host: bool) -> float:
        """An adapter that is evicted now comes back in about this time."""
        return nbytes * (self.copy.seconds + (0.0 if on_host else self.load.seconds))

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens * self.token.seconds

    def swap_s(self, nbytes: int) -> float:
        """Out and in again."""
        return 2 * nbytes * self.page_copy.seconds
