"""Replay a trace on several simulated servers, placed by the objects that a router runs (`lorasrv.placement`).

Each server is that of `sim_replica.py`, with the real scheduler. Requests arrive at the routers in turn. A router knows
at once which requests it sent and which of them are over; it learns the work of other routers from reports every
`report_s`, and may then move requests that have no token yet. A request that a server refuses is tried once more, on
the next server of its rank.

Machines may fail and join; routers know at once. The requests of a failed machine go to the others if they have no
token yet; otherwise they are lost, because a stream is not resumed elsewhere.

Machines that compute prompts for others (`prefill`) send the full pages of each prompt; the last page, or at least one
token, is computed where the answer is. Both links are busy while pages are sent, one prompt after another. Pages that
do not arrive, because that machine failed, refused or has no room, are computed where the answer is. Torch-free.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lorasrv.engine.replica_load import ReplicaLoad
from lorasrv.errors import NoReplicaReady
from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.cluster.machine import Place, Router, SimMachine
from lorasrv.offline.cluster.options import ChangeKind, ClusterOptions, MachineChange, machine_name
from lorasrv.offline.cluster.shared_storage import SharedStorage
from lorasrv.offline.planner.sim_replica import SimReplica, SimServer
from lorasrv.offline.planner.sim_traffic import SimTraffic, SimulatedRequest, SimulationResult, key_of
from lorasrv.offline.planner.simulator import TELL_EVERY, Progress
from lorasrv.placement.kinds import make_placement
from lorasrv.placement.placement import Demand, Placement, Replica, ReplicaReport
from lorasrv.placement.prefill import is_worth_asking
from lorasrv.placement.work import WorkEstimator, WorkRates

TRIES = 2
"""Number of servers that are tried before a request is refused."""
MAX_LOSSES = 2
"""Failures of machines after which a request is not sent again."""
LOST, NO_REPLICA = "replica lost", "no replica ready"


@dataclass(slots=True)
class ClusterCounters:
    """Count what happens between machines."""

    # Requests that were sent again because their machine failed, and that were moved by their router.
    resent: int = 0
    moved: int = 0
    # Prompts that one machine computed for another, and bytes of their pages that were sent.
    handed_over: int = 0
    handed_over_bytes: int = 0


@dataclass(frozen=True)
class ClusterResult:
    """Hold the counts of a replay on several machines."""

    outcomes: Sequence[SimulatedRequest]
    # Every machine that ever existed, in the order of their starts.
    machines: Sequence[SimulationResult]
    counters: ClusterCounters

    @property
    def end_s(self) -> float:
        return max((o.end_s or 0.0 for o in self.outcomes), default=0.0)


class SimCluster:
    """Replay one trace; call `run` once."""

    def __init__(self, server: SimServer, trace: Sequence[TraceRequest], options: ClusterOptions) -> None:
        self._server, self._options = server, options
        self._traffic = SimTraffic(trace, server.layout_of)
        self._outcomes = self._traffic.outcomes()
        self._routers = [self._router(number) for number in range(options.routers)]
        self._storage = None if options.storage_bytes_per_s is None else SharedStorage(options.storage_bytes_per_s)
        self._machines: dict[str, SimMachine] = {}
        self._all: list[SimMachine] = []
        self._rounds: list[tuple[float, int, int, SimMachine]] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._losses = Counter[int]()
        self._counters = ClusterCounters()
        self._next = self._num_open = 0
        self._report_at_s = 0.0
        for change in sorted(options.changes, key=lambda change: change.at_s):
            self._at(change.at_s, partial(self._change, change))
        self._join([machine_name(number) for number in range(options.machines)], 0.0)

    def run(self, progress: Progress = lambda _: None) -> ClusterResult:
        """Simulate until the last request has ended."""
        while self._next < len(self._outcomes) or self._num_open:
            event_s, arrival_s, round_s = self._event_s(), self._arrival_s(), self._round_s()
            now = min(event_s, arrival_s, round_s)
            assert now < math.inf, "requests wait, but there is no event"
            self._report(now)
            if event_s == now:
                heapq.heappop(self._events)[-1](now)
            elif arrival_s == now:
                self._route(self._outcomes[self._next], now)
                self._next += 1
                if self._next % TELL_EVERY == 0:
                    progress(self._next / len(self._outcomes))
            elif self._round_s() == now:
                self._round(heapq.heappop(self._rounds)[-1])
            self._follow_storage()
        for machine in self._machines.values():
            machine.replica.check_integrity()
        results = [machine.replica.result(machine.given) for machine in self._all]
        return ClusterResult(self._outcomes, results, self._counters)

    # Time.

    def _at(self, at_s: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), do))

    def _event_s(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def _arrival_s(self) -> float:
        if self._next == len(self._outcomes):
            return math.inf
        return self._outcomes[self._next].request.arrival_s + self._server.costs.edge_s

    def _round_s(self) -> float:
        """Return when the next round of any machine is due; that machine is then the first of the heap."""
        while self._rounds and (self._rounds[0][-1].is_gone or self._rounds[0][2] != self._rounds[0][-1].entry):
            heapq.heappop(self._rounds)
        return self._rounds[0][0] if self._rounds else math.inf

    def _due(self, machine: SimMachine) -> None:
        """Put the time of a machine's next round into the heap."""
        machine.entry += 1
        if machine.replica.next_s < math.inf:
            heapq.heappush(self._rounds, (machine.replica.next_s, machine.number, machine.entry, machine))

    def _follow_storage(self) -> None:
        """Update the ends of reads in the heap, if their rate has changed."""
        if self._storage is not None and self._storage.take_changed():
            for machine in self._machines.values():
                if machine.replica.is_reading:
                    self._due(machine)

    # Requests.

    def _router(self, number: int) -> Router:
        name, seed = self._options.placement, self._options.seed + number
        work = WorkEstimator(WorkRates.of_steps(self._server.costs.step))
        byte_s = self._server.costs.load_byte_s
        return Router(number, make_placement(name, (), seed), make_placement(name, (), seed), work, byte_s)

    def _route(self, outcome: SimulatedRequest, now: float) -> None:
        """Send a request to the first machine of its rank that takes it."""
        router, request = self._routers[outcome.number % len(self._routers)], outcome.request
        nbytes = 0 if request.adapter is None else self._traffic.layouts[key_of(request.adapter)].nbytes
        session = self._traffic.prompts.session(outcome.number)
        demand = router.demand(request, session, 0 if self._is_split(outcome) else request.prompt_tokens, nbytes)
        for machine in self._ranked(router.answers, demand):
            place = self._open(machine, outcome, router, router.answers, demand)
            if self._begin_prompt(place, now) or self._begin(place, now):
                return
        outcome.refused, outcome.end_s = outcome.refused or NO_REPLICA, now

    def _ranked(self, placement: Placement, demand: Demand) -> list[SimMachine]:
        try:
            return [self._machines[name] for name in placement.rank(demand)[:TRIES]]
        except NoReplicaReady:
            return []

    def _open(
        self,
        machine: SimMachine,
        outcome: SimulatedRequest,
        router: Router,
        placement: Placement,
        demand: Demand,
        moves: int = 0,
    ) -> Place:
        place = Place(outcome, machine, router, placement, placement.on_request_sent(machine.name, demand, moves))
        machine.open(place)
        self._num_open += 1
        return place

    def _close(self, place: Place) -> None:
        place.machine.close(place)
        self._num_open -= 1

    def _begin(self, place: Place, now: float, pages: Sequence[bytes] = ()) -> bool:
        """Give a request to its machine; return False if it is refused, and is then no longer placed there."""
        machine, outcome = place.machine, place.outcome
        machine.given.append(outcome)
        outcome.refused = machine.replica.give(outcome, now, pages)
        self._due(machine)
        if outcome.refused is not None:
            self._close(place)
        return outcome.refused is None

    def _round(self, machine: SimMachine) -> None:
        for outcome in machine.replica.round():
            place = machine.places[outcome.number]
            self._close(place)
            if place.answer is not None:
                self._hand_over(place, place.answer)
            else:
                place.router.work.observe(outcome.request.adapter, outcome.tokens)
        self._due(machine)

    def _report(self, now: float) -> None:
        """Report the machines to the routers, once per period, and let the routers move requests."""
        if now < self._report_at_s:
            return
        self._report_at_s = (math.floor(now / self._options.report_s) + 1) * self._options.report_s
        for machine in self._machines.values():
            adapters, load = machine.replica.resident(), ReplicaLoad.of(machine.replica.stats())
            for router in self._routers:
                own = machine.sent[router.number]
                report = ReplicaReport.beside(own, load.requests, load.seconds_ahead, adapters)
                for placement in (router.answers, router.prompts):
                    placement.on_report(machine.name, report)
        if not self._options.prefill:
            self._move(now)

    def _move(self, now: float) -> None:
        """Move the requests that the routers want elsewhere, unless they have got a token meanwhile."""
        wanted = {sent: to for router in self._routers for sent, to in router.answers.moves()}
        if not wanted:
            return
        for place in [p for m in self._machines.values() for p in m.places.values() if p.sent in wanted]:
            if place.outcome.tokens:
                continue
            self._withdraw(place, now)
            self._counters.moved += 1
            target, demand = self._machines[wanted[place.sent]], place.sent.demand
            moved = self._open(target, place.outcome, place.router, place.placement, demand, place.sent.moves + 1)
            if not self._begin(moved, now):
                self._route(place.outcome, now)

    def _withdraw(self, place: Place, now: float) -> None:
        self._close(place)
        place.machine.replica.withdraw(place.outcome, now)
        self._due(place.machine)

    # Prompts that one machine computes for another.

    def _is_split(self, outcome: SimulatedRequest) -> bool:
        """Return whether a prompt is long enough to hand over, and there are machines for it."""
        has_prefill = any(machine.is_prefill for machine in self._machines.values())
        return has_prefill and is_worth_asking(outcome.request.prompt_tokens, self._server.costs.step["token"])

    def _begin_prompt(self, answer: Place, now: float) -> bool:
        """Have another machine compute the full pages of a prompt; return False if no machine does, or no page is
        missing."""
        request, number = answer.outcome.request, answer.outcome.number
        if not self._is_split(answer.outcome) or not answer.machine.replica.missing_pages(answer.outcome):
            return False
        page_size = self._server.geometry.page_size
        tokens = (request.prompt_tokens - 1) // page_size * page_size
        part = replace(request, prompt_tokens=tokens, output_tokens=1, max_tokens=1, timeout_s=None)
        demand = answer.router.prompt_demand(answer.sent.demand, request)
        for machine in self._ranked(answer.router.prompts, demand):
            if machine is answer.machine:
                continue
            outcome = SimulatedRequest(part, number)
            place = self._open(machine, outcome, answer.router, answer.router.prompts, demand)
            if self._begin(place, now):
                place.answer, answer.prompt = answer, place
                answer.machine.replica.prefetch(request.adapter, now)
                self._due(answer.machine)
                return True
        return False

    def _hand_over(self, prompt: Place, answer: Place) -> None:
        """Send the pages of a computed prompt as soon as both links are free."""
        source, target, now = prompt.machine, answer.machine, prompt.machine.replica.now
        answer.prompt = None
        pages = () if prompt.outcome.refused else target.replica.missing_pages(answer.outcome)
        nbytes = len(pages) * self._server.geometry.block_bytes
        begins_s = max(now, source.link_s, target.link_s)
        source.link_s = target.link_s = begins_s + nbytes / self._options.transfer_bytes_per_s

        def arrive(now: float) -> None:
            if not answer.is_open:
                return
            self._counters.handed_over += bool(pages) and not source.is_gone
            self._counters.handed_over_bytes += 0 if source.is_gone else nbytes
            self._begin_or_refuse(answer, now, () if source.is_gone else pages)

        self._at(source.link_s, arrive)

    def _begin_or_refuse(self, answer: Place, now: float, pages: Sequence[bytes] = ()) -> None:
        if not self._begin(answer, now, pages):
            answer.outcome.end_s = now

    # Machines.

    def _change(self, change: MachineChange, now: float) -> None:
        if change.kind is ChangeKind.JOIN:
            self._join([change.machine], now)
        else:
            self._fail(change.machine, now)

    def _join(self, names: Iterable[str], now: float) -> None:
        for name in names:
            replica_ = SimReplica(self._server, self._traffic, now, self._storage)
            machine = SimMachine(name, len(self._all), replica_, self._options.is_prefill(name))
            self._machines[name] = machine
            self._all.append(machine)
            self._due(machine)
        self._tell_routers()

    def _fail(self, name: str, now: float) -> None:
        machine = self._machines.pop(name)
        machine.is_gone = True
        machine.replica.stop(now)
        self._tell_routers()
        for place in list(machine.places.values()):
            self._close(place)
            if place.answer is not None:
                place.answer.prompt = None
                self._begin_or_refuse(place.answer, now)
            else:
                self._lose(place, now)

    def _lose(self, place: Place, now: float) -> None:
        """Send a request of a failed machine again, unless its answer has begun."""
        outcome = place.outcome
        if place.prompt is not None:
            self._withdraw(place.prompt, now)
        if outcome.tokens or self._losses[outcome.number] == MAX_LOSSES:
            outcome.refused, outcome.end_s = LOST, now
            return
        self._losses[outcome.number] += 1
        self._counters.resent += 1
        self._route(outcome, now)

    def _tell_routers(self) -> None:
        """Report the machines to the routers. If no others are left, prefill machines also answer, as in the edge."""
        prefill = [Replica(name) for name, machine in self._machines.items() if machine.is_prefill]
        others = [Replica(name) for name, machine in self._machines.items() if not machine.is_prefill]
        for router in self._routers:
            router.answers.set_replicas(others or prefill)
            router.prompts.set_replicas(prefill)


def replay_on(
    server: SimServer, trace: Sequence[TraceRequest], options: ClusterOptions, progress: Progress = lambda _: None
) -> ClusterResult:
    """Simulate this traffic on machines that start with empty memory."""
    return SimCluster(server, trace, options).run(progress)
