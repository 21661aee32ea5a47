"""Multi-level feedback queue: the least served request goes first; answer lengths need not be known.

After FastServe (Wu et al. 2023): a request joins the level whose quantum its prompt alone would use up (skip-join) and
drops a level when it has used up its level's quantum. Each step serves the best levels, so a new request takes the slot
of one that has run long. A displaced request keeps its pages while there are enough. Service is counted in generated
tokens; a prompt token counts a sixteenth, because many are computed together.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

from lorasrv.memory.sorted_items import Rank
from lorasrv.request import Request
from lorasrv.scheduler.policies.base import Policy

FIRST_QUANTUM = 32.0
NUM_LEVELS = 6
"""Each level's quantum is twice that of the one above; the last is unbounded."""
PROMPT_TOKEN = 1 / 16


class Mlfq(Policy):
    """Serve the request with the least service first."""

    may_displace = True

    def running(self, running: Sequence[Request]) -> Sequence[Request]:
        return sorted(running, key=self.rank)

    def in_order(
        self, running: Sequence[Request], waiting: Iterator[Request], first: Callable[[int], Sequence[Request]]
    ) -> Iterator[Request]:
        return heapq.merge(self.running(running), waiting, key=self.rank)

    def on_waiting(self, request: Request) -> None:
        if not request.num_preemptions:
            request.service = PROMPT_TOKEN * request.num_prompt_tokens

    def rank(self, request: Request) -> Rank:
        return (request.message.priority, _level(request.service), request.number)

    def select_victim(self, running: Iterable[Request]) -> Request | None:
        return max(running, key=self.rank, default=None)

    def on_starved(self, request: Request) -> None:
        """Move the request back to the best level (FastServe's starvation prevention): one token would not help it."""
        request.service = 0.0

    def on_computed(self, request: Request, num_generated: int) -> None:
        request.service += num_generated


def _level(service: float) -> int:
    """Return the first level whose quantum, counted from the beginning, is not used up."""
    level, quantum, end = 0, FIRST_QUANTUM, FIRST_QUANTUM
    while service >= end and level < NUM_LEVELS - 1:
        level, quantum = level + 1, 2 * quantum
        end += quantum
    return level
