"""Policy interface: the order in which requests are served, and which one is preempted when pages run out.

A policy knows every live request and is told what happens to it. It decides on order alone: pages, request slots,
limits and the bound on waiting are decided elsewhere (`step_planner`, `quotas`, `request_queue`).
"""

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from lorasrv.request import Request

Rank = tuple[float, ...]
"""Comparable rank of a request; the smaller goes first."""


class Policy(ABC):
    """Order requests. Mutated by the engine thread only."""

    may_displace = False
    """Whether a waiting request may take the slot and the pages of a running one."""

    @abstractmethod
    def waiting(self) -> Iterator[Request]:
        """Yield the waiting requests, best first. The one yielded last may be admitted before the next is taken."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Add a request to the waiting ones: it is new, or it was preempted."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Remove a request from the waiting ones: it is admitted, or it has finished."""

    def running(self, running: Sequence[Request]) -> Sequence[Request]:
        """Return the running requests, best first; given by seniority."""
        return list(running)

    def in_order(self, running: Sequence[Request]) -> Iterator[Request]:
        """Yield all requests, best first. By default a new request delays none that has begun."""
        yield from self.running(running)
        yield from self.waiting()

    def num_ahead(self, request: Request) -> int:
        """Estimate how many waiting requests would go before a new one."""
        return sum(other.message.priority <= request.message.priority for other in self.waiting())

    def rank(self, request: Request) -> Rank:
        """Return the rank of a running request, if the policy lets it be displaced."""
        return (request.number,)

    def select_victim(self, running: Iterable[Request]) -> Request | None:
        """Return the request to preempt when pages run out: the newest of the least urgent."""
        by_seniority = enumerate(running)
        return max(by_seniority, key=lambda at: (at[1].message.priority, at[0]), default=(0, None))[1]

    def on_admitted(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that a request runs; its cached prompt tokens are known. Called after `remove`."""

    def on_left_batch(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that a request runs no more: it has finished, or it was preempted and `add` follows."""

    def on_throttled(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that the limits of its adapter or key forbid a request to run for now."""

    def on_starved(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """Note that a starved request has tokens now."""

    def on_computed(self, request: Request, num_prompt: int, num_generated: int) -> None:  # noqa: B027 - nothing, for most
        """Note how many tokens of its prompt a step has computed, and how many it has generated."""


class SortedQueue:
    """Sort requests by a rank that each keeps while it waits. Adding and removing cost O(log n) comparisons."""

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, int, Request]] = []
        self._ranks: dict[int, Rank] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order. The one yielded last may be removed before the next is taken."""
        at = 0
        while at < len(self._entries):
            entry = self._entries[at]
            yield entry[2]
            if at < len(self._entries) and self._entries[at] is entry:
                at += 1

    def __contains__(self, request: Request) -> bool:
        return request.number in self._ranks

    def add(self, request: Request, rank: Rank) -> None:
        """Add a request with its rank."""
        self._ranks[request.number] = rank
        bisect.insort(self._entries, (rank, request.number, request))

    def remove(self, request: Request) -> None:
        """Remove a request."""
        at = bisect.bisect_left(self._entries, (self._ranks.pop(request.number), request.number))
        assert self._entries[at][2] is request, f"request {request.request_id} does not wait"
        del self._entries[at]


def preempted_first(request: Request) -> int:
    """Return a rank that puts preempted requests before new ones."""
    return 0 if request.num_preemptions else 1
