"""Recorded drafts: each request of a replay gets drafts of the length and accuracy in the trace. Torch-free.

A trace contains how many draft tokens an answer's steps verified and accepted, but not which. Here drafts have the
recorded mean length and number of right tokens. As on a server, the planner decides whether they are verified: drafts
of a trace from quiet hours are verified in a quiet replay and left out under load. The reverse is unknown: no trace
contains drafts that a busy server left out.
"""

import random
from collections.abc import Callable

from lorasrv.metrics.trace import TraceRequest
from lorasrv.outputs import RequestId
from lorasrv.request import Request
from lorasrv.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftQuery


class RecordedDrafts(Drafter):
    """Draft as recorded.

    Args:
        recorded: returns the trace's record of a live request.
        right: the token of which answers consist, except for their last.
        wrong: a token that never occurs in answers.
    """

    name = "recorded"

    def __init__(self, recorded: Callable[[RequestId], TraceRequest], right: int, wrong: int) -> None:
        self._recorded, self._right, self._wrong = recorded, right, wrong
        self._rngs: dict[RequestId, random.Random] = {}

    def draft(self, query: DraftQuery) -> Draft:
        rid = query.request.request_id
        recorded = self._recorded(rid)
        if not recorded.accepted_tokens or not recorded.steps:
            return NO_DRAFT
        rng = self._rngs.setdefault(rid, random.Random(rid))
        draw = rng.random()
        num_right = _rounded(recorded.accepted_tokens / recorded.steps, draw)
        count = _rounded(recorded.drafted_tokens / recorded.steps, draw)
        tokens = ((self._right,) * num_right + (self._wrong,) * (count - num_right))[: query.max_tokens]
        return Draft(tokens, tuple(range(len(tokens))))

    def forget(self, request: Request) -> None:
        self._rngs.pop(request.request_id, None)


def _rounded(mean: float, draw: float) -> int:
    """Round a mean up or down by a draw between 0 and 1, so that the results of many draws have this mean."""
    return int(mean) + (draw < mean % 1)
