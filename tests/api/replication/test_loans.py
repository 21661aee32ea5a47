"""All servers together keep the limits of a key, whatever happens to messages and processes."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, rule
from lossy_network import ARRIVES, LOST, LossyNetwork, followers, lasts, mostly, servers

from api.auth.principal import Caller, KeyLimits
from api.auth.rate_limits import Reservation
from api.replication import borrowing
from api.replication.borrowing import BorrowingLimiter
from api.replication.headers import LEASE_S
from api.replication.lending import LendingLimiter
from api.replication.loans import MAX_LOANS, LoanQuestion
from lorasrv.errors import LimitExceeded

REQUESTS, TOKENS, ANSWERS = 12, 300, 5
LIMITS = KeyLimits(requests_per_min=REQUESTS, tokens_per_min=TOKENS, max_concurrent=ANSWERS)
ANN = Caller("ann", frozenset(), limits=LIMITS)


@dataclass
class Server:
    """A registry (without a name) or a follower, and the answers that run in it."""

    limiter: Any
    name: str = ""
    running: list[Reservation] = field(default_factory=list)


class Shared(LossyNetwork):
    def __init__(self) -> None:
        # Requests and tokens that clients have used; tokens that processes owed when they died.
        self.requests, self.tokens, self.forgiven = 0, 0, 0.0
        super().__init__()

    def make_registry(self) -> Server:
        return Server(LendingLimiter(self.leases, self.clock))

    def make_follower(self, name: str) -> Server:
        server = Server(None, name)

        async def ask() -> None:
            self.ask(server)

        server.limiter = BorrowingLimiter(ask, self.clock)
        return server

    def asker(self, server: Server) -> Any:
        return server.limiter

    def reply(self, name: str, question: str) -> Any:
        return self.servers[0].limiter.lend(name, LoanQuestion.model_validate_json(question), {"ann": LIMITS})

    def forget(self, server: Server) -> None:
        self.forgiven += self.owed(server)

    def teardown(self) -> None:
        try:
            self.one_gets_nearly_all()
        finally:
            super().teardown()

    def account(self, server: Server) -> Any:
        return server.limiter._account(ANN)

    @rule(number=followers, times=st.integers(1, 4), last=lasts)
    def renew(self, number: int, times: int, last: str) -> None:
        self.renew_lease(self.servers[number], times, last)

    # Clients.

    def prepare(self, server: Server, prompts: int, answers: int, arrives: bool) -> None:
        self.make_ready(server.limiter.prepare(ANN, prompts, answers), arrives)

    @rule(number=servers, prompts=st.integers(1, REQUESTS), arrives=mostly)
    def request(self, number: int, prompts: int, arrives: bool) -> None:
        server = self.servers[number]
        self.prepare(server, prompts, 0, arrives)
        for _ in range(prompts):
            try:
                server.limiter.spend(ANN)
            except LimitExceeded:
                return
            self.requests += 1

    @rule(number=servers, answers=st.integers(1, ANSWERS), tokens=st.integers(0, 150), arrives=mostly)
    def answer(self, number: int, answers: int, tokens: int, arrives: bool) -> None:
        server = self.servers[number]
        self.prepare(server, 1, answers, arrives)
        try:
            reservation = server.limiter.reserve(ANN, 1, answers)
        except LimitExceeded:
            return
        self.requests += 1
        stream: Any = SimpleNamespace(request_id="r", num_prompt_tokens=tokens)
        reservation.count([stream])
        self.tokens += tokens
        server.running.append(reservation)

    @rule(number=servers, refused=st.booleans())
    def end(self, number: int, refused: bool) -> None:
        if running := self.servers[number].running:
            reservation = running.pop(0)
            if refused:
                reservation.refuse()
                self.requests, self.tokens = self.requests - 1, self.tokens - reservation._num_prompt_tokens
            else:
                reservation.end(ANSWERS)

    # Time and death.

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0, LEASE_S + 1]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and end what runs on servers whose leases end."""
        before_s = self.clock.now
        self.clock.now += seconds
        for server in self.servers[1:]:
            if before_s < server.limiter._until_s <= self.clock.now:
                # docs/cluster.md says that these are not bounded.
                while server.running:
                    self.end(self.servers.index(server), refused=False)

    @rule()
    def restart_registry(self) -> None:
        super().restart_registry()
        if self.leases.are_all_known:
            # Nobody has borrowed anything: as when any server starts, counting begins anew.
            self.begun_s, self.requests, self.tokens, self.forgiven = self.clock.now, 0, 0, 0.0

    def settle(self) -> None:
        """Check what holds."""
        self.what_all_may_use_is_the_limit_at_most()
        self.no_more_than_one_server_would_let_through()

    # What holds.

    @invariant()
    def what_all_may_use_is_the_limit_at_most(self) -> None:
        accounts = [self.account(server) for server in self.servers]
        own, lent = accounts[0], accounts[1:]
        assert own.requests.level + sum(one.requests.held for one in lent) <= REQUESTS + 1e-6
        assert own.tokens.level + sum(one.tokens.held for one in lent) <= TOKENS + 1e-6
        most = [max(len(one.begun_s), one.slots(ANSWERS)) for one in accounts]
        assert sum(most) <= ANSWERS

    @invariant()
    def no_more_than_one_server_would_let_through(self) -> None:
        minutes = 1 + (self.clock.now - self.begun_s) / 60
        assert self.requests <= REQUESTS * minutes + 1e-6
        assert self.tokens - sum(map(self.owed, self.servers)) - self.forgiven <= TOKENS * minutes + 1e-6

    def owed(self, server: Server) -> float:
        """Return the tokens that were used beyond those that there were."""
        tokens = self.account(server).tokens
        return max(0.0, -(tokens.level if server is self.servers[0] else tokens.held))

    def one_gets_nearly_all(self) -> None:
        """Once messages arrive, and the others have nothing to do."""
        for server in self.servers:
            while server.running:
                self.end(self.servers.index(server), refused=False)
        for _ in range(100):
            self.clock.now += 1.0
            for server in self.servers[1:]:
                self.take_over(self.arrive(self.ask(server)))
        busy = self.servers[1]
        self.prepare(busy, REQUESTS - 1, ANSWERS - 1, arrives=True)
        account = self.account(busy)
        assert (account.requests.free, account.answers.free) >= (REQUESTS - 1, ANSWERS - 1)
        assert account.tokens.free > 0


TestShared = Shared.TestCase
TestShared.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# One guard each, which must not be left out: what the machine above would find one day.


@pytest.fixture
def state() -> Iterator[Shared]:
    """A registry that knows both followers."""
    shared = Shared()
    for number in (1, 2):
        shared.renew(number, 1, ARRIVES)
    yield shared
    shared.settle()
    shared.teardown()


class SharedByTwo(Shared):
    """Questions have room for two of the three loans of a follower, so that not every request is let through."""

    def one_gets_nearly_all(self) -> None:
        for server in self.servers[1:]:
            assert len(server.limiter.question()["loans"]) <= 2


class TestSharedByTwo(SharedByTwo.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=30, stateful_step_count=40, deadline=None)

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(borrowing, "MAX_LOANS", 2)


def test_more_loans_than_a_question_has_room_for(state: Shared) -> None:
    """Those beyond wait until others are not used any more; no question is refused."""
    callers = [Caller(f"key{number}", frozenset(), limits=LIMITS) for number in range(MAX_LOANS // 3 + 10)]
    limits = {caller.principal: LIMITS for caller in callers}
    registry, follower, told = state.servers[0].limiter, state.servers[1].limiter, list[list[str]]()

    def use(users: list[Caller]) -> list[bool]:
        """Have keys ask for all three limits at once, and return whose requests are let through."""
        state.clock.now += 1.0

        async def together() -> None:
            waiting = [asyncio.ensure_future(follower.prepare(caller, 1, 1)) for caller in users]
            await asyncio.sleep(0)
            said = LoanQuestion.model_validate_json(json.dumps(follower.question()))
            told.append([report.key for report in said.loans])
            asked.set()
            await asyncio.gather(*waiting)
            follower.on_answer(registry.lend(state.servers[1].name, said, limits), state.clock.now + LEASE_S)

        asked, ask = asyncio.Event(), follower._ask
        follower._ask = asked.wait
        state.loop.run_until_complete(together())
        follower._ask = ask
        return [follower._account(caller).missing(1, 1) == [] for caller in users]

    early, late = callers[: MAX_LOANS // 3], callers[MAX_LOANS // 3 :]
    assert all(use(early))
    assert not any(use(late))
    assert {caller.principal for caller in early} <= set(told[-1]), "they hold permits, of which the registry must know"
    # The others have used nothing for seconds.
    assert all(map(any, zip(*(use(late) for _ in range(6)), strict=True)))


def test_an_answer_to_an_older_question_comes_too_late(state: Shared) -> None:
    """A new registry cannot know what the one before has granted."""
    state.request(1, REQUESTS, arrives=False)
    late = state.arrive(state.questions[-1])
    state.restart_registry()
    for number in (1, 2):
        state.renew(number, 1, ARRIVES)
    state.take_over(late)
    state.wait(10)
    state.settle()
    state.request(1, REQUESTS, arrives=False)


def test_an_answer_is_for_the_loan_that_was_asked_for(state: Shared) -> None:
    """The lease of the one before it ends while the answer is on its way."""
    state.request(1, REQUESTS // 2, arrives=True)
    state.request(1, REQUESTS, arrives=False)
    late = state.arrive(state.questions[-1])
    state.servers[1].limiter._until_s = state.clock.now
    state.settle()
    state.take_over(late)
    state.request(1, REQUESTS, arrives=False)


def test_another_loan_begins_with_nothing(state: Shared) -> None:
    """The question that no longer names the loan before it is lost."""
    state.request(1, REQUESTS, arrives=True)
    state.renew(1, 2, LOST)
    assert json.loads(state.questions[-1].text)["loans"] == []
    state.request(1, REQUESTS, arrives=True)


def test_a_late_question_changes_nothing(state: Shared) -> None:
    state.request(1, 4, arrives=True)
    state.answer(1, 3, 0, arrives=True)
    early = state.questions[0]
    state.arrive(early)
    state.answer(0, ANSWERS - 2, 0, arrives=True)


def test_buckets_are_empty_when_a_registry_starts_again(state: Shared) -> None:
    state.request(0, REQUESTS, arrives=True)
    state.restart_registry()
    for number in (1, 2):
        state.renew(number, 1, ARRIVES)
    state.request(0, REQUESTS, arrives=True)


def test_followers_are_waited_for_by_the_registry_after_the_next(state: Shared) -> None:
    state.answer(1, ANSWERS - 1, 0, arrives=True)
    state.restart_registry()
    state.kill(2)
    state.renew(2, 1, ARRIVES)
    state.restart_registry()
    state.renew(2, 1, ARRIVES)
    state.answer(0, ANSWERS, 0, arrives=True)


def test_a_refund_goes_to_the_registry(state: Shared) -> None:
    state.answer(1, 1, 0, arrives=True)
    state.renew(1, 1, ARRIVES)
    state.wait(10)
    state.settle()
    state.end(1, refused=True)


def test_debts_outlast_the_lease(state: Shared) -> None:
    state.answer(1, 1, TOKENS // 2, arrives=True)
    for _ in range(2):
        state.answer(0, 1, TOKENS // 2, arrives=True)
        state.end(0, refused=False)
    state.wait(LEASE_S + 1)
    state.settle()
    state.answer(0, 1, TOKENS // 2, arrives=True)


def test_debts_are_paid_first(state: Shared) -> None:
    """With more than a quarter of the tokens, which it has been lent, it asks for as many again."""
    state.answer(1, 1, TOKENS * 3 // 5, arrives=True)
    state.renew(1, 1, ARRIVES)
    assert state.account(state.servers[1]).tokens.held > 0
    assert state.account(state.servers[0]).tokens.level >= 0


def test_running_answers_are_claimed_again_after_a_lease(state: Shared) -> None:
    """Nobody ends them: nothing is lent for them once the registry knows, also if all was lent meanwhile."""
    state.answer(1, 2, 0, arrives=True)
    state.clock.now += LEASE_S + 1
    state.answer(0, ANSWERS, 0, arrives=True)
    state.renew(1, 1, ARRIVES)
    assert state.account(state.servers[0]).slots(ANSWERS) == ANSWERS - 2
    state.end(0, refused=False)


def test_what_a_dead_follower_held_is_free_after_its_lease(state: Shared) -> None:
    """For each key."""
    state.answer(1, ANSWERS, 0, arrives=True)
    state.request(1, REQUESTS, arrives=True)
    state.kill(1)
    own = state.servers[0]
    assert state.account(own).slots(ANSWERS) == 0
    state.clock.now += 60 + LEASE_S
    own.limiter._account(replace(ANN, principal="bob"))
    assert state.account(own).slots(ANSWERS) == ANSWERS
    assert state.account(own).requests.level == REQUESTS


def test_what_one_leaves_another_gets_within_seconds(state: Shared) -> None:
    """All of it: permits that did not arrive, too."""
    state.request(1, 2, arrives=True)
    state.answer(1, 2, 0, arrives=True)
    state.end(1, refused=False)
    state.request(2, 5, arrives=False)
    state.arrive(state.questions[-1])
    for number in (1, 2) * 4:
        state.renew(number, 1, ARRIVES)
    state.prepare(state.servers[2], REQUESTS - 3, ANSWERS, arrives=True)
    account = state.account(state.servers[2])
    assert (account.requests.free, account.answers.free) == (REQUESTS - 3, ANSWERS)


def test_users_hold_reserves_for_the_time_without_a_registry(state: Shared) -> None:
    """Each of two has a quarter, which is what half of the rate fills in a lease of 30 s."""
    for number in (1, 2):
        state.request(number, 1, arrives=True)
        state.renew(number, 1, ARRIVES)
    assert [state.account(server).requests.held for server in state.servers[1:]] == [REQUESTS // 4] * 2
