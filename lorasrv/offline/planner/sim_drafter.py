"""Recorded drafts: each request of a replay is drafted as often, and as rightly, as the trace says. Torch-free.

A trace tells how many draft tokens an answer's steps verified and accepted, not which. Here its drafts have the
recorded mean length and number of right tokens. Whether they are verified is the planner's decision, as on a server: a
trace of quiet hours keeps its drafts in a replay of quiet hours and loses them under load. The reverse is not known:
drafts that a busy server left out are in no trace.
"""

import random
from collections.abc import Callable

from lorasrv.metrics.trace import TraceRequest
from lorasrv.outputs import RequestId
from lorasrv.request import Request
from lorasrv.speculation.drafter import NO_DRAFT, Draft, DraftAsk, Drafter


class RecordedDrafts(Drafter):
    """Draft as recorded.

    Args:
        recorded: what a trace says of a live request.
        right: the token that answers say, but for their last.
        wrong: one that they never say.
    """

    name = "recorded"

    def __init__(self, recorded: Callable[[RequestId], TraceRequest], right: int, wrong: int) -> None:
        self._recorded, self._right, self._wrong = recorded, right, wrong
        self._rngs: dict[RequestId, random.Random] = {}

    def draft(self, ask: DraftAsk) -> Draft:
        rid = ask.request.request_id
        recorded = self._recorded(rid)
        if not recorded.accepted_tokens or not recorded.steps:
            return NO_DRAFT
        rng = self._rngs.setdefault(rid, random.Random(rid))
        draw = rng.random()
        num_right = _rounded(recorded.accepted_tokens / recorded.steps, draw)
        count = _rounded(recorded.drafted_tokens / recorded.steps, draw)
        tokens = ((self._right,) * num_right + (self._wrong,) * (count - num_right))[: ask.max_tokens]
        return Draft(tokens, tuple(range(len(tokens))))

    def forget(self, request: Request) -> None:
        self._rngs.pop(request.request_id, None)


def _rounded(mean: float, draw: float) -> int:
    """Return the whole number below or above a mean, so that those of many draws between 0 and 1 have this mean."""
    return int(mean) + (draw < mean % 1)
