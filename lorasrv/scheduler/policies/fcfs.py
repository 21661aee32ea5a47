"""First come, first served, by priority: the most predictable order, without protection from a flood of one adapter."""

from collections.abc import Iterator

from lorasrv.request import Request
from lorasrv.scheduler.policies.base import Policy, SortedQueue, preempted_first


class Fcfs(Policy):
    """Serve requests in the order of arrival."""

    def __init__(self) -> None:
        self._queue = SortedQueue()

    def waiting(self) -> Iterator[Request]:
        return iter(self._queue)

    def add(self, request: Request) -> None:
        self._queue.add(request, (request.message.priority, preempted_first(request), request.number))

    def remove(self, request: Request) -> None:
        self._queue.remove(request)
