"""Summarise a replay on several machines in a few figures. Torch-free."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lorasrv.offline.cluster.sim_cluster import ClusterResult
from lorasrv.offline.planner.report import quantile
from lorasrv.offline.planner.sim_traffic import SimulatedRequest


@dataclass(frozen=True)
class ClusterStats:
    """Hold the figures; NaN where unknown."""

    placement: str
    # Requests that were served, and seconds from the first arrival to the last end.
    requests: int
    seconds: float
    tok_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    loads_from_disk: int
    loads_from_host: int
    # Share of all requests that were served within the bounds.
    within: float
    # Requests of the machine that got most, divided by the mean; and the same for computing time.
    busiest_requests: float
    busiest_time: float
    refused: Mapping[str, int]
    # Requests that were sent again because their machine failed, and that their router moved.
    resent: int
    moved: int
    # Prompts that one machine computed for another, and bytes of their pages.
    handed_over: int
    handed_over_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON, with null for NaN."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}


def cluster_stats(placement: str, done: ClusterResult, bounds_ms: Mapping[str, float]) -> ClusterStats:
    """Summarise a replay; `bounds_ms` may have bounds of `ttft`, `tpot` and `e2e`."""
    served = [o for o in done.outcomes if o.refused is None]
    seconds = done.end_s - min((o.request.arrival_s for o in done.outcomes), default=0.0)
    ttft_s = [o.ttft_s for o in served if o.ttft_s is not None]
    tpot_s = [o.tpot_s for o in served if o.tpot_s is not None]
    return ClusterStats(
        placement=placement,
        requests=len(served),
        seconds=seconds,
        tok_per_s=sum(o.tokens for o in served) / max(seconds, 1e-9),
        ttft_p50_ms=1e3 * quantile(ttft_s, 0.5),
        ttft_p95_ms=1e3 * quantile(ttft_s, 0.95),
        ttft_p99_ms=1e3 * quantile(ttft_s, 0.99),
        tpot_p50_ms=1e3 * quantile(tpot_s, 0.5),
        tpot_p99_ms=1e3 * quantile(tpot_s, 0.99),
        loads_from_disk=sum(machine.loads_from_disk for machine in done.machines),
        loads_from_host=sum(machine.loads_from_host for machine in done.machines),
        within=sum(_is_within(o, bounds_ms) for o in served) / max(1, len(done.outcomes)),
        busiest_requests=_busiest([len(machine.outcomes) for machine in done.machines]),
        busiest_time=_busiest([machine.busy_s for machine in done.machines]),
        refused=dict(Counter(o.refused for o in done.outcomes if o.refused is not None)),
        **asdict(done.counters),
    )


def _is_within(outcome: SimulatedRequest, bounds_ms: Mapping[str, float]) -> bool:
    ended_s = None if outcome.end_s is None else outcome.end_s - outcome.request.arrival_s
    times = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": ended_s}
    return all(1e3 * (times[name] or 0.0) <= bound for name, bound in bounds_ms.items())


def _busiest(amounts: list[float] | list[int]) -> float:
    mean = sum(amounts) / max(1, len(amounts))
    return max(amounts) / mean if mean else math.nan
