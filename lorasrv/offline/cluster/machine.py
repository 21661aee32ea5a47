"""Routers and machines of a simulated cluster, and the requests placed there."""

from collections import Counter
from dataclasses import dataclass, field, replace

from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.planner.sim_replica import SimReplica
from lorasrv.offline.planner.sim_traffic import SimulatedRequest
from lorasrv.placement.placement import Demand, Placement, SentRequest
from lorasrv.placement.work import WorkEstimator


@dataclass(eq=False)
class Router:
    """Place requests, and also prompts if separate machines compute them."""

    number: int
    answers: Placement
    prompts: Placement
    work: WorkEstimator
    # Seconds to read a byte of an adapter, which placements may take into account.
    read_byte_s: float

    def demand(self, request: TraceRequest, session: str, prompt_tokens: int, adapter_bytes: int) -> Demand:
        """Return the demand of a request on a machine that computes `prompt_tokens` of its prompt."""
        work_s = self.work.work_s(request.adapter, prompt_tokens, request.max_tokens)
        return Demand(request.adapter, work_s, session, load_s=adapter_bytes * self.read_byte_s)

    def prompt_demand(self, demand: Demand, request: TraceRequest) -> Demand:
        """Return the demand of a request on a machine that computes only its prompt."""
        return replace(demand, work_s=request.prompt_tokens * self.work.rates.prompt_token_s)


@dataclass(eq=False)
class Place:
    """Hold a request at a machine, from when it is sent there until it is over."""

    outcome: SimulatedRequest
    machine: "SimMachine"
    router: Router
    # The placement of the router that chose the machine.
    placement: Placement
    sent: SentRequest
    # For a prompt that is computed for another machine: the request's place there, and meanwhile the reverse.
    answer: "Place | None" = None
    prompt: "Place | None" = None
    is_open: bool = True


@dataclass(eq=False)
class SimMachine:
    """Hold a server, the requests sent to it, and those that are not over."""

    name: str
    # Its number among all machines that ever existed.
    number: int
    replica: SimReplica
    # Whether it computes prompts for others.
    is_prefill: bool = False
    given: list[SimulatedRequest] = field(default_factory=list)
    # By request number, in the order in which they were sent.
    places: dict[int, Place] = field(default_factory=dict)
    # Requests that are not over, by router.
    sent: Counter[int] = field(default_factory=Counter)
    # Number of its newest entry in the heap of times; older entries are outdated.
    entry: int = 0
    is_gone: bool = False
    # When its link is free.
    link_s: float = 0.0

    def open(self, place: Place) -> None:
        """Count a request that was sent here."""
        self.places[place.outcome.number] = place
        self.sent[place.router.number] += 1

    def close(self, place: Place) -> None:
        """Remove a request that is over from the accounts of its router and of this machine."""
        del self.places[place.outcome.number]
        place.is_open = False
        place.placement.on_request_ended(place.sent)
        self.sent[place.router.number] -= 1
