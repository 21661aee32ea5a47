"""Summarise a replay or a recorded trace in a few figures. Torch-free."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.planner.sim_traffic import SimulatedRequest, SimulationResult
from lorasrv.outputs import AdapterTier

NAN = float("nan")


@dataclass(frozen=True)
class SimulationStats:
    """Hold the figures; NaN where unknown."""

    requests: int
    seconds: float
    # Throughput from the first arrival to the last end.
    tok_per_s: float
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    # Mean time of an answer's tokens after the first.
    tpot_p50_ms: float
    tpot_p99_ms: float
    # Shares of the requests with an adapter.
    tiers: Mapping[str, float]
    # Time between any two tokens.
    itl_p99_ms: float = NAN
    refused: Mapping[str, int] = field(default_factory=dict)
    loads_from_disk: int = 0
    loads_from_host: int = 0
    evictions: int = 0
    preemptions: int = 0
    steps: int = 0
    busy: float = NAN
    pool_used: float = NAN

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON, with null for NaN."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}


def predicted(done: SimulationResult) -> SimulationStats:
    """Summarise a replay."""
    served = [o for o in done.outcomes if o.refused is None]
    seconds = done.end_s - min((o.request.arrival_s for o in done.outcomes), default=0.0)
    common = _common(
        [o.ttft_s for o in served if o.ttft_s is not None],
        [o.tpot_s for o in served if o.tpot_s is not None],
        [o.timing.tier for o in served],
        sum(o.tokens for o in done.outcomes),
        len(served),
        seconds,
    )
    return SimulationStats(
        **common,
        itl_p99_ms=1e3 * quantile(done.gaps_s, 0.99),
        refused=dict(Counter(o.refused for o in done.outcomes if o.refused is not None)),
        loads_from_disk=done.loads_from_disk,
        loads_from_host=done.loads_from_host,
        evictions=done.evictions,
        preemptions=done.preemptions,
        steps=done.steps,
        busy=done.busy_s / max(seconds, 1e-9),
        pool_used=done.pool_used,
    )


def measured(trace: Sequence[TraceRequest]) -> SimulationStats | None:
    """Summarise the recording server's own measurements; None if the trace has none."""
    known = [r for r in trace if r.ttft_ms is not None and r.total_ms is not None]
    if not known or len(known) < len(trace):
        return None
    ends = [r.arrival_s + (r.total_ms or 0.0) / 1e3 for r in known]
    common = _common(
        [(r.ttft_ms or 0.0) / 1e3 for r in known],
        [_tpot_s(r) for r in known if r.output_tokens > 1],
        [r.tier for r in known],
        sum(r.output_tokens for r in known),
        len(known),
        max(ends) - min(r.arrival_s for r in known),
    )
    return SimulationStats(**common)


def over_time(points: Iterable[tuple[float, float]], windows: int = 40) -> list[tuple[float, float]]:
    """Return (middle, median) for windows of equal length over (time, value) points; empty windows are left out."""
    ordered = sorted(points)
    if not ordered:
        return []
    begin, width = ordered[0][0], max(1e-9, (ordered[-1][0] - ordered[0][0]) / windows)
    by_window = itertools.groupby(ordered, key=lambda point: min(windows - 1, int((point[0] - begin) / width)))
    return [(begin + (number + 0.5) * width, quantile([v for _, v in group], 0.5)) for number, group in by_window]


def ttft_points(outcomes: Iterable[SimulatedRequest]) -> list[tuple[float, float]]:
    """Return (arrival in seconds, TTFT in ms) of the served requests."""
    return [(o.request.arrival_s, 1e3 * o.ttft_s) for o in outcomes if o.ttft_s is not None]


def quantile(values: Iterable[float], q: float) -> float:
    """Return the smallest value that is at least as large as a share `q` of all; NaN without values."""
    given = list(values)
    return float(np.quantile(given, q, method="inverted_cdf")) if given else NAN


def _common(
    ttft_s: list[float],
    tpot_s: list[float],
    tiers: list[AdapterTier | None],
    tokens: int,
    requests: int,
    seconds: float,
) -> dict[str, Any]:
    found = Counter(tier for tier in tiers if tier is not None)
    return {
        "requests": requests,
        "seconds": seconds,
        "tok_per_s": tokens / max(seconds, 1e-9),
        "requests_per_s": requests / max(seconds, 1e-9),
        "ttft_p50_ms": 1e3 * quantile(ttft_s, 0.5),
        "ttft_p99_ms": 1e3 * quantile(ttft_s, 0.99),
        "tpot_p50_ms": 1e3 * quantile(tpot_s, 0.5),
        "tpot_p99_ms": 1e3 * quantile(tpot_s, 0.99),
        "tiers": {tier.value: found[tier] / found.total() for tier in AdapterTier} if found else {},
    }


def _tpot_s(request: TraceRequest) -> float:
    assert request.total_ms is not None
    assert request.ttft_ms is not None
    return (request.total_ms - request.ttft_ms) / 1e3 / (request.output_tokens - 1)
