"""Count what an edge does, and learn from answers how much work requests are."""

from collections import Counter

from api.asgi.limits import no_cuts
from lorasrv.placement.work import WorkEstimator, WorkRates

USUAL_RATES = WorkRates(prompt_token_s=0.5e-3, answer_token_s=5e-3)
"""Before a replica has said its own."""


class EdgeStats:
    """Hold the counts of one edge since its start."""

    def __init__(self) -> None:
        self.estimator = WorkEstimator(USUAL_RATES)
        # By replica.
        self.sent: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        # To clients, by status: of replicas, of the registry and the edge's own.
        self.answers: Counter[int] = Counter()
        # Connections closed below the edge, by cause.
        self.cuts = no_cuts()
        # Replicas that were named as a peer, by what was wanted of them.
        self.peers: Counter[str] = Counter()
        # Requests that were sent to another replica; streams that another went on with, those among them whose replica
        # drained, and those that none could go on with.
        self.retries = self.resumed = self.moved = self.lost = 0

    def observe_answer(self, adapter_id: str | None, num_tokens: int) -> None:
        """Learn from the length of an answer."""
        self.estimator.observe(adapter_id, num_tokens)
