"""Replay a trace on one simulated server (`sim_replica.py`). Torch-free."""

import math
from collections.abc import Callable, Sequence

from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.planner.sim_replica import SimReplica, SimServer
from lorasrv.offline.planner.sim_traffic import SimTraffic, SimulationResult

Progress = Callable[[float], None]
TELL_EVERY = 512


class Simulator:
    """Replay one trace; call `run` once."""

    def __init__(self, server: SimServer, trace: Sequence[TraceRequest]) -> None:
        traffic = SimTraffic(trace, server.layout_of)
        self.replica = SimReplica(server, traffic)
        self._edge_s = server.costs.edge_s
        self._outcomes = traffic.outcomes()
        self._next = 0

    def run(self, progress: Progress = lambda _: None) -> SimulationResult:
        """Simulate until the last request has ended."""
        while self._next < len(self._outcomes) or self.replica.has_requests:
            if self._arrival_s() <= self.replica.next_s:
                self._arrives()
                if self._next % TELL_EVERY == 0:
                    progress(self._next / len(self._outcomes))
            else:
                self.replica.round()
        self.replica.check_integrity()
        return self.replica.result(self._outcomes)

    def _arrives(self) -> None:
        outcome, at_s = self._outcomes[self._next], self._arrival_s()
        outcome.refused = self.replica.give(outcome, at_s)
        if outcome.refused is not None:
            outcome.end_s = at_s
        self._next += 1

    def _arrival_s(self) -> float:
        if self._next == len(self._outcomes):
            return math.inf
        return self._outcomes[self._next].request.arrival_s + self._edge_s


def replay(server: SimServer, trace: Sequence[TraceRequest], progress: Progress = lambda _: None) -> SimulationResult:
    """Simulate this traffic on a server that starts with empty memory."""
    return Simulator(server, trace).run(progress)
