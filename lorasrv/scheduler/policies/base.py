"""Policy interface: the order in which requests are served, and which one is preempted when pages run out.

A policy ranks requests, lanes and API keys, and is told what happens to every request; `WaitingLanes` keeps the order.
It decides only the order: pages, request slots, limits and the bound on waiting are decided elsewhere (`step_planner`,
`quotas`, `request_queue`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

from lorasrv.memory.sorted_items import Rank, SortedItems
from lorasrv.request import Request
from lorasrv.scheduler.policies.lane import Lane


class Policy(ABC):
    """Order requests. Mutated by the engine thread only."""

    may_displace = False
    """Whether a waiting request may take the slot and the pages of a running one."""
    pauses = False
    """Whether a request that has lost its slot goes after those that have one, until it gets one again."""

    @abstractmethod
    def rank(self, request: Request) -> Rank:
        """Return the rank of a request in its lane. The rank does not change while the request waits; of equal ranks,
        the request that arrived first goes first. A policy that displaces ranks running requests in the same way."""

    def lane_rank(self, lane: Lane) -> Rank:
        """Return the rank of a lane among the lanes of its API key; it may grow while the lane waits."""
        return lane.rank

    def key_rank(self, lane: Lane) -> Rank:
        """Return the rank of an API key, given its best lane; it may grow while the lane waits."""
        return self.lane_rank(lane)

    def choose(self, lanes: SortedItems[Lane]) -> Lane:
        """Return the lane of an API key that goes first; by default the best one."""
        return lanes.first

    def on_waiting(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that a request begins to wait: it is new, or it was preempted. `rank` is called afterwards."""

    def on_taken(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that a request does not wait any more: it is admitted, or it has finished."""

    def running(self, running: Sequence[Request]) -> Sequence[Request]:
        """Sort the running requests, given by seniority, best first."""
        return list(running)

    def in_order(
        self, running: Sequence[Request], waiting: Iterator[Request], first: Callable[[int], Sequence[Request]]
    ) -> Iterator[Request]:
        """Yield all requests, best first. By default a new request does not delay any that runs.

        Args:
            first: returns the first so many requests that `waiting` will yield; call it before `waiting` begins.
        """
        yield from self.running(running)
        yield from waiting

    def num_ahead(self, request: Request, waiting: Iterable[Request]) -> int:
        """Estimate how many waiting requests would go before a new one."""
        return sum(other.message.priority <= request.message.priority for other in waiting)

    def select_victim(self, running: Iterable[Request]) -> Request | None:
        """Return the request to preempt when pages run out: the newest of the least urgent requests."""
        by_seniority = enumerate(running)
        return max(by_seniority, key=lambda at: (at[1].message.priority, at[0]), default=(0, None))[1]

    def on_admitted(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that a request runs; its cached prompt tokens are known. Called after `on_taken`."""

    def on_left_batch(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that a request no longer runs: it has finished, or it was preempted and `on_waiting` follows."""

    def on_paused(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that a running request has lost its slot."""

    def on_resumed(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that a paused request has a slot again, or leaves the batch."""

    def on_throttled(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that the limits of its adapter or key forbid a request to run for now."""

    def on_starved(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that a starved request gets tokens now."""

    def on_computed(self, request: Request, num_generated: int) -> None:  # noqa: B027 - nothing, for most
        """Note that a step has computed new tokens of a request, and how many of them it has generated."""


def preempted_first(request: Request) -> int:
    """Return a rank that puts preempted requests before new ones."""
    return 0 if request.num_preemptions else 1
