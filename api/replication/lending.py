"""Lend permits of key limits to followers; the registry's side of `loans.py`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from api.auth.principal import NO_LIMITS, Caller, KeyLimits
from api.auth.rate_limits import KeyAccount, Kind, RateLimiter
from api.replication.leases import Leases
from api.replication.loans import Loan, LoanAnswer, LoanQuestion, LoanReport
from lorasrv.token_bucket import TokenBucket

RESERVE = 0.5
"""Part of a limit that the followers that use it hold in equal parts even if they need less. If the registry cannot be
reached, each of N followers then has as many permits as limit / N provides in a lease of 30 s."""
_EPSILON = 1e-6


@dataclass(slots=True)
class _LendingAccount(KeyAccount):
    """Hold the usage of one key at its registry."""

    # Monotonic time at which its buckets were empty and began to fill; -inf: they begin full.
    since_s: float = -math.inf
    most_answers: int | None = None
    lent_answers: int = 0

    def set_limits(self, limits: KeyLimits) -> None:
        KeyAccount.set_limits(self, limits)
        self.most_answers = limits.max_concurrent

    def new_bucket(self, kind: Kind, per_min: int) -> TokenBucket:
        bucket = TokenBucket(per_min / 60, per_min, self.clock)
        bucket.take(max(0.0, bucket.capacity - bucket.rate * (self.clock() - self.since_s)))
        return bucket

    def slots(self, most: int) -> int:
        return most - self.lent_answers

    def bucket(self, kind: Kind) -> TokenBucket | None:
        return cast(TokenBucket | None, {"requests": self.requests, "tokens": self.tokens}.get(kind))

    def limit(self, kind: Kind) -> int | None:
        """Return how many permits of a kind all servers together may use at once; None: no limit."""
        bucket = self.bucket(kind)
        return int(bucket.capacity) if bucket is not None else self.most_answers if kind == "answers" else None

    def set_lent(self, kind: Kind, lent: int) -> None:
        if (bucket := self.bucket(kind)) is not None:
            bucket.lent = lent
        elif kind == "answers":
            self.lent_answers = lent

    def free(self, kind: Kind) -> int:
        """Return the permits that this server could use or lend now."""
        if (bucket := self.bucket(kind)) is not None:
            return math.floor(bucket.level + _EPSILON)
        return self.slots(self.most_answers or 0) - len(self.begun_s)


@dataclass(slots=True)
class _FollowerLoans:
    """Hold the loans of a follower."""

    # Number of the latest question.
    number: int
    loans: dict[tuple[str, Kind], Loan]


class LendingLimiter(RateLimiter):
    """Enforce the limits of keys here, and lend permits to followers; without followers, a plain `RateLimiter`.

    After a restart nothing is lent or used until every follower of the previous process has reported its loans, or its
    lease has ended. Buckets begin empty then, because the previous process may have used them up.

    Args:
        leases: tell which followers may hold permits.
    """

    def __init__(
        self, leases: Leases, clock: Callable[[], float], on_refused: Callable[[Exception], object] = lambda _: None
    ) -> None:
        super().__init__(clock, on_refused)
        self._leases = leases
        self._since_s = -math.inf if leases.are_all_known else clock()
        self._followers: dict[str, _FollowerLoans] = {}
        # Whether there are, or ever were, followers.
        self._has_followers = not leases.are_all_known

    def lend(self, replica: str, question: LoanQuestion, limits: Mapping[str, KeyLimits]) -> dict[str, Any]:
        """Record the loans that a follower reports, and lend it what it wants, as far as permits are free.

        Args:
            limits: limits of all keys, by name.

        Returns:
            The answer, as JSON.
        """
        self._has_followers = True
        self._end_loans()
        before = self._followers.get(replica, _FollowerLoans(0, {}))
        if question.number <= before.number:
            # A later question came first: this one is out of date, and the follower ignores its answer.
            return {"number": question.number, "loans": []}
        follower = self._followers[replica] = _FollowerLoans(question.number, {})
        answers = []
        for report in question.loans:
            name = report.key, report.kind
            loan = follower.loans[name] = Loan(report.number, report.granted, report.spent, report.returned)
            old = before.loans.get(name, loan)
            # If the last answer did not arrive, its grant returns, too: after this question, it can no longer arrive.
            back = loan.returned - old.returned + old.granted - loan.granted if old.number == loan.number else 0
            account = self._account(Caller(report.key, frozenset(), limits=limits.get(report.key, NO_LIMITS)))
            if account is not None and (most := account.limit(report.kind)) is not None:
                answers.append(self._lend(account, most, report, loan, back))
        return {"number": question.number, "loans": answers}

    def _lend(self, account: _LendingAccount, most: int, report: LoanReport, loan: Loan, back: int) -> LoanAnswer:
        kind, bucket = report.kind, account.bucket(report.kind)
        if bucket is not None:
            bucket.give_back(back)
        target = min(most, max(report.wanted, int(RESERVE * most / len(self._followers)))) if report.wanted else 0
        # Owed permits are granted even if none are free, because they have been used.
        owed = max(0, -loan.held)
        free = account.free(kind) - owed
        more = max(0, min(target - loan.held - owed, free))
        if bucket is not None:
            bucket.take(owed + more)
        loan.granted += owed + more
        return LoanAnswer(report.key, kind, loan.number, loan.granted, target, max(0, free - more))

    def _account(self, caller: Caller) -> _LendingAccount | None:
        account = cast(_LendingAccount | None, super()._account(caller))
        if account is not None and self._has_followers:
            self._end_loans()
            kinds: tuple[Kind, ...] = ("requests", "tokens", "answers")
            for kind in kinds:
                known = self._leases.are_all_known
                account.set_lent(kind, self._lent(caller.principal, kind) if known else account.limit(kind) or 0)
        return account

    def _new_account(self, principal: str) -> KeyAccount:
        return _LendingAccount(self._clock, since_s=self._since_s)

    def _end_loans(self) -> None:
        """Forget the loans of followers whose leases have ended."""
        alive = self._leases.replicas()
        self._followers = {replica: loans for replica, loans in self._followers.items() if replica in alive}

    def _lent(self, key: str, kind: Kind) -> int:
        """Return the number of permits that followers hold."""
        loans = (follower.loans.get((key, kind)) for follower in self._followers.values())
        return sum(loan.held for loan in loans if loan is not None)
