"""Count what an edge does, and learn from answers how much work requests take."""

from collections import Counter

from api.asgi.limits import no_cuts
from lorasrv.placement.work import WorkEstimator, WorkRates

USUAL_RATES = WorkRates(prompt_token_s=0.5e-3, answer_token_s=5e-3)
"""Rates that are assumed until a replica has reported its own."""


class EdgeStats:
    """Hold the counts of one edge since its start."""

    def __init__(self) -> None:
        self.estimator = WorkEstimator(USUAL_RATES)
        # By replica.
        self.sent: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        # Answers to clients by status: from replicas, from the registry and from the edge itself.
        self.answers: Counter[int] = Counter()
        # Connections closed below the edge, by cause.
        self.cuts = no_cuts()
        # Times that a replica was named as a peer, by kind: `prefill` or `pages`.
        self.peers: Counter[str] = Counter()
        # Requests that were sent to another replica; streams that another replica continued; those of them that moved
        # because their replica drained; streams that no replica could continue.
        self.retries = self.resumed = self.moved = self.lost = 0

    def observe_answer(self, adapter_id: str | None, num_tokens: int) -> None:
        """Learn from the length of an answer."""
        self.estimator.observe(adapter_id, num_tokens)
