"""Summarise a load as one line of JSON: throughput, latencies, goodput, failures."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from api.cli.bench.client import RequestOutcome
from api.cli.bench.load import Load
from api.cli.bench.roofline import MachineRates, Work, mbu, mfu

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Spread:
    """Hold quantiles of a latency in ms; None without values. A quantile is the smallest value that is at least as
    large as that share of all values.
    """

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        given = list(values)
        if not given:
            return cls(**dict.fromkeys(QUANTILES))
        return cls(*np.quantile(given, list(QUANTILES.values()), method="inverted_cdf").tolist())


@dataclass(frozen=True, slots=True)
class LoadStats:
    """Hold the figures of the completely answered requests; failed ones are only counted."""

    requests: int
    failed: int
    failures: Mapping[str, int]
    first_error: str | None
    # Number of distinct adapters in the requests.
    adapters: int
    # Seconds from the first request sent to the end of the last; rates refer to it.
    wall_s: float
    requests_per_s: float
    output_tok_per_s: float
    total_tok_per_s: float
    prompt_tokens_mean: float
    output_tokens_mean: float
    cached_tokens: int
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    # Requests within all SLO bounds, per second and as a share of all, failed ones included.
    goodput_per_s: float | None = None
    good_share: float | None = None
    # Shares of the machine's rates; None if an input is unknown.
    mbu: float | None = None
    mfu: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON data, rounded to their precision."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        more = rounded.pop("more")
        return {**rounded, **more}


def figures(
    load: Load, slo: Mapping[str, float], work: Work | None = None, rates: MachineRates | None = None, **more: Any
) -> LoadStats:
    """Summarise a load that has ended or was interrupted."""
    good = [outcome for outcome in load.outcomes if outcome.failure is None]
    bad = [outcome for outcome in load.outcomes if outcome.failure is not None]
    wall_s = load.wall_s
    tpot = Spread.of(outcome.tpot_ms for outcome in good if outcome.tpot_ms is not None)
    kept = sum(keeps(outcome, slo) for outcome in good) if slo else None
    return LoadStats(
        requests=len(load.outcomes),
        failed=len(bad),
        failures=dict(Counter(str(outcome.failure) for outcome in bad)),
        first_error=f"{bad[0].failure}: {bad[0].detail}" if bad else None,
        adapters=len({outcome.model for outcome in load.outcomes if outcome.has_adapter}),
        wall_s=wall_s,
        requests_per_s=_ratio(len(good), wall_s),
        output_tok_per_s=_ratio(sum(o.output_tokens for o in good), wall_s),
        total_tok_per_s=_ratio(sum(o.prompt_tokens + o.output_tokens for o in good), wall_s),
        prompt_tokens_mean=_ratio(sum(o.prompt_tokens for o in good), len(good)),
        output_tokens_mean=_ratio(sum(o.output_tokens for o in good), len(good)),
        cached_tokens=sum(o.cached_tokens for o in good),
        ttft_ms=Spread.of(o.ttft_ms for o in good),
        tpot_ms=tpot,
        itl_ms=Spread.of(gap for o in good for gap in o.gaps_ms),
        e2e_ms=Spread.of(o.e2e_ms for o in good),
        goodput_per_s=None if kept is None else _ratio(kept, wall_s),
        good_share=None if kept is None else _ratio(kept, len(load.outcomes)),
        mbu=mbu(good, tpot.p50, work, rates) if work and rates else None,
        mfu=mfu(good, wall_s, work, rates) if work and rates else None,
        more=more,
    )


def keeps(outcome: RequestOutcome, slo: Mapping[str, float]) -> bool:
    """Return whether a request met all SLO bounds (ms), as in DistServe's goodput. For one token, TPOT counts as 0."""
    if outcome.failure is not None:
        return False
    had = {"ttft": outcome.ttft_ms, "tpot": outcome.tpot_ms or 0.0, "e2e": outcome.e2e_ms}
    return all(had[name] <= bound for name, bound in slo.items())


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else 0.0


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


FORMAT = 1
Result = dict[str, Any]
"""Keys: bench (the format), label, time, settings, server, machine, client, commit, command, figures, interrupted."""


def result(label: str, figures: LoadStats, interrupted: bool, **surroundings: Any) -> Result:
    """Build the line of a load point. `surroundings`: settings, server, machine, client, commit, command, time."""
    return {
        "bench": FORMAT,
        "label": label,
        **surroundings,
        "figures": figures.to_dict(),
        **({"interrupted": True} if interrupted else {}),
    }
