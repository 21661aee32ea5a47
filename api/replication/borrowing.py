"""Use what a registry has lent of the limits of its keys; the follower's side of `loans.py`."""

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
"""What was used in this window and the one before is what is wanted for the next."""
SOON_S = 1.0
"""Time after which a client may come again if what it wants is there, but not here yet."""


@dataclass(slots=True)
class _OpenLoans:
    """Hold the loans that the registry has to hear of."""

    clock: Callable[[], float]
    open: "dict[tuple[str, Kind], Borrowed]" = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class Borrowed:
    """Hold a loan of permits: to an account, a bucket that only the registry fills.

    Args:
        begun: the answers that run now, for a loan of answers.
    """

    def __init__(self, open_loans: _OpenLoans, key: str, kind: Kind, per_min: int, begun: list[float]) -> None:
        self.rate, self.capacity = per_min / 60, float(per_min)
        self._open_loans, self._name, self._begun = open_loans, (key, kind), begun
        self._loan = Loan(0)
        self._used, self._used_before, self._turned_s = 0, 0, open_loans.clock()
        # Permits that requests wait for.
        self.pending = 0
        # What the registry has said last.
        self._target, self._left, self._told_s = 0, self.capacity, -math.inf
        # Number and returned permits of the loan: in the last report, and in the last one that was answered.
        self._reported, self._told = (0, 0), (0, 0)

    @property
    def held(self) -> int:
        """Return the permits that this server has, those of running answers included; below 0 they are owed."""
        return self._loan.held

    @property
    def free(self) -> int:
        """Return the permits that may be used now."""
        return self._loan.held - len(self._begun)

    @property
    def level(self) -> float:
        """Return what is left, as far as this server knows."""
        filled = self._left + self.rate * min(60.0, self._open_loans.clock() - self._told_s)
        return self.free + max(0.0, min(self.capacity - self.held, filled))

    @property
    def is_full(self) -> bool:
        """Return whether there is no loan."""
        return self._name not in self._open_loans.open

    def take(self, amount: float) -> None:
        """Use permits, even more than there are."""
        self.open()
        self._loan.spent += int(amount)
        self._used += int(amount)

    def give_back(self, amount: float) -> None:
        """Undo a `take`: the registry gets the permits, and may lend them again."""
        self.open()
        self._loan.returned += int(amount)

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` may be here; 0 only if it is."""
        return 0.0 if self.free >= amount else max(SOON_S, (amount - self.level) / self.rate)

    def resize(self, rate: float, capacity: float) -> None:
        self.rate, self.capacity = rate, capacity

    def on_answers_wanted(self, number: int) -> None:
        """Note that `number` answers are about to begin."""
        self._used = max(self._used, len(self._begun) + number)

    def may_get(self, amount: int) -> bool:
        """Return whether the registry may lend `amount`, by its last answer."""
        return self.level >= amount or self._open_loans.clock() - self._told_s >= RENEW_S

    def open(self) -> None:
        """Begin a loan if there is none."""
        if self.is_full:
            self._open_loans.open[self._name] = self
            self._loan = Loan(next(self._open_loans.numbers))

    def begin_again(self) -> None:
        """Begin another loan, as the lease is over: what is owed and the answers that run are all that goes on."""
        self._loan = Loan(next(self._open_loans.numbers), granted=len(self._begun), spent=max(0, -self._loan.held))

    def report(self) -> LoanReport | None:
        """Return what to tell the registry, after giving up what is not wanted; None: there is no loan any more."""
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
        """Note that the registry has taken over the last report."""
        self._told = self._reported

    def on_answer(self, answer: LoanAnswer) -> None:
        """Take over what the registry has granted, unless it was another loan."""
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
        """Return which permits are missing here for a request, and how many it needs."""
        if self.answers is not None:
            self.answers.on_answers_wanted(answers)
        needs = (self.requests, prompts), (self.tokens, min(1, answers)), (self.answers, answers)
        found = ((cast(Borrowed | None, borrowed), number) for borrowed, number in needs)
        return [(borrowed, number) for borrowed, number in found if borrowed is not None and borrowed.free < number]


class BorrowingLimiter(RateLimiter):
    """Enforce limits of keys by what their registry has lent.

    Args:
        ask: sends `question` to the registry and has `on_answer` called; returns when that is done, or has failed.
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
        # Loans that the last question told.
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
        """Return what the registry is asked with the next lease, as JSON: of more loans than a question may have those
        that were begun first, until they are over; no others hold anything."""
        self._end_loans()
        self._asked += 1
        loans = [(borrowed, borrowed.report()) for borrowed in list(self._open_loans.open.values())]
        told = [(borrowed, report) for borrowed, report in loans if report is not None][:MAX_LOANS]
        self._reported = [borrowed for borrowed, _ in told]
        return {"number": self._asked, "loans": [report for _, report in told]}

    def on_answer(self, answer: Any, until_s: float) -> None:
        """Take over what the registry has lent.

        Args:
            until_s: when all loans are over, by the clock of this server.

        Raises:
            ValueError: that is no answer.
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
        """End all loans if the lease is over."""
        if self._clock() >= self._until_s:
            self._until_s = math.inf
            for borrowed in self._open_loans.open.values():
                borrowed.begin_again()
