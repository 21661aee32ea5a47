"""Plan for several machines behind a router: compare placements, failures, and separate prefill and decode."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.common.terminal import CliError, ExitCode

if TYPE_CHECKING:
    from lorasrv.metrics.trace import TraceRequest
    from lorasrv.offline.cluster.options import ClusterOptions, MachineChange
    from lorasrv.offline.cluster.report import ClusterStats
    from lorasrv.offline.cluster.roles import RolesPlan
    from lorasrv.offline.planner.sim_replica import SimServer

_PANEL = "Several machines"
_CHANGE = re.compile(r"(m\d{1,6})@(\d{1,9}(?:\.\d{1,6})?)")
GBPS = 1e9 / 8
Step = Callable[[str, float, float], None]


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text.replace("[", r"\["), rich_help_panel=_PANEL, show_default=False)


@dataclass(frozen=True)
class MachineOptions:
    """Define the options for several machines."""

    machines: Annotated[int | None, _option("Number of machines, as --costs and the server's options have one.")] = None
    placement: Annotated[
        str | None,
        _option("How a router chooses: bounded, least, random, hash, p2c, holders or migrate. [default: bounded]"),
    ] = None
    compare: Annotated[bool, _option("Replay once for each placement.", "--compare")] = False
    routers: Annotated[int | None, _option("Routers that know of each other by reports only. [default: 1]")] = None
    report_s: Annotated[
        float | None, _option("Seconds between two reports of a machine to the routers. [default: 0.5]")
    ] = None
    fail: Annotated[list[str] | None, _option("Machine that fails, and when: m0@12.5 (seconds). Repeatable.")] = None
    join: Annotated[list[str] | None, _option("Machine that joins, and when: m16@20. Repeatable.")] = None
    storage_bytes_per_s: Annotated[
        str | None,
        _option("Bandwidth of one storage that all read adapters from: 2GB. [default: each has a disk of its own]"),
    ] = None
    role: Annotated[
        bool, _option("Say whether it pays that some machines compute prompts for the others.", "--role")
    ] = False
    transfer_gbps: Annotated[
        float | None, _option("Bandwidth of a machine's link for pages of prompts, in Gb/s. [default: 10]")
    ] = None
    slo: Annotated[str | None, _option("Bounds in ms that requests should keep: ttft=1000,tpot=100 (also e2e).")] = None

    def bounds_ms(self) -> dict[str, float]:
        """Return the SLO bounds in milliseconds by name.

        Raises:
            CliError: the bounds are malformed, or missing with `--role`.
        """
        from api.cli.bench.workload import InvalidOption, service_bounds

        try:
            bounds = {} if self.slo is None else service_bounds(self.slo)
        except InvalidOption as error:
            raise CliError(str(error), code=ExitCode.USAGE) from None
        if self.role and not {"ttft", "tpot"} <= bounds.keys():
            raise CliError("--role needs --slo with ttft and tpot, as ttft=1000,tpot=50", code=ExitCode.USAGE)
        return bounds

    def cluster(self, seed: int) -> "ClusterOptions | None":
        """Return the cluster's options; None for a single server.

        Raises:
            CliError, ConfigError: an option is wrong, or needs another.
        """
        from lorasrv.offline.cluster.options import ClusterOptions
        from lorasrv.placement.kinds import make_placement

        given = {
            name: value for name, value in vars(self).items() if not (value is None or value is False or value == [])
        }
        if self.machines is None:
            for name in given:
                raise CliError(f"--{name.replace('_', '-')} needs --machines", code=ExitCode.USAGE)
            return None
        self._check_pairs()
        make_placement(self.placement or "bounded")
        known: dict[str, Any] = {name: given[name] for name in ("placement", "routers", "report_s") if name in given}
        if self.storage_bytes_per_s is not None:
            known["storage_bytes_per_s"] = _amount("--storage-bytes-per-s", self.storage_bytes_per_s)
        if self.transfer_gbps is not None:
            if not 0 < self.transfer_gbps < float("inf"):
                raise CliError(f"--transfer-gbps must be positive, not {self.transfer_gbps}", code=ExitCode.USAGE)
            known["transfer_bytes_per_s"] = self.transfer_gbps * GBPS
        return ClusterOptions(self.machines, **known, changes=self._changes(), seed=seed)

    def _check_pairs(self) -> None:
        pairs = [
            (self.compare and self.placement is not None, "--compare and --placement exclude each other"),
            (self.compare and self.role, "--compare and --role exclude each other"),
            (self.transfer_gbps is not None and not self.role, "--transfer-gbps needs --role"),
            (self.role and self.machines == 1, "--role needs two --machines at least"),
        ]
        for is_wrong, message in pairs:
            if is_wrong:
                raise CliError(message, code=ExitCode.USAGE)

    def _changes(self) -> "list[MachineChange]":
        from lorasrv.offline.cluster.options import ChangeKind, MachineChange

        changes = []
        for kind, texts in ((ChangeKind.FAIL, self.fail), (ChangeKind.JOIN, self.join)):
            for text in texts or []:
                found = _CHANGE.fullmatch(text)
                if found is None:
                    raise CliError(
                        f"--{kind.value} {text!r}: write a machine and seconds, as m0@12.5", code=ExitCode.USAGE
                    )
                changes.append(MachineChange(float(found[2]), kind, found[1]))
        return changes


def _amount(option: str, text: str) -> float:
    from api.cli.bench.workload import InvalidOption, amount

    try:
        return amount(option, text)
    except InvalidOption as error:
        raise CliError(str(error), code=ExitCode.USAGE) from None


@dataclass(frozen=True)
class ClusterPlan:
    """Hold the results for several machines."""

    server: "SimServer"
    source: str
    traffic: Mapping[str, Any]
    requests: int
    options: "ClusterOptions"
    bounds_ms: Mapping[str, float]
    # Statistics of each replayed placement.
    placements: Sequence["ClusterStats"]
    roles: "RolesPlan | None"
    # Duration of all replays.
    wall_s: float


def plan_machines(
    server: "SimServer",
    source: str,
    trace: Sequence["TraceRequest"],
    traffic: Mapping[str, Any],
    options: "ClusterOptions",
    asked: MachineOptions,
    step: Step,
) -> ClusterPlan:
    """Replay the traffic on the machines, once per requested placement or split of roles."""
    from lorasrv.offline.cluster.report import cluster_stats
    from lorasrv.offline.cluster.roles import plan_roles
    from lorasrv.offline.cluster.sim_cluster import replay_on
    from lorasrv.placement.kinds import PLACEMENTS

    begun, bounds_ms = time.perf_counter(), asked.bounds_ms()
    done, roles = [], None
    if asked.role:
        roles = plan_roles(server, trace, options, bounds_ms, lambda what: step(what, 1.0, 1.0))
    for name in () if asked.role else PLACEMENTS if asked.compare else (options.placement,):
        what = f"replaying, placement {name}"
        its = replace(options, placement=name)
        result = replay_on(server, trace, its, partial(_show_progress, step, what))
        step(what, 1.0, 1.0)
        done.append(cluster_stats(name, result, bounds_ms))
    wall_s = time.perf_counter() - begun
    return ClusterPlan(server, source, traffic, len(trace), options, bounds_ms, done, roles, wall_s)


def _show_progress(step: Step, what: str, share: float) -> None:
    step(what, share, 1.0)
