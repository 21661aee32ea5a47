"""Shares of an adapter's limits, so that all servers that follow a registry keep `max_running` and `tokens_per_s`.

A share is how many requests of an adapter may run at a server, and how many tokens a second it may compute for them.
With its lease a server tells what it holds of each limit and how many requests it has, and is told what it may hold.
Only what no server holds is granted, and a server gives up what it holds only once its engine has stopped using
it. So the sum of all shares is the limit at most, whatever happens to messages. Shares end `GRACE_S` before the lease:
requests that run then go on, and none begins; what they use is claimed when the registry can be reached again.
"""

import heapq
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from adapter_store.registry.references import MAX_ID_CHARS
from lorasrv.config import MAX_VALUE, LimitShare

GRACE_S = 5.0
"""An engine stops using a share so long before the registry may lend it to others; it is told between two steps."""
SHARED_LIMITS = frozenset({"max_running", "tokens_per_s"})
"""Limits of adapters that all servers keep together; the others are those of each engine."""
MAX_SHARES = 20_000
_Requests = Annotated[int, Field(ge=0, le=MAX_VALUE)]
_Rate = Annotated[float, Field(ge=0, le=MAX_VALUE, allow_inf_nan=False)]


class ShareReport(NamedTuple):
    """Tell the registry what a server holds of an adapter's limits, as a list of JSON; None: all."""

    adapter_id: Annotated[str, Field(max_length=MAX_ID_CHARS)]
    max_running: _Requests | None
    tokens_per_s: _Rate | None
    # Requests that run or wait, or did a moment ago.
    wanted: _Requests
    # Beams of the widest search among them, which must run together; 1 without one.
    together: Annotated[int, Field(ge=1, le=MAX_VALUE)] = 1

    @property
    def held(self) -> LimitShare:
        return LimitShare(self.max_running, self.tokens_per_s)


class ShareQuestion(BaseModel):
    """Hold all shares of a server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Counts the questions of a server, from 1.
    number: Annotated[int, Field(ge=0, le=MAX_VALUE)]
    shares: Annotated[Sequence[ShareReport], Field(max_length=MAX_SHARES)] = ()


class ShareAnswer(NamedTuple):
    """Tell a server what it may hold of an adapter's limits, as a list of JSON; None: all."""

    adapter_id: str
    max_running: _Requests | None
    tokens_per_s: _Rate | None


class ShareAnswers(BaseModel):
    """Hold what is answered to a question of that number.

    Raises:
        ValueError: that is no answer of this version's registry.
    """

    number: int
    shares: list[ShareAnswer]


def divide(most: int, wanted: Sequence[int], together: Sequence[int]) -> list[int]:
    """Divide a number into parts as equal as what is wanted of it allows, the first before the others.

    Args:
        wanted: of each part, its most.
        together: what a part must have to be of use. Each gets that, in their order, before any gets more.

    Returns:
        The parts, `most` at most in all.
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
