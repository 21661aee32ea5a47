"""Print the results of `lorasrv plan`: tables, or one JSON value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from api.cli.common.terminal import print_table, say
from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.planner.report import SimulationStats
from lorasrv.offline.planner.sim_replica import SimServer
from lorasrv.offline.planner.sim_traffic import SimulationResult
from lorasrv.offline.planner.what_if import Capacity, WhatIf, best_change


@dataclass(frozen=True)
class Plan:
    """Hold the results of a plan."""

    server: SimServer
    source: str
    trace: Sequence[TraceRequest]
    done: SimulationResult
    # Duration of the first replay.
    wall_s: float
    predicted: SimulationStats
    measured: SimulationStats | None
    capacity: Capacity | None
    limit_was_given: bool
    changes: Sequence[WhatIf]

    @property
    def times_real_time(self) -> float:
        """Return the ratio of simulated time to the replay's duration."""
        return self.predicted.seconds / max(1e-9, self.wall_s)

    @property
    def best(self) -> WhatIf | None:
        return best_change(self.predicted, self.changes, self.server.scheduler.target_itl_ms)

    def ratios(self) -> dict[str, float]:
        """Return predicted divided by measured values, for figures that have both."""
        if self.measured is None:
            return {}
        pairs = {name: (getattr(self.predicted, name), getattr(self.measured, name)) for name in _COMPARED}
        return {name: round(p / m, 3) for name, (p, m) in pairs.items() if m and math.isfinite(p / m)}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {
            "costs": {"source": self.source, **self.server.costs.to_dict()},
            "pool_bytes": self.server.geometry.num_pages * self.server.geometry.block_bytes,
            "predicted": self.predicted.to_dict(),
            "measured": self.measured and self.measured.to_dict(),
            "ratio": self.ratios(),
            "capacity": self.capacity and _capacity(self.capacity),
            "changes": [{"name": c.name, "flags": c.flags, **c.figures.to_dict()} for c in self.changes],
            "best_change": self.best and self.best.name,
            "replay": {"wall_s": round(self.wall_s, 3), "times_real_time": round(self.times_real_time, 1)},
        }


_COMPARED = ("tok_per_s", "requests_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
Show = Callable[[float], str]


def milliseconds(value: float) -> str:
    """Format a time in milliseconds."""
    return "–" if math.isnan(value) else f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def plain(value: float) -> str:
    """Format a number."""
    return "–" if math.isnan(value) else f"{value:,.1f}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.0f} %"


_ROWS: tuple[tuple[str, str, Show], ...] = (
    ("tokens a second", "tok_per_s", plain),
    ("requests a second", "requests_per_s", plain),
    ("TTFT p50", "ttft_p50_ms", milliseconds),
    ("TTFT p99", "ttft_p99_ms", milliseconds),
    ("time per output token p50", "tpot_p50_ms", milliseconds),
    ("time per output token p99", "tpot_p99_ms", milliseconds),
    ("time between tokens p99", "itl_p99_ms", milliseconds),
)


def print_plan(plan: Plan) -> None:
    """Print tables with sentences between them, the same on a terminal and in a file."""
    _print_prediction(plan)
    if plan.capacity is not None:
        _print_capacity(plan, plan.capacity)
    if plan.changes:
        _print_changes(plan)


def _print_prediction(plan: Plan) -> None:
    measured, ratios = plan.measured, plan.ratios()
    rows = []
    for title, name, show in _ROWS:
        cells = [title, show(getattr(plan.predicted, name))]
        if measured is not None:
            ratio = ratios.get(name)
            cells += [show(getattr(measured, name)), "–" if ratio is None else f"{ratio:.2f}"]
        rows.append(cells)
    rows += _count_rows(plan.predicted, measured)
    titles = ["", "predicted", *(["measured", "ratio"] if measured is not None else [])]
    print_table(titles, rows)
    say(
        f"{len(plan.trace)} requests over {plan.predicted.seconds:.1f} s in {plan.predicted.steps} steps, replayed in "
        f"{plan.wall_s:.2f} s ({plan.times_real_time:.0f} times real time); {plan.source}"
    )


def _count_rows(figures: SimulationStats, measured: SimulationStats | None) -> list[list[str]]:
    def cells(title: str, value: str, other: str = "–") -> list[str]:
        return [title, value, *([other, "–"] if measured is not None else [])]

    found = " / ".join(figures.tiers)
    rows = [
        cells(f"adapters found {found}", _shares(figures), _shares(measured)) if figures.tiers else [],
        cells("loads from disk / host", f"{figures.loads_from_disk} / {figures.loads_from_host}"),
        cells("adapters evicted", str(figures.evictions)),
        cells("preemptions", str(figures.preemptions)),
        cells("pool in use while computing", _percent(figures.pool_used)),
        cells("time computing", _percent(figures.busy)),
        *(cells(f"refused: {why}", str(count)) for why, count in figures.refused.items()),
    ]
    return [row for row in rows if row]


def _shares(figures: SimulationStats | None) -> str:
    if figures is None or not figures.tiers:
        return "–"
    return " / ".join(f"{100 * share:.0f}" for share in figures.tiers.values()) + " %"


def _print_capacity(plan: Plan, fit: Capacity) -> None:
    say("")
    rows = [
        [
            str(p.adapters),
            milliseconds(p.figures.ttft_p50_ms),
            milliseconds(p.figures.ttft_p99_ms),
            plain(p.figures.tok_per_s),
        ]
        for p in fit.points
    ]
    print_table(["adapters", "TTFT p50", "TTFT p99", "tok/s"], rows)
    limit = (
        f"{milliseconds(fit.limit_ms)}{'' if plan.limit_was_given else ', twice the present one (set --p99-ttft-ms)'}"
    )
    traffic = f"the same traffic over more adapters (Zipf exponent {fit.exponent:.2f}, as in the trace)"
    if fit.fits is None:
        say(f"Not even one adapter keeps the p99 TTFT within {limit}: the request rate is too high.")
    elif fit.is_bound:
        say(f"{fit.fits} adapters fit: {traffic} keeps the p99 TTFT within {limit}.")
    else:
        say(f"At least {fit.fits} adapters fit, as many as requests: {traffic} keeps the p99 TTFT within {limit}.")


def _print_changes(plan: Plan) -> None:
    say("")
    now = plan.predicted
    rows = [["as it is", *_change_cells(now)], *([c.name, *_change_cells(c.figures)] for c in plan.changes)]
    print_table(["change", "TTFT p99", "TTFT p50", "TPOT p99", "tok/s", "refused"], rows)
    best = plan.best
    if best is None:
        say("No single change lowers the p99 TTFT by more than 5 % without costing as much elsewhere.")
        return
    saved = 1 - best.figures.ttft_p99_ms / now.ttft_p99_ms
    say(f"Best single change: {best.name} ({best.flags}), {100 * saved:.0f} % less p99 TTFT.")


def _change_cells(figures: SimulationStats) -> list[str]:
    return [
        milliseconds(figures.ttft_p99_ms),
        milliseconds(figures.ttft_p50_ms),
        milliseconds(figures.tpot_p99_ms),
        plain(figures.tok_per_s),
        str(figures.num_refused),
    ]


def _capacity(fit: Capacity) -> dict[str, Any]:
    return {
        "adapters": fit.fits,
        "is_bound": fit.is_bound,
        "p99_ttft_ms_limit": fit.limit_ms,
        "zipf_exponent": fit.exponent,
        "points": [{"adapters": p.adapters, **p.figures.to_dict()} for p in fit.points],
    }
