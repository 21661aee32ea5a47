"""Permits that a registry lends to its followers, so that all servers together keep the limits of a key.

A permit lets one request or one token through, or one answer run at a time. The registry takes permits out of the key's
own account before it lends them, and has them back when a follower says so: like money, they are in one place, and what
is lost on the way is lost. So no message, however late or often it comes, can make the sum of them larger than the
limit.

A `Loan` is what one follower has of one limit of one key. A follower tells the totals of its loans each time it renews
its lease; they do not depend on what the registry remembers, which therefore may start again at any time. A loan ends
with the lease: a follower that has not heard of the registry for so long has nothing any more.
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

    # No other loan of this follower has, had or will have it.
    number: int
    granted: int = 0
    # Used, or returned.
    spent: int = 0
    # Spent ones that the registry gets back, as they were not used.
    returned: int = 0

    @property
    def held(self) -> int:
        """Return the permits that may still be used; below 0 they are owed."""
        return self.granted - self.spent


class LoanReport(NamedTuple):
    """Tell the registry of one loan, as a list of JSON."""

    key: Annotated[str, Field(max_length=64)]
    kind: Kind
    number: _Count
    granted: _Count
    spent: _Count
    returned: _Count
    # Permits that the follower could use now, those that it holds included.
    wanted: _Count


class LoanAnswer(NamedTuple):
    """Tell a follower of one loan, as a list of JSON."""

    key: str
    kind: Kind
    number: int
    granted: int
    # What the follower need not return.
    target: int
    # What could have been lent besides.
    left: int


class LoanQuestion(BaseModel):
    """Hold all loans of a follower."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Counts the questions of a follower, from 1.
    number: _Count
    loans: Annotated[Sequence[LoanReport], Field(max_length=MAX_LOANS)] = ()


class LoanAnswers(BaseModel):
    """Hold what is answered to a question of that number.

    Raises:
        ValueError: that is no answer of this version's registry.
    """

    number: int
    loans: list[LoanAnswer]
