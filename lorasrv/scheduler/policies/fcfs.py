"""First come, first served, by priority: the most predictable order, without protection from a flood of one adapter."""

from lorasrv.memory.sorted_items import Rank
from lorasrv.request import Request
from lorasrv.scheduler.policies.base import Policy, preempted_first


class Fcfs(Policy):
    """Serve requests in the order of arrival."""

    def rank(self, request: Request) -> Rank:
        return request.message.priority, preempted_first(request)
