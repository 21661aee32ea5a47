"""Cost model of this machine, learned while serving: seconds of loads, copies, recomputation and steps.

Each rate is the median of the newest measurements, so that an outlier, such as a page fault or a busy moment, does not
count. Before the first measurement it is a guess on the slow side of today's machines. The seconds of a step are a
linear regression on the contents of the step, learned from measured steps:

    seconds = a + b · tokens + c · requests + d · adapter bytes + e · attention pairs + f · [tokens > 1]

On a CPU the adapters' bytes dominate a step of many adapters, which schedulers that count only tokens miss, and a step
of one token runs different kernels from a step of several. The fit is a ridge regression with forgetting over six sums.
No coefficient is negative, so that more work never costs less.
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
"""Factor on the weight of a measurement per step: half after some 350 steps."""
PRIOR_STEPS = 0.05
"""Weight of the first guess of each coefficient, in measured steps."""
MAX_SURPRISE = 4.0
"""Most multiples of its prediction that a measured step counts as: something else delayed a longer one."""
MIN_TOKEN_S = 1e-6
"""Lower bound of a token's cost, whatever the regression says."""
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
    # Number of pairs (token, token that it attends to).
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
    # Number of measured steps, including those from which the coefficients passed in were learned.
    num_observed: int = 0
    # Sums of the regression, in units of the guess. In these units every part is about 1 per step, so one weight of the
    # prior fits all parts.
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
        """Return the seconds of one more request in a step, without its tokens."""
        return self.seconds_each[2]

    def seconds(self, shape: StepShape) -> float:
        """Predict the seconds of a step."""
        return _dot(self.seconds_each, shape.parts)

    def draft_token_s(self, num_tokens: int) -> float:
        """Return the seconds of one more token, with its logits, for a request of `num_tokens` known tokens."""
        return max(MIN_TOKEN_S, self.token_s + self.request_s + self.seconds_each[4] * num_tokens)

    @property
    def second_token_s(self) -> float:
        """Return by how many seconds the second token of a step takes longer than later ones."""
        return self.seconds_each[5]

    def adapter_s(self, nbytes: int) -> float:
        """Return the seconds that one more distinct adapter adds to each step."""
        return self.seconds_each[3] * nbytes

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Add a measured step, weighted relative to its own duration, so that long steps do not outweigh short ones."""
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
    """Solve the normal equations of least squares; drop the most negative coefficient until none is negative."""
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
"""Fewest tokens of a step that is measured: a smaller step says little about the cost of a prompt token."""


@dataclass(slots=True)
class Rate:
    """Estimate the seconds of one unit (a byte, a token)."""

    seconds: float
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_NEWEST))

    def observe(self, seconds: float, units: int) -> None:
        """Add a measurement of `units` units; zero units are ignored."""
        if units > 0:
            self._newest.append(seconds / units)
            self.seconds = statistics.median(self._newest)


@dataclass(slots=True)
class GdsfClock:
    """Hold the highest score evicted so far. It is added to every new score, so that old uses lose their weight
    (greedy-dual-size-frequency, Cherkasova 1998). All caches that compete for the same pages share one clock.
    """

    now: float = 0.0

    def advance(self, score: float) -> None:
        """Note that something with this score is evicted."""
        self.now = max(self.now, score)


@dataclass(slots=True)
class CostModel:
    """Estimate seconds of work. Changed by the engine thread only."""

    # Seconds per byte from disk to host memory, verified and packed.
    load: Rate = field(default_factory=lambda: Rate(1 / 0.5e9))
    # Seconds per byte from host memory to the pool.
    copy: Rate = field(default_factory=lambda: Rate(1 / 4e9))
    # Seconds per byte between the pool and the swap space.
    page_copy: Rate = field(default_factory=lambda: Rate(1 / 4e9))
    # Seconds per byte of a snapshot, from disk through host memory to the pool, verified.
    restore: Rate = field(default_factory=lambda: Rate(1 / 0.4e9))
    # Seconds that planning a step ahead saves; the device waits that long if the previous step must be collected first.
    # 0 if no step is planned ahead.
    lead: Rate = field(default_factory=lambda: Rate(0.0))
    # Seconds by which the pass of a step ends later than predicted for the whole step; negative if earlier.
    lateness: Rate = field(default_factory=lambda: Rate(0.0))
    # Seconds per token of a prompt.
    token: Rate = field(default_factory=lambda: Rate(1e-3))
    # Seconds of a whole step, without the time for which the device waits before it.
    step: StepCosts = field(default_factory=StepCosts)

    def observe_step(self, shape: StepShape, seconds: float) -> None:
        """Add a measured step."""
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
