"""Shares of an adapter's limits, so that a registry and its followers together keep `max_running` and `tokens_per_s`.

A share is the number of requests of an adapter that may run at a server, and the tokens per second that the server may
compute for them. With each lease renewal a server reports the shares that it holds and the number of its requests, and
the answer says which shares it may hold. The registry grants only what no server holds, and a server gives up a share
only once its engine has stopped using it. So the sum of all shares never exceeds the limit, even if messages are lost.
Shares end `GRACE_S` before the lease. Running requests then continue, and no new ones begin; what they use is claimed
when the registry can be reached again.
"""

import heapq
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from adapter_store.registry.references import MAX_ID_CHARS
from lorasrv.config import MAX_VALUE, LimitShare

GRACE_S = 5.0
"""Time between the end of a share and that of the lease, after which the registry may lend it to others. The engine
needs it because it is told only between two steps."""
SHARED_LIMITS = frozenset({"max_running", "tokens_per_s"})
"""Limits of adapters that apply to all servers together; the other limits apply to each engine."""
MAX_SHARES = 20_000
_Requests = Annotated[int, Field(ge=0, le=MAX_VALUE)]
_Rate = Annotated[float, Field(ge=0, le=MAX_VALUE, allow_inf_nan=False)]


class ShareReport(NamedTuple):
    """Report to the registry what a server holds of an adapter's limits, as a JSON list; None: the whole limit."""

    adapter_id: Annotated[str, Field(max_length=MAX_ID_CHARS)]
    max_running: _Requests | None
    tokens_per_s: _Rate | None
    # Requests that run or wait, or recently did.
    wanted: _Requests
    # Beams of the widest beam search among them, which must run together; 1 if there is none.
    together: Annotated[int, Field(ge=1, le=MAX_VALUE)] = 1

    @property
    def held(self) -> LimitShare:
        return LimitShare(self.max_running, self.tokens_per_s)


class ShareQuestion(BaseModel):
    """Report all shares of a server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Sequence number of the server's questions, from 1.
    number: Annotated[int, Field(ge=0, le=MAX_VALUE)]
    shares: Annotated[Sequence[ShareReport], Field(max_length=MAX_SHARES)] = ()


class ShareAnswer(NamedTuple):
    """Tell a server what it may hold of an adapter's limits, as a JSON list; None: the whole limit."""

    adapter_id: str
    max_running: _Requests | None
    tokens_per_s: _Rate | None


class ShareAnswers(BaseModel):
    """Answer the question of the same number.

    Raises:
        ValueError: not an answer of a registry of this version.
    """

    number: int
    shares: list[ShareAnswer]


def divide(most: int, wanted: Sequence[int], together: Sequence[int]) -> list[int]:
    """Divide a number into parts that are as equal as possible; earlier parts come first.

    Args:
        most: the number to divide.
        wanted: largest useful size of each part.
        together: smallest useful size of each part. Each part gets it, in order, before any part gets more.

    Returns:
        The parts; their sum is at most `most`.
    """
    parts, left = [0] * len(wanted), most
    for place, (want, least) in enumerate(zip(wanted, together, strict=True)):
        if min(want, least) <= left:
            parts[place] = min(want, least)
            left -= parts[place]
    smallest = [(part, place) for place, part in enumerate(parts) if part < wanted[place]]
    heapq.heapify(smallest)
    while left and smallest:
        part, place = heapq.heappop(smallest)
        parts[place], left = part + 1, left - 1
        if parts[place] < wanted[place]:
            heapq.heappush(smallest, (parts[place], place))
    return parts
