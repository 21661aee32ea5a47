"""Lanes: waiting requests that wait for the same things, in a policy's order.

A lane holds the requests of one account on one adapter content. If its first request cannot run now, the others of the
lane cannot either, so a step checks only the first. Some requests also wait for something of their own and have
separate lanes: choices that wait for the first choice of their prompt, beams, requests with `prompt_logprobs`, and
requests that begin with a snapshot.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from adapter_store.spec import AdapterKey
from lorasrv.memory.sorted_items import Rank, SortedItems
from lorasrv.request import Request


class LaneName(NamedTuple):
    """Name what the requests of a lane have in common."""

    principal: str
    adapter_id: str
    adapter_key: AdapterKey | None
    # What else they wait for, such as a first choice, other beams or logit rows; "" for nothing.
    own: str

    @classmethod
    def of(cls, request: Request) -> "LaneName":
        """Return the name of a request's lane."""
        message, own = request.message, ""
        if message.beams is not None:
            own = f"beam {request.request_id}"
        elif message.fork_of is not None:
            own = f"choice {message.fork_of}"
        elif request.sampling.prompt_logprobs is not None:
            own = "rows"
        elif request.snapshot is not None:
            own = f"snapshot {request.snapshot.file}"
        return cls(message.principal, message.adapter_id, request.adapter_key, own)


@dataclass(slots=True, eq=False)
class Lane:
    """Hold the waiting requests of one name, by the policy's rank and the order of arrival."""

    name: LaneName
    # Adapters that its requests need in the pool.
    term_keys: tuple[AdapterKey, ...]
    requests: SortedItems[Request] = field(default_factory=SortedItems)
    # Whether it is open although its adapter is not resident: a step is to load or place the adapter.
    is_cold: bool = False

    @property
    def first(self) -> Request:
        """Return the request that goes first."""
        return self.requests.first

    @property
    def rank(self) -> Rank:
        """Return the rank of the request that goes first."""
        return self.requests.rank(self.requests.first)
