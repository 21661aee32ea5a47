"""Decide whether separate prefill and decode machines pay off (DistServe, OSDI 2024).

The number of requests within their bounds decides. Machines that do both are tried unchanged, and with the time between
tokens bounded by the requested TPOT and somewhat less, which lets prompts and answers share a machine (chunked
prefill). Torch-free.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.cluster.options import ClusterOptions
from lorasrv.offline.cluster.report import ClusterStats, cluster_stats
from lorasrv.offline.cluster.sim_cluster import replay_on
from lorasrv.offline.planner.sim_replica import SimServer
from lorasrv.placement.work import WorkRates

WORTH_IT = 0.01
"""Smallest additional share of all requests within their bounds for which roles pay off."""
ITL_SHARES = (1.0, 0.7)
"""Bounds of the time between tokens that are tried, as shares of the requested TPOT."""
Tell = Callable[[str], None]
"""Called with a description of the next replay."""


@dataclass(frozen=True)
class RolesTrial:
    """Hold the figures of machines with roles."""

    # Machines that compute prompts; 0: all do both.
    prefill: int
    decode: int
    # Bound of the time between tokens in this replay; None: as on the server.
    target_itl_ms: float | None
    figures: ClusterStats


@dataclass(frozen=True)
class RolesPlan:
    """Hold the results of all trials."""

    both: Sequence[RolesTrial]
    apart: Sequence[RolesTrial]

    @property
    def best_both(self) -> RolesTrial:
        return max(self.both, key=_merit)

    @property
    def best_apart(self) -> RolesTrial:
        return max(self.apart, key=_merit)

    @property
    def pays(self) -> bool:
        """Return whether more requests are within their bounds on machines with roles."""
        return self.best_apart.figures.within >= self.best_both.figures.within + WORTH_IT


def plan_roles(
    server: SimServer,
    trace: Sequence[TraceRequest],
    options: ClusterOptions,
    bounds_ms: Mapping[str, float],
    tell: Tell = lambda _: None,
) -> RolesPlan:
    """Replay a trace on machines that do both, and on as many machines with roles, at the best ratio that is found.

    Args:
        options: at least two machines, none with a role.
        bounds_ms: bounds of `ttft`, `tpot` and, if set, `e2e`.
    """

    def tried(prefill: int, target_itl_ms: float | None = None) -> RolesTrial:
        tell(f"{prefill} of {options.machines} machines for prompts")
        its = server
        if target_itl_ms is not None:
            its = replace(server, scheduler=replace(server.scheduler, target_itl_ms=target_itl_ms))
        done = replay_on(its, trace, replace(options, prefill=prefill))
        figures = cluster_stats(options.placement, done, bounds_ms)
        return RolesTrial(prefill, options.machines - prefill, target_itl_ms, figures)

    both = [tried(0), *(tried(0, share * bounds_ms["tpot"]) for share in ITL_SHARES)]
    apart = {}
    at = prefill_share(server, trace, options.machines)
    for step in (-1, 1):
        # Start at the ratio of the work, and continue while the result improves.
        number, best = at, None
        while 0 < number < options.machines:
            if number not in apart:
                apart[number] = tried(number)
            if best is not None and _merit(apart[number]) <= _merit(best):
                break
            best, number = apart[number], number + step
    return RolesPlan(both, [apart[number] for number in sorted(apart)])


def prefill_share(server: SimServer, trace: Sequence[TraceRequest], machines: int) -> int:
    """Return how many of the machines the prompts' work would occupy, at least one and not all."""
    rates = WorkRates.of_steps(server.costs.step)
    prompts = rates.prompt_token_s * sum(request.prompt_tokens for request in trace)
    answers = rates.answer_token_s * sum(request.output_tokens for request in trace)
    return max(1, min(machines - 1, round(machines * prompts / max(1e-12, prompts + answers))))


def _merit(trial: RolesTrial) -> tuple[float, float]:
    return trial.figures.within, -trial.figures.ttft_p99_ms
