"""Permits that a registry lends to its followers, so that all servers together keep the limits of a key.

A permit lets one request or one token through, or one answer run at a time. The registry takes permits out of the key's
own account before it lends them, and puts them back when a follower reports them returned. Each permit is in one place,
and permits lost in transit are gone. A late or repeated message therefore cannot raise the total above the limit.

A `Loan` is what one follower holds of one limit of one key. A follower reports the totals of its loans each time it
renews its lease. They do not depend on the registry's memory, so the registry may restart at any time. A loan ends with
the lease: a follower without a lease holds no permits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from api.auth.rate_limits import Kind

MAX_LOANS = 20_000
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]


@dataclass(slots=True)
class Loan:
    """Hold totals since the loan began."""

    # Unique among all loans of this follower.
    number: int
    granted: int = 0
    # Used or returned.
    spent: int = 0
    # Part of `spent` that was not used and goes back to the registry.
    returned: int = 0

    @property
    def held(self) -> int:
        """Return the permits that may still be used; negative: permits that are owed."""
        return self.granted - self.spent


class LoanReport(NamedTuple):
    """Report one loan to the registry, as a JSON list."""

    key: Annotated[str, Field(max_length=64)]
    kind: Kind
    number: _Count
    granted: _Count
    spent: _Count
    returned: _Count
    # Permits that the follower could use now, including those that it holds.
    wanted: _Count


class LoanAnswer(NamedTuple):
    """Answer a follower about one loan, as a JSON list."""

    key: str
    kind: Kind
    number: int
    granted: int
    # Permits that the follower need not return.
    target: int
    # Permits that could have been lent in addition.
    left: int


class LoanQuestion(BaseModel):
    """Report all loans of a follower."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Sequence number of the follower's questions, from 1.
    number: _Count
    loans: Annotated[Sequence[LoanReport], Field(max_length=MAX_LOANS)] = ()


class LoanAnswers(BaseModel):
    """Answer the question of the same number.

    Raises:
        ValueError: not an answer of a registry of this version.
    """

    number: int
    loans: list[LoanAnswer]
