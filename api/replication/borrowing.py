"""Use the permits that a registry has lent of its keys' limits; the follower's side of `loans.py`."""

import itertools
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from api.auth.principal import Caller, KeyLimits
from api.auth.rate_limits import KeyAccount, Kind, RateLimiter
from api.replication.headers import RENEW_S
from api.replication.loans import MAX_LOANS, Loan, LoanAnswer, LoanAnswers, LoanReport

WINDOW_S = 1.0
"""Window of usage: a follower asks for as many permits as it used in this window and the previous one."""
SOON_S = 1.0
"""Least time after which a client may retry if its permits exist but are not lent to this server yet."""


@dataclass(slots=True)
class _OpenLoans:
    """Hold the loans that are reported to the registry."""

    clock: Callable[[], float]
    open: "dict[tuple[str, Kind], Borrowed]" = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class Borrowed:
    """Hold a loan of permits. An account uses it as a token bucket that only the registry fills.

    Args:
        begun: start times of the running answers, for a loan of answers; else empty.
    """

    def __init__(self, open_loans: _OpenLoans, key: str, kind: Kind, per_min: int, begun: list[float]) -> None:
        self.rate, self.capacity = per_min / 60, float(per_min)
        self._open_loans, self._name, self._begun = open_loans, (key, kind), begun
        self._loan = Loan(0)
        self._used, self._used_before, self._turned_s = 0, 0, open_loans.clock()
        # Permits that requests wait for.
        self.pending = 0
        # The registry's last answer and its time.
        self._target, self._left, self._told_s = 0, self.capacity, -math.inf
        # The loan's number and returned permits, in the last report and in the last report that was answered.
        self._reported, self._told = (0, 0), (0, 0)

    @property
    def held(self) -> int:
        """Return the permits that this server holds, those of running answers included; negative: it owes permits."""
        return self._loan.held

    @property
    def free(self) -> int:
        """Return the permits that may be used now."""
        return self._loan.held - len(self._begun)

    @property
    def level(self) -> float:
        """Return the permits left here and at the registry, as far as this server knows."""
        filled = self._left + self.rate * min(60.0, self._open_loans.clock() - self._told_s)
        return self.free + max(0.0, min(self.capacity - self.held, filled))

    @property
    def is_full(self) -> bool:
        """Return whether there is no loan."""
        return self._name not in self._open_loans.open

    def take(self, amount: float) -> None:
        """Use permits, even more than are held."""
        self.open()
        self._loan.spent += int(amount)
        self._used += int(amount)

    def give_back(self, amount: float) -> None:
        """Undo a `take`: return the permits to the registry, which may lend them again."""
        self.open()
        self._loan.returned += int(amount)

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` permits may be available here; 0 only if they are."""
        return 0.0 if self.free >= amount else max(SOON_S, (amount - self.level) / self.rate)

    def resize(self, rate: float, capacity: float) -> None:
        self.rate, self.capacity = rate, capacity

    def on_answers_wanted(self, number: int) -> None:
        """Note that `number` answers are about to begin."""
        self._used = max(self._used, len(self._begun) + number)

    def may_get(self, amount: int) -> bool:
        """Return whether, by its last answer, the registry may be able to lend `amount`."""
        return self.level >= amount or self._open_loans.clock() - self._told_s >= RENEW_S

    def open(self) -> None:
        """Begin a loan if there is none."""
        if self.is_full:
            self._open_loans.open[self._name] = self
            self._loan = Loan(next(self._open_loans.numbers))

    def begin_again(self) -> None:
        """Begin a new loan after the lease has ended; it carries over only owed permits and running answers."""
        self._loan = Loan(next(self._open_loans.numbers), granted=len(self._begun), spent=max(0, -self._loan.held))

    def report(self) -> LoanReport | None:
        """Give up permits that are not wanted, and return the report for the registry; None: the loan has ended."""
        wanted, loan = self._wanted(), self._loan
        surplus = loan.held - max(wanted, self._target) if wanted else self.free
        if surplus > 0:
            loan.spent += surplus
            loan.returned += surplus
        state = loan.number, loan.returned
        if not wanted and not loan.held and self._told == state:
            del self._open_loans.open[self._name]
            return None
        self._reported = state
        return LoanReport(*self._name, loan.number, loan.granted, loan.spent, loan.returned, wanted)

    def on_reported(self) -> None:
        """Note that the registry has received the last report."""
        self._told = self._reported

    def on_answer(self, answer: LoanAnswer) -> None:
        """Apply what the registry has granted, unless the answer is for an earlier loan."""
        if answer.number == self._loan.number:
            self._loan.granted = answer.granted
            self._target, self._left, self._told_s = answer.target, answer.left, self._open_loans.clock()

    def _wanted(self) -> int:
        now_s = self._open_loans.clock()
        if now_s - self._turned_s >= WINDOW_S:
            self._used_before, self._used, self._turned_s = self._used, 0, now_s
        if self._name[1] == "answers":
            return max(self._used, self._used_before, len(self._begun) + self.pending)
        return max(self._used + self._used_before, self.pending)


@dataclass(slots=True)
class _BorrowingAccount(KeyAccount):
    """Hold the usage of one key at a follower."""

    key: str = ""
    open_loans: _OpenLoans = field(default_factory=lambda: _OpenLoans(lambda: 0.0))
    answers: Borrowed | None = None

    def set_limits(self, limits: KeyLimits) -> None:
        KeyAccount.set_limits(self, limits)
        self.answers = cast(Borrowed | None, self._adjusted(self.answers, "answers", limits.max_concurrent))

    def new_bucket(self, kind: Kind, per_min: int) -> Borrowed:
        return Borrowed(self.open_loans, self.key, kind, per_min, self.begun_s if kind == "answers" else [])

    def slots(self, most: int) -> int:
        return 0 if self.answers is None else min(most, self.answers.held)

    def is_idle(self) -> bool:
        return KeyAccount.is_idle(self) and (self.answers is None or self.answers.is_full)

    def missing(self, prompts: int, answers: int) -> list[tuple[Borrowed, int]]:
        """Return the loans that have too few permits for a request, each with the number that the request needs."""
        if self.answers is not None:
            self.answers.on_answers_wanted(answers)
        needs = (self.requests, prompts), (self.tokens, min(1, answers)), (self.answers, answers)
        found = ((cast(Borrowed | None, borrowed), number) for borrowed, number in needs)
        return [(borrowed, number) for borrowed, number in found if borrowed is not None and borrowed.free < number]


class BorrowingLimiter(RateLimiter):
    """Enforce limits of keys with the permits that their registry has lent.

    Args:
        ask: sends `question` to the registry and passes the answer to `on_answer`; returns when this is done or has
            failed.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        clock: Callable[[], float],
        on_refused: Callable[[Exception], object] = lambda _: None,
    ) -> None:
        super().__init__(clock, on_refused)
        self._ask = ask
        self._open_loans = _OpenLoans(clock)
        self._until_s = math.inf
        self._asked = 0
        # Loans that the last question reported.
        self._reported: list[Borrowed] = []

    async def prepare(self, caller: Caller, prompts: int = 1, answers: int = 1) -> None:
        account = self._account(caller)
        missing = [] if account is None else account.missing(prompts, answers)
        if not all(borrowed.may_get(number) for borrowed, number in missing) or not missing:
            return
        for borrowed, number in missing:
            borrowed.open()
            borrowed.pending += number
        try:
            await self._ask()
        finally:
            for borrowed, number in missing:
                borrowed.pending -= number

    def question(self) -> dict[str, Any]:
        """Return the question to send with the next lease renewal, as JSON.

        Of more than `MAX_LOANS` loans, it has those that began first; the others hold no permits until one of these
        ends.
        """
        self._end_loans()
        self._asked += 1
        loans = [(borrowed, borrowed.report()) for borrowed in list(self._open_loans.open.values())]
        told = [(borrowed, report) for borrowed, report in loans if report is not None][:MAX_LOANS]
        self._reported = [borrowed for borrowed, _ in told]
        return {"number": self._asked, "loans": [report for _, report in told]}

    def on_answer(self, answer: Any, until_s: float) -> None:
        """Apply the registry's answer.

        Args:
            until_s: time at which all loans end, by this server's clock.

        Raises:
            ValueError: the answer is malformed.
        """
        answers = LoanAnswers.model_validate(answer)
        if answers.number != self._asked:
            return
        self._until_s = until_s
        for borrowed in self._reported:
            borrowed.on_reported()
        for one in answers.loans:
            if (found := self._open_loans.open.get((one.key, one.kind))) is not None:
                found.on_answer(one)

    def _account(self, caller: Caller) -> _BorrowingAccount | None:
        self._end_loans()
        return cast(_BorrowingAccount | None, super()._account(caller))

    def _new_account(self, principal: str) -> KeyAccount:
        return _BorrowingAccount(self._clock, key=principal, open_loans=self._open_loans)

    def _end_loans(self) -> None:
        """End all loans if the lease has ended."""
        if self._clock() >= self._until_s:
            self._until_s = math.inf
            for borrowed in self._open_loans.open.values():
                borrowed.begin_again()
