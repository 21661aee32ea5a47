"""Print the results of `lorasrv plan --machines`: tables with sentences, or one JSON value."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from api.cli.common.terminal import print_table, say
from api.cli.plan.machines import GBPS, ClusterPlan
from api.cli.plan.report import milliseconds, plain

if TYPE_CHECKING:
    from lorasrv.offline.cluster.report import ClusterStats
    from lorasrv.offline.cluster.roles import RolesPlan, RolesTrial

_COLUMNS: tuple[tuple[str, Callable[["ClusterStats"], str]], ...] = (
    ("TTFT p50", lambda figures: milliseconds(figures.ttft_p50_ms)),
    ("p95", lambda figures: milliseconds(figures.ttft_p95_ms)),
    ("p99", lambda figures: milliseconds(figures.ttft_p99_ms)),
    ("TPOT p99", lambda figures: milliseconds(figures.tpot_p99_ms)),
    ("within", lambda figures: f"{100 * figures.within:.1f} %"),
    ("tok/s", lambda figures: plain(figures.tok_per_s)),
    ("loads", lambda figures: f"{figures.loads_from_disk:,}"),
    ("busiest / mean", lambda figures: plain(figures.busiest_requests)),
    ("refused", lambda figures: f"{sum(figures.refused.values()):,}"),
)
_COUNTS = (
    ("resent", "requests were sent again because their machine failed"),
    ("moved", "requests were moved before they began"),
)


def to_dict(plan: ClusterPlan) -> dict[str, Any]:
    """Return the plan as JSON data."""
    return {
        "costs": {"source": plan.source, **plan.server.costs.to_dict()},
        "pool_bytes": plan.server.geometry.num_pages * plan.server.geometry.block_bytes,
        "traffic": {**plan.traffic, "requests": plan.requests},
        "cluster": _cluster(plan),
        "slo_ms": plan.bounds_ms,
        "placements": [figures.to_dict() for figures in plan.placements],
        "roles": plan.roles and _roles(plan.roles),
        "replay": {"wall_s": round(plan.wall_s, 3)},
    }


def print_machines(plan: ClusterPlan) -> None:
    """Print tables with sentences between them, the same on a terminal and in a file."""
    say(f"{plan.requests:,} requests on {plan.options.machines} machines; {plan.source}")
    if plan.roles is not None:
        _print_roles(plan, plan.roles)
        return
    titles = [title for title, _ in _COLUMNS]
    rows = [[figures.placement, *(show(figures) for _, show in _COLUMNS)] for figures in plan.placements]
    print_table(["placement", *titles], rows)
    for figures in plan.placements:
        for why, count in figures.refused.items():
            say(f"{figures.placement}: {count:,} requests were refused: {why}")
        for name, words in _COUNTS:
            if count := getattr(figures, name):
                say(f"{figures.placement}: {count:,} {words}")
    say(f"{_bounds(plan)}replayed in {plan.wall_s:.0f} s")


def _bounds(plan: ClusterPlan) -> str:
    spelled = ", ".join(f"{name} {bound:g} ms" for name, bound in plan.bounds_ms.items())
    return f"within: requests that were served with {spelled}; " if spelled else "within: requests that were served; "


def _print_roles(plan: ClusterPlan, roles: "RolesPlan") -> None:
    titles = [title for title, _ in _COLUMNS]
    trials = [*roles.both, *roles.apart]
    rows = [[_name(trial), *(show(trial.figures) for _, show in _COLUMNS), _handed(trial)] for trial in trials]
    print_table(["machines", *titles, "pages handed over"], rows)
    apart, both = roles.best_apart, roles.best_both
    shares = f"{100 * apart.figures.within:.1f} % of the requests keep their bounds, {_name(both)} "
    shares += f"{100 * both.figures.within:.1f} %"
    if roles.pays:
        say(f"Apart pays: with {_name(apart)} {shares}.")
    else:
        say(f"Apart does not pay: with {_name(apart)}, the best split, {shares}. Leave all machines as `both`.")
    gbps = plan.options.transfer_bytes_per_s / GBPS
    say(f"{_bounds(plan)}pages go over links of {gbps:g} Gb/s; replayed in {plan.wall_s:.0f} s")


def _name(trial: "RolesTrial") -> str:
    if trial.prefill:
        return f"{trial.prefill} prefill + {trial.decode} decode"
    bound = "" if trial.target_itl_ms is None else f" (--target-itl-ms {trial.target_itl_ms:g})"
    return f"{trial.decode} both{bound}"


def _handed(trial: "RolesTrial") -> str:
    return f"{trial.figures.handed_over_bytes / 1e9:,.1f} GB" if trial.prefill else "–"


def _roles(roles: "RolesPlan") -> dict[str, Any]:
    return {
        "pays": roles.pays,
        "best_prefill": roles.best_apart.prefill,
        "both": _trials(roles.both),
        "apart": _trials(roles.apart),
    }


def _trials(trials: Sequence["RolesTrial"]) -> list[dict[str, Any]]:
    return [
        {"prefill": t.prefill, "decode": t.decode, "target_itl_ms": t.target_itl_ms, **t.figures.to_dict()}
        for t in trials
    ]


def _cluster(plan: ClusterPlan) -> dict[str, Any]:
    facts = asdict(plan.options)
    changes = [{"at_s": c.at_s, "kind": c.kind.value, "machine": c.machine} for c in plan.options.changes]
    return {**facts, "changes": changes}
