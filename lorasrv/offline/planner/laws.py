"""Synthetic traffic instead of a trace: when requests arrive, which adapters they name, how long they are. Torch-free.

Each law is a rate over time; arrivals are a Poisson process with this rate, drawn by thinning. The same seed gives the
same traffic.
"""

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lorasrv.errors import ConfigError
from lorasrv.metrics.trace import TraceRequest

DAYS = 2
DEEPEST = 0.1
"""Rate in the middle of the night, as a share of the mean."""
FLASH_SHARE, FLASH_TIMES = 0.2, 4.0
"""A flash crowd's share of the time, and its rate as a multiple of the usual one."""
CROWD = 0.5
"""Share of a flash crowd's requests that name one adapter."""
BUSY_TIMES, BUSY_SHARE = 2.5, 0.25
"""Rate of the busy state, as a multiple of the mean, and its share of the time."""
STAY_S = 5.0
"""Mean seconds in the busy state."""
MAX_TOKENS = 1 << 20
Rate = Callable[[float], float]
"""Requests per second at a given time, as a multiple of the mean."""


MAX_REQUESTS = 10_000_000
"""Most requests of a trace, at some 200 bytes each."""


@dataclass(frozen=True)
class TrafficLaw:
    """Describe the traffic as a whole by means and laws.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    law: str = "poisson"
    # Mean requests per second.
    rate: float = 10.0
    seconds: float = 60.0
    adapters: int = 1000
    # Exponent of the adapters' popularity; 0: all equally popular.
    zipf: float = 1.0
    # Means of lognormal lengths; `sigma` is the standard deviation of their logarithm.
    prompt_tokens: float = 256.0
    output_tokens: float = 128.0
    sigma: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise ConfigError(f"law {self.law!r} is unknown; there are {', '.join(LAWS)}")
        for name in ("rate", "seconds", "adapters", "prompt_tokens", "output_tokens"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if (requests := self.rate * self.seconds) > MAX_REQUESTS:
            raise ConfigError(f"rate times seconds are {requests:.0f} requests, more than {MAX_REQUESTS}; lower one")
        for name in ("zipf", "sigma"):
            if not 0 <= getattr(self, name) < 10:
                raise ConfigError(f"{name} must be from 0 to 10, not {getattr(self, name)}")

    def trace(self) -> tuple[TraceRequest, ...]:
        """Return the requests in order of arrival; none if the rate is too low for one."""
        rng = random.Random(self.seed)
        rate, peak = LAWS[self.law](self.seconds, rng)
        adapter_at = _adapters(self, rng)
        return tuple(
            TraceRequest(
                arrival_s=at_s,
                prompt_tokens=_length(self.prompt_tokens, self.sigma, rng),
                output_tokens=_length(self.output_tokens, self.sigma, rng),
                adapter=adapter_at(at_s),
            )
            for at_s in _arrivals(rate, peak, self, rng)
        )


def _poisson(seconds: float, rng: random.Random) -> tuple[Rate, float]:
    return lambda at_s: 1.0, 1.0


def _diurnal(seconds: float, rng: random.Random) -> tuple[Rate, float]:
    """Return a sine of two days, compressed into the time."""
    swing = 1.0 - DEEPEST
    return lambda at_s: 1.0 - swing * math.cos(2 * math.pi * DAYS * at_s / seconds), 1.0 + swing


def _flash(seconds: float, rng: random.Random) -> tuple[Rate, float]:
    """Return the usual rate, with a flash crowd from the middle on."""
    usual = 1.0 / (1.0 + FLASH_SHARE * (FLASH_TIMES - 1.0))
    return lambda at_s: usual * (FLASH_TIMES if _is_flash(at_s, seconds) else 1.0), usual * FLASH_TIMES


def _is_flash(at_s: float, seconds: float) -> bool:
    return 0.0 <= at_s - seconds / 2 < FLASH_SHARE * seconds


def _mmpp(seconds: float, rng: random.Random) -> tuple[Rate, float]:
    """Return the rate of a Markov-modulated Poisson process: two states with exponentially distributed durations."""
    calm = (1.0 - BUSY_SHARE * BUSY_TIMES) / (1.0 - BUSY_SHARE)
    stays = (STAY_S * (1.0 - BUSY_SHARE) / BUSY_SHARE, STAY_S)
    ends = [0.0]
    while ends[-1] < seconds:
        ends.append(ends[-1] + rng.expovariate(1.0 / stays[(len(ends) - 1) % 2]))
    return lambda at_s: (BUSY_TIMES, calm)[bisect_left(ends, at_s) % 2], BUSY_TIMES


LAWS: dict[str, Callable[[float, random.Random], tuple[Rate, float]]] = {
    "poisson": _poisson,
    "diurnal": _diurnal,
    "flash": _flash,
    "mmpp": _mmpp,
}


def _arrivals(rate: Rate, peak: float, of: TrafficLaw, rng: random.Random) -> Iterator[float]:
    """Draw the arrival times of a process with this rate, by thinning one with the peak rate."""
    at_s = rng.expovariate(peak * of.rate)
    while at_s < of.seconds:
        if rng.random() * peak < rate(at_s):
            yield at_s
        at_s += rng.expovariate(peak * of.rate)


def _adapters(of: TrafficLaw, rng: random.Random) -> Callable[[float], str]:
    """Return a function that draws an adapter by Zipf's law; in a flash crowd, often the crowd's adapter."""
    ends = list(itertools.accumulate(1.0 / rank**of.zipf for rank in range(1, of.adapters + 1)))
    crowd = rng.randrange(of.adapters)

    def drawn(at_s: float) -> str:
        if of.law == "flash" and _is_flash(at_s, of.seconds) and rng.random() < CROWD:
            return adapter_name(crowd)
        return adapter_name(min(of.adapters - 1, _place(ends, rng.random())))

    return drawn


def _place(ends: Sequence[float], share: float) -> int:
    return bisect_left(ends, share * ends[-1])


def adapter_name(number: int) -> str:
    """Return the name of an adapter, the most popular first."""
    return f"a{number}"


def _length(mean: float, sigma: float, rng: random.Random) -> int:
    drawn = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return max(1, min(MAX_TOKENS, round(drawn)))
