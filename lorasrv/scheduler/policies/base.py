"""What a policy says: in which order requests get their share of a step, and who gives way when pages run out.

A policy knows every live request, whether it waits or runs, and is told what becomes of it. It decides about order
alone: pages, seats, limits and the bound on waiting are others' business (`step_planner`, `quotas`, `lineup`).
"""

import bisect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from lorasrv.request import Request

Rank = tuple[float, ...]
"""Compares requests; the smaller goes first."""


class Policy(ABC):
    """One order of requests. Mutated by the engine thread only."""

    may_displace = False
    """Whether a request that waits may take the seat, and the pages, of one that runs."""

    @abstractmethod
    def waiting(self) -> Iterator[Request]:
        """Those that wait, best first. The one that was yielded last may start before the next is asked for."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """It waits from now on: it is new, or it ran and had to give way."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """It waits no more: it starts, or it ends."""

    def running(self, running: Sequence[Request]) -> Sequence[Request]:
        """Those that run, best first; given by seniority."""
        return list(running)

    def in_order(self, running: Sequence[Request]) -> Iterator[Request]:
        """Everybody, best first. Nobody who has begun is delayed by somebody new, unless the policy says otherwise."""
        yield from self.running(running)
        yield from self.waiting()

    def num_ahead(self, request: Request) -> int:
        """About how many that wait would go before a newcomer."""
        return sum(other.message.priority <= request.message.priority for other in self.waiting())

    def rank(self, request: Request) -> Rank:
        """Where it stands among those that run, if the policy lets them be displaced."""
        return (request.number,)

    def select_victim(self, running: Iterable[Request]) -> Request | None:
        """Who gives way when pages run out: of the least urgent, the newest."""
        by_seniority = enumerate(running)
        return max(by_seniority, key=lambda at: (at[1].message.priority, at[0]), default=(0, None))[1]

    def on_admitted(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """It has joined the batch; what the cache had of its prompt is known. After `leaves`."""

    def on_left_batch(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """It has left the batch, at its end or before `arrives`."""

    def on_throttled(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """It could not run: the limits of its adapter or its key forbid it for now."""

    def on_starved(self, request: Request) -> None:  # noqa: B027 - nothing, for most
        """It had waited too long, by `Lineup`'s rule, and has its share now."""

    def on_computed(self, request: Request, num_prompt: int, num_generated: int) -> None:  # noqa: B027 - nothing, for most
        """A step has computed so many tokens of its prompt, and generated so many."""


class SortedQueue:
    """Requests in the order of a rank that each keeps while it waits. Adding and removing cost O(log n) compares."""

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, int, Request]] = []
        self._ranks: dict[int, Rank] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """The one that was yielded last may be removed before the next is asked for."""
        at = 0
        while at < len(self._entries):
            entry = self._entries[at]
            yield entry[2]
            if at < len(self._entries) and self._entries[at] is entry:
                at += 1

    def __contains__(self, request: Request) -> bool:
        return request.number in self._ranks

    def add(self, request: Request, rank: Rank) -> None:
        self._ranks[request.number] = rank
        bisect.insort(self._entries, (rank, request.number, request))

    def remove(self, request: Request) -> None:
        at = bisect.bisect_left(self._entries, (self._ranks.pop(request.number), request.number))
        assert self._entries[at][2] is request, f"request {request.request_id} does not wait"
        del self._entries[at]


def preempted_first(request: Request) -> int:
    """Those that have begun and had to give way go before those that have not."""
    return 0 if request.num_preemptions else 1
