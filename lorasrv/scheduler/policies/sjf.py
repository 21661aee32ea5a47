"""Shortest job first, by predicted remaining work, with ageing: the lowest mean wait if lengths are predictable.

Work is in seconds: the prompt tokens to compute, and for each predicted token of the answer its part of a step with its
adapter. Each second of waiting subtracts `AGEING` seconds. All waiting requests age equally, so the order of two never
changes while they wait, and a new request can only be ahead by a bounded time.
"""

from lorasrv.memory.cost_model import StepCosts
from lorasrv.memory.sorted_items import Rank
from lorasrv.request import Request
from lorasrv.scheduler.length_predictor import MEDIAN, LengthPredictor
from lorasrv.scheduler.policies.base import Policy, preempted_first

AGEING = 0.1


class Sjf(Policy):
    """Serve the request with the least predicted work."""

    def __init__(self, costs: StepCosts, predictor: LengthPredictor) -> None:
        self._costs = costs
        self._predictor = predictor

    def rank(self, request: Request) -> Rank:
        urgency = self.work_s(request) + AGEING * request.arrival_s
        return request.message.priority, preempted_first(request), urgency

    def work_s(self, request: Request) -> float:
        """Return the predicted seconds of work that are left."""
        nbytes = sum(term.layout.nbytes for term in request.terms)
        each = self._costs.token_s + self._costs.request_s + self._costs.adapter_s(nbytes)
        prompt = request.num_tokens - request.num_computed_tokens
        return prompt * self._costs.token_s + self._predictor.remaining(request, MEDIAN) * each
