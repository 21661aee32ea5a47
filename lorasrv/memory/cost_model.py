"""Cost model of this machine, learned while serving: seconds of loads, copies, recomputation and steps.

Each rate is the median of the newest measurements, so that one that met a page fault or a busy moment does not count.
Before the first measurement it is a guess on the slow side of today's machines. The seconds of a step are a linear
regression on what the step contains, learned from measured steps:

    seconds = a + b · tokens + c · requests + d · adapter bytes + e · attention pairs + f · [tokens > 1]

On a CPU the adapters' bytes dominate a step of many adapters, which schedulers that count tokens alone do not see, and
a step of one token runs other kernels than one of several. Ridge regression with forgetting over six sums; no
coefficient is negative, so that more work never looks like less.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lorasrv.scheduler_output import SchedulerOutput

Matrix = npt.NDArray[np.float64]

FORGETTING = 0.998
"""Weight of a measurement one step later: half after some 350 steps."""
PRIOR_STEPS = 0.05
"""Weight of the first guess, in measured steps, for each coefficient."""
MAX_SURPRISE = 4.0
"""Most times its prediction that a step counts as: one that took longer met something else."""
MIN_TOKEN_S = 1e-6
"""No token costs less, whatever the regression says."""
REFIT_EVERY = 8
MIN_MEASURED_STEPS = 4 * REFIT_EVERY
"""Measurements until the coefficients are more than a guess."""
PARTS = ("step", "token", "request", "adapter_byte", "attention_pair", "second_token")
"""Names of the coefficients."""
GUESS = (10e-3, 1e-3, 0.2e-3, 0.2e-9, 20e-9, 3e-3)
"""First guess of the coefficients in seconds, on the slow side of today's machines."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Describe a step by what its time depends on.

    A draft token counts as one of the `tokens` and as one of the `requests`: its row's logits are computed too.
    """

    tokens: int
    requests: int
    # Bytes of its distinct adapters.
    adapter_bytes: int
    # (token, token that it attends to).
    pairs: int

    @classmethod
    def of(cls, step: SchedulerOutput) -> "StepShape":
        """Return the shape of a scheduled step."""
        return cls(
            tokens=step.num_tokens,
            requests=len(step.requests) + step.num_guessed_tokens,
            adapter_bytes=sum(placed.layout.nbytes for placed in step.placements.values()),
            pairs=sum(len(s.token_ids) * (s.start + (len(s.token_ids) + 1) // 2) for s in step.requests),
        )

    @property
    def parts(self) -> tuple[float, ...]:
        """Return how often the step contains each of `PARTS`."""
        return (1.0, self.tokens, self.requests, self.adapter_bytes, self.pairs, float(self.tokens > 1))


@dataclass(slots=True)
class StepCosts:
    """Predict the seconds of steps. Changed by the engine thread only."""

    # Coefficients of `PARTS`; those passed in are the prior.
    seconds_each: list[float] = field(default_factory=lambda: list(GUESS))
    # Measured steps, including those behind the coefficients passed in.
    num_observed: int = 0
    # Sums of the regression, in units of the guess: there every part is about 1 a step, so that one weight of the prior
    # fits all.
    _prior: Matrix = field(init=False)
    _moments: Matrix = field(init=False)
    _targets: Matrix = field(init=False)
    # The scaled parts of each step since the last fit.
    _newest: list[list[float]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._prior = np.array(self.seconds_each) / GUESS
        self._moments = np.zeros((len(PARTS), len(PARTS)))
        self._targets = np.zeros(len(PARTS))

    @classmethod
    def from_dict(cls, seconds_each: Mapping[str, float]) -> "StepCosts":
        """Start from coefficients that were learned elsewhere, by part."""
        return cls([seconds_each[part] for part in PARTS], MIN_MEASURED_STEPS)

    def as_dict(self) -> dict[str, float]:
        """Return the coefficients by part."""
        return dict(zip(PARTS, self.seconds_each, strict=True))

    @property
    def is_learned(self) -> bool:
        """Return whether the coefficients are more than a guess."""
        return self.num_observed >= MIN_MEASURED_STEPS

    @property
    def token_s(self) -> float:
        """Return the seconds of one more token in a step that is computed anyway."""
        return self.seconds_each[1]

    @property
    def request_s(self) -> float:
        """Return the seconds of one more request in it, beside its tokens."""
        return self.seconds_each[2]

    def seconds(self, shape: StepShape) -> float:
        """Predict the seconds of a step."""
        return _dot(self.seconds_each, shape.parts)

    def draft_token_s(self, num_tokens: int) -> float:
        """Return the seconds of one more token of a request that knows `num_tokens`, with its logits."""
        return max(MIN_TOKEN_S, self.token_s + self.request_s + self.seconds_each[4] * num_tokens)

    @property
    def second_token_s(self) -> float:
        """Return the seconds that the second token of a step takes longer than further ones."""
        return self.seconds_each[5]

    def adapter_s(self, nbytes: int) -> float:
        """Return the seconds that one more distinct adapter adds to each step."""
        return self.seconds_each[3] * nbytes

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Enter a measured step, weighted relative to its own length, so that long steps do not outweigh short ones."""
        if shape.tokens == 0:
            return
        predicted = self.seconds(shape)
        if self.is_learned:
            seconds = min(seconds, MAX_SURPRISE * predicted)
        scale = 1.0 / max(seconds, 1e-6)
        self._newest.append([part * guess * scale for part, guess in zip(shape.parts, GUESS, strict=True)])
        self.num_observed += 1
        if self.num_observed % REFIT_EVERY == 0:
            self._refit()

    def _refit(self) -> None:
        """Add the newest steps to the sums, and solve for the coefficients."""
        rows = np.array(self._newest)
        self._newest.clear()
        weights = FORGETTING ** np.arange(len(rows))[::-1]
        kept = FORGETTING ** len(rows)
        self._moments = kept * self._moments + (rows.T * weights) @ rows
        self._targets = kept * self._targets + weights @ rows
        moments = self._moments + PRIOR_STEPS * np.eye(len(PARTS))
        solution = _without_negatives(moments, self._targets + PRIOR_STEPS * self._prior)
        self.seconds_each = (solution * GUESS).tolist()


def _without_negatives(moments: Matrix, targets: Matrix) -> Matrix:
    """Solve the normal equations of least squares, leaving out the most negative coefficient until there is none."""
    used = np.ones(len(targets), dtype=np.bool_)
    while True:
        solution = np.zeros(len(targets))
        solution[used] = np.linalg.solve(moments[np.ix_(used, used)], targets[used])
        if solution.min() >= 0.0:
            return solution
        used[solution.argmin()] = False


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


NUM_NEWEST = 15
MIN_TOKENS = 32
"""Fewest tokens of a step that is measured: a smaller one says little about a token of a long prompt."""


@dataclass(slots=True)
class Rate:
    """Estimate the seconds of one unit (a byte, a token)."""

    seconds: float
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_NEWEST))

    def observe(self, seconds: float, units: int) -> None:
        """Enter a measurement of `units` units; none is ignored."""
        if units > 0:
            self._newest.append(seconds / units)
            self.seconds = statistics.median(self._newest)


@dataclass(slots=True)
class GdsfClock:
    """Hold the highest score evicted so far, which is added to every new score, so that old uses lose their weight
    (greedy-dual-size-frequency, Cherkasova 1998). Shared by all caches that compete for the same pages.
    """

    now: float = 0.0

    def advance(self, score: float) -> None:
        """Note that something of this score is evicted."""
        self.now = max(self.now, score)


@dataclass(slots=True)
class CostModel:
    """Estimate seconds of work. Changed by the engine thread only."""

    # A byte from disk to host memory, verified and packed.
    load: Rate = field(default_factory=lambda: Rate(1 / 0.5e9))
    # A byte from host memory to the pool.
    copy: Rate = field(default_factory=lambda: Rate(1 / 4e9))
    # A byte between the pool and the swap space.
    page_copy: Rate = field(default_factory=lambda: Rate(1 / 4e9))
    # A byte of a snapshot, from disk through host memory to the pool, verified.
    restore: Rate = field(default_factory=lambda: Rate(1 / 0.4e9))
    # What planning a step ahead saves of its time: a device waits for that where the step before must be collected
    # first. 0 where no step is planned ahead.
    lead: Rate = field(default_factory=lambda: Rate(0.0))
    # By how much the pass of a step ends later than was predicted for the whole step; negative if it ends earlier.
    lateness: Rate = field(default_factory=lambda: Rate(0.0))
    # A token of a prompt.
    token: Rate = field(default_factory=lambda: Rate(1e-3))
    # A whole step, without what the device waits for before it.
    step: StepCosts = field(default_factory=StepCosts)

    def observe_step(self, shape: StepShape, seconds: float) -> None:
        """Enter a measured step."""
        self.step.observe(shape, seconds)
        if shape.tokens >= MIN_TOKENS:
            self.token.observe(seconds, shape.tokens)

    def reload_s(self, nbytes: int, *, on_host: bool) -> float:
        """Estimate the seconds to load an adapter of `nbytes` bytes; `on_host`: from the host cache."""
        return nbytes * (self.copy.seconds + (0.0 if on_host else self.load.seconds))

    def recompute_s(self, num_tokens: int) -> float:
        """Estimate the seconds to compute tokens again."""
        return num_tokens * self.token.seconds

    def restore_s(self, nbytes: int) -> float:
        """Estimate the seconds to restore a snapshot of `nbytes` bytes."""
        return nbytes * self.restore.seconds

    def swap_s(self, nbytes: int) -> float:
        """Estimate the seconds to swap `nbytes` bytes out and in again."""
        return 2 * nbytes * self.page_copy.seconds
