"""How much of the server one adapter, or one key, may have at a time. Frozen facts; `quotas` keeps the accounts.

Nothing is limited unless somebody says so. `weight` is no limit: an adapter of weight 2 gets twice the service of one
of weight 1 while both have requests waiting (`policies.fair`).
"""

import math
from dataclasses import dataclass, fields

from lorasrv.errors import InvalidLimits

MAX_VALUE = 2**53
"""The largest whole number that every JSON reader understands."""
MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one account. None: no limit.

    Args:
        max_running: requests in the batch at a time; further ones wait.
        max_queued: requests that wait at a time; further ones are refused.
        tokens_per_s: prompt and generated tokens that are computed in a second, on average.
        resident_bytes: of the pool, for the adapter and for the keys and values that its requests may come to need.
        weight: share of the service among those that wait.
    Raises:
        InvalidLimits: a value is not positive; names it.
    """

    max_running: int | None = None
    max_queued: int | None = None
    tokens_per_s: float | None = None
    resident_bytes: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidLimits(f"must be above 0, not {value}; leave it out for no limit", name)
            if value is not None and value > MAX_VALUE:
                raise InvalidLimits(f"must be at most {MAX_VALUE}; leave it out for no limit", name)
        if self.weight > MAX_WEIGHT or self.weight < 1 / MAX_WEIGHT:
            raise InvalidLimits(f"must be between {1 / MAX_WEIGHT:g} and {MAX_WEIGHT:g}, not {self.weight}", "weight")
