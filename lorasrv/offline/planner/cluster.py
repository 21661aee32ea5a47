"""Replay a trace on several simulated servers, placed by the objects that a router runs (`lorasrv.placement`).

Each server is the one of `sim_replica.py`, with the real scheduler, and has its own disk. Requests arrive at routers in
turn. A router knows at once what it sent and what of that has ended, and by reports, every `report_s`, what the
others sent. A request that a server refuses is tried on the next of its rank, once.

Machines may fail and join. The requests of a failed one go to the others if they have no token yet, and are lost if
they have: a stream is not taken up elsewhere. Routers know of both at once. Torch-free.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from lorasrv.errors import ConfigError, NoReplicaReady
from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.planner.sim_replica import SimReplica, SimServer
from lorasrv.offline.planner.sim_traffic import SimTraffic, SimulatedRequest, SimulationResult
from lorasrv.offline.planner.simulator import TELL_EVERY, Progress
from lorasrv.placement.kinds import make_placement
from lorasrv.placement.placement import Ask, Placement, Replica, ReplicaReport, Sent
from lorasrv.placement.work import WorkEstimator, WorkRates

TRIES = 2
"""Servers that are asked for a place before a request is refused."""
MAX_LOSSES = 2
"""Failures of machines after which a request is not sent again."""
LOST, NO_REPLICA = "replica lost", "no replica ready"


class ChangeKind(Enum):
    """Name what happens to a machine."""

    FAIL = "fail"
    JOIN = "join"


@dataclass(frozen=True, slots=True)
class MachineChange:
    """Let a machine fail, or join with empty memory."""

    at_s: float
    kind: ChangeKind
    machine: str


@dataclass(frozen=True)
class ClusterOptions:
    """Describe a cluster of equal machines.

    Raises:
        ConfigError: a value is out of range; names it.
    """

    machines: int
    placement: str = "bounded"
    routers: int = 1
    # Time between two reports of a machine to the routers.
    report_s: float = 0.25
    changes: Sequence[MachineChange] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("machines", "routers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 < self.report_s < math.inf:
            raise ConfigError(f"report_s must be positive, not {self.report_s}")
        there = {machine_name(number) for number in range(self.machines)}
        for change in sorted(self.changes, key=lambda change: change.at_s):
            if (change.machine in there) is (change.kind is ChangeKind.JOIN):
                is_there = "is there already" if change.machine in there else "is not there"
                raise ConfigError(f"{change.kind.value} of {change.machine} at {change.at_s:g} s: it {is_there}")
            there ^= {change.machine}


@dataclass(frozen=True)
class ClusterResult:
    """Hold the counts of a replay on several machines."""

    outcomes: Sequence[SimulatedRequest]
    # Every machine that there was, in the order in which they began.
    machines: Sequence[SimulationResult]
    # Requests that were sent again because their machine failed.
    resent: int

    @property
    def end_s(self) -> float:
        return max((o.end_s or 0.0 for o in self.outcomes), default=0.0)


@dataclass(eq=False)
class _Router:
    placement: Placement
    work: WorkEstimator


@dataclass(eq=False)
class _Machine:
    """A server, what it was given, and what of that has not ended."""

    name: str
    # Its place among all machines that there were.
    number: int
    replica: SimReplica
    given: list[SimulatedRequest] = field(default_factory=list)
    sent: dict[int, tuple[_Router, Sent]] = field(default_factory=dict)
    # Microseconds of work that have not ended, by router.
    work_us: Counter[int] = field(default_factory=Counter)
    # Number of its newest entry in the heap of times; older entries are void.
    entry: int = 0
    is_gone: bool = False


class SimCluster:
    """Replay one trace; call `run` once."""

    def __init__(self, server: SimServer, trace: Sequence[TraceRequest], options: ClusterOptions) -> None:
        self._server, self._options = server, options
        self._traffic = SimTraffic(trace, server.layout_of)
        self._outcomes = self._traffic.outcomes()
        rates = WorkRates.of_steps(server.costs.step)
        self._routers = [
            _Router(make_placement(options.placement, (), options.seed + number), WorkEstimator(rates))
            for number in range(options.routers)
        ]
        self._machines: dict[str, _Machine] = {}
        self._all: list[_Machine] = []
        self._heap: list[tuple[float, int, int, _Machine]] = []
        self._changes = sorted(options.changes, key=lambda change: change.at_s)
        self._losses = Counter[int]()
        self._next = self._next_change = self._num_sent = 0
        self._report_at_s = 0.0
        self._join([machine_name(number) for number in range(options.machines)], 0.0)

    def run(self, progress: Progress = lambda _: None) -> ClusterResult:
        """Simulate until the last request has ended."""
        while self._next < len(self._outcomes) or self._num_sent:
            change_s, arrival_s, round_s = self._change_s(), self._arrival_s(), self._round_s()
            now = min(change_s, arrival_s, round_s)
            assert now < math.inf, "requests wait, but there is no event"
            self._report(now)
            if change_s == now:
                self._change(self._changes[self._next_change])
                self._next_change += 1
            elif arrival_s == now:
                self._route(self._outcomes[self._next], now)
                self._next += 1
                if self._next % TELL_EVERY == 0:
                    progress(self._next / len(self._outcomes))
            else:
                self._round(heapq.heappop(self._heap)[-1])
        for machine in self._machines.values():
            machine.replica.check_integrity()
        results = [machine.replica.result(machine.given) for machine in self._all]
        return ClusterResult(self._outcomes, results, self._losses.total())

    # Time.

    def _arrival_s(self) -> float:
        if self._next == len(self._outcomes):
            return math.inf
        return self._outcomes[self._next].request.arrival_s + self._server.costs.edge_s

    def _change_s(self) -> float:
        return self._changes[self._next_change].at_s if self._next_change < len(self._changes) else math.inf

    def _round_s(self) -> float:
        """Return when the next round of any machine is due, which is then the first of the heap."""
        while self._heap and (self._heap[0][-1].is_gone or self._heap[0][2] != self._heap[0][-1].entry):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def _due(self, machine: _Machine) -> None:
        """Enter when a machine's next round is due."""
        machine.entry += 1
        if machine.replica.next_s < math.inf:
            heapq.heappush(self._heap, (machine.replica.next_s, machine.number, machine.entry, machine))

    # Requests.

    def _route(self, outcome: SimulatedRequest, now: float) -> None:
        """Give a request to the first machine of its rank that takes it."""
        number = outcome.number % len(self._routers)
        router, request = self._routers[number], outcome.request
        ask = Ask(request.adapter, router.work.work_s(request.adapter, request.prompt_tokens))
        try:
            ranked = router.placement.rank(ask)
        except NoReplicaReady:
            outcome.refused, outcome.end_s = NO_REPLICA, now
            return
        for name in ranked[:TRIES]:
            machine = self._machines[name]
            machine.given.append(outcome)
            outcome.refused = machine.replica.give(outcome, now)
            if outcome.refused is None:
                sent = router.placement.sent(name, ask)
                machine.sent[outcome.number] = (router, sent)
                machine.work_us[number] += sent.work_us
                self._num_sent += 1
            self._due(machine)
            if outcome.refused is None:
                return
        outcome.end_s = now

    def _round(self, machine: _Machine) -> None:
        for outcome in machine.replica.round():
            self._forget(machine, outcome)
            router = self._routers[outcome.number % len(self._routers)]
            router.work.observe(outcome.request.adapter, outcome.tokens)
        self._due(machine)

    def _forget(self, machine: _Machine, outcome: SimulatedRequest) -> None:
        """Take a request off the accounts of its router and its machine."""
        router, sent = machine.sent.pop(outcome.number)
        router.placement.ended(sent)
        machine.work_us[outcome.number % len(self._routers)] -= sent.work_us
        self._num_sent -= 1

    def _report(self, now: float) -> None:
        """Tell the routers of the machines, once a period."""
        if now < self._report_at_s:
            return
        self._report_at_s = (math.floor(now / self._options.report_s) + 1) * self._options.report_s
        for machine in self._machines.values():
            adapters, total_us = machine.replica.resident(), machine.work_us.total()
            for number, router in enumerate(self._routers):
                others_s = (total_us - machine.work_us[number]) / 1e6
                router.placement.told(machine.name, ReplicaReport(others_s, adapters))

    # Machines.

    def _change(self, change: MachineChange) -> None:
        if change.kind is ChangeKind.JOIN:
            self._join([change.machine], change.at_s)
        else:
            self._fail(change.machine, change.at_s)

    def _join(self, names: Iterable[str], now: float) -> None:
        for name in names:
            machine = _Machine(name, len(self._all), SimReplica(self._server, self._traffic, now))
            self._machines[name] = machine
            self._all.append(machine)
            self._due(machine)
        self._tell_routers()

    def _fail(self, name: str, now: float) -> None:
        machine = self._machines.pop(name)
        machine.is_gone = True
        self._tell_routers()
        for outcome in machine.replica.live():
            self._forget(machine, outcome)
            if outcome.tokens or self._losses[outcome.number] == MAX_LOSSES:
                outcome.refused, outcome.end_s = LOST, now
            else:
                self._losses[outcome.number] += 1
                self._route(outcome, now)

    def _tell_routers(self) -> None:
        for router in self._routers:
            router.placement.set_replicas(Replica(name) for name in self._machines)


def machine_name(number: int) -> str:
    """Return the name of a machine, from 0 on."""
    return f"m{number}"


def replay_on(
    server: SimServer, trace: Sequence[TraceRequest], options: ClusterOptions, progress: Progress = lambda _: None
) -> ClusterResult:
    """Simulate this traffic on machines that start with empty memory."""
    return SimCluster(server, trace, options).run(progress)
