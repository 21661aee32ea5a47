"""All servers together keep the limits of an adapter, whatever happens to messages; schedulers are real."""

import asyncio
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from clock import Clock
from hypothesis import given, settings
from hypothesis.stateful import invariant, rule
from loop_time import LoopTime
from lossy_network import ARRIVES, FOLLOWERS, UNANSWERED, LossyNetwork, Message, lasts, mostly, servers
from tiny_scheduler import scheduler

from adapter_store.errors import OriginUnreachable
from api.replication.headers import LEASE_S, RENEW_S
from api.replication.leases import Leases
from api.replication.share_holder import TELL_AGAIN_S, ShareHolder
from api.replication.share_lender import HERE, TURN_S, ShareLender
from api.replication.shares import GRACE_S, ShareQuestion, divide
from lorasrv.config import NO_SHARE, Limits, LimitShare
from lorasrv.outputs import RequestId
from lorasrv.request import RequestStatus

pytestmark = pytest.mark.aside

RUNNING, RATE = 5, 40.0
LIMITS = {"max_running": RUNNING, "tokens_per_s": RATE}
PROMPT, CHUNK = 3, 16


@given(
    most=st.integers(0, 30),
    parts=st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1, 1, 1, 2, 4, 9])), min_size=1, max_size=6),
)
def test_parts_are_as_equal_as_what_is_wanted_allows(most: int, parts: list[tuple[int, int]]) -> None:
    wanted, together = zip(*parts, strict=True)
    found = divide(most, wanted, together)
    assert sum(found) == min(most, sum(wanted))
    least = [min(pair) for pair in parts]
    for part, want, own in zip(found, wanted, least, strict=True):
        assert part <= want
        # Whoever has less than it wants has as much as anybody who has more than it needs, but for what is left over.
        larger = [other for other, need in zip(found, least, strict=True) if other > need]
        assert part == want or not larger or part >= max(larger) - 1 or part >= own
    if sum(least) <= most:
        assert all(part >= own for part, own in zip(found, least, strict=True))
    elif wanted[0]:
        assert found[0] >= least[0] or least[0] > most, "the first comes first"


class Engine:
    """A scheduler whose thread does what it is told between two steps."""

    def __init__(self, clock: Clock, numbers: Iterator[int]) -> None:
        self.clock, self.numbers = clock, numbers
        self.bench = scheduler("fair", budget=CHUNK, bench={"step_s": 0.0, "checks": False})
        self.bench.now = clock.now
        self.bench.scheduler.quotas.set_limits("mia", Limits(**LIMITS))
        self.inbox: list[tuple[LimitShare, asyncio.Future[LimitShare]]] = []
        self.computed = 0

    @property
    def in_flight(self) -> Any:
        live = Counter(1 if r.message.beams is None else r.message.beams.width for r in self.bench.scheduler.requests())
        return SimpleNamespace(by_adapter={"mia": live} if live else {})

    async def set_share(self, adapter_id: str, share: LimitShare) -> LimitShare:
        self.inbox.append((share, asyncio.get_running_loop().create_future()))
        return await self.inbox[-1][1]

    def add(self, number: int, max_tokens: int) -> None:
        self.bench.now = self.clock.now
        for _ in range(number):
            self.bench.add(f"r{next(self.numbers)}", PROMPT, max_tokens, adapter_id="mia", ignore_eos=True)

    def step(self) -> None:
        """Do what came in, and one step."""
        inbox, self.inbox = self.inbox, []
        for share, future in inbox:
            future.set_result(self.bench.scheduler.quotas.set_share("mia", share))
        self.bench.now = self.clock.now
        self.computed += sum(len(share.token_ids) for share in self.bench.step().requests)

    def end(self, most: int = 1 << 30) -> None:
        for request in self.bench.scheduler.requests()[:most]:
            self.bench.scheduler.finish(RequestId(request.request_id), RequestStatus.FINISHED_ABORTED)

    @property
    def num_running(self) -> int:
        return self.bench.scheduler.num_running

    @property
    def running(self) -> int:
        """The most that run now, or may begin to."""
        account = self.bench.scheduler.quotas._adapters.get("mia")
        share = self.bench.scheduler.quotas._shares.get("mia")
        may = RUNNING if share is None or share.max_running is None else min(RUNNING, share.max_running)
        return max(may, 0 if account is None else account.num_running)

    @property
    def rate(self) -> float:
        """The rate at which tokens are computed now, or may be."""
        account = self.bench.scheduler.quotas._adapters.get("mia")
        share = self.bench.scheduler.quotas._shares.get("mia")
        if account is None or account.tokens is None:
            return RATE if share is None else min(RATE, cast(float, share.tokens_per_s))
        is_used = self.running or account.tokens.level < 0
        return account.tokens.rate if is_used else 0.0


@dataclass
class Server:
    """A registry (without a name) or a follower."""

    name: str
    engine: Engine
    holder: ShareHolder
    lease_ends_s: float = float("inf")


class Shared(LossyNetwork):
    def __init__(self) -> None:
        self.numbers = itertools.count()
        # Tokens that servers computed that are gone, and how often one began.
        self.computed, self.starts = 0, 0
        super().__init__()

    def make_follower(self, name: str) -> Server:
        engine = Engine(self.clock, self.numbers)
        server = Server(name, engine, ShareHolder(cast(Any, engine), self.clock))
        self.starts += 1

        async def ask() -> None:
            self.ask_soon(server)

        async def begin() -> None:
            beginning = asyncio.ensure_future(server.holder.begin(ask, lambda: self.ask_soon(server)))
            await asyncio.sleep(0)
            limited = asyncio.ensure_future(server.holder.set_limited("mia", LIMITS))
            for _ in range(3):
                await asyncio.sleep(0)
                for share, future in engine.inbox:
                    future.set_result(engine.bench.scheduler.quotas.set_share("mia", share))
                engine.inbox.clear()
            await asyncio.gather(beginning, limited)

        self.loop.run_until_complete(begin())
        return server

    def make_registry(self) -> Server:
        self.lender = ShareLender(self.leases, {"mia": LIMITS}.__getitem__, self.clock)
        return self.make_follower(HERE)

    def asker(self, server: Server) -> ShareHolder:
        return server.holder

    def reply(self, name: str, question: str) -> Any:
        return self.lender.lend(name, ShareQuestion.model_validate_json(question))

    def teardown(self) -> None:
        try:
            self.all_is_used_and_everybody_has_some()
        finally:
            for server in self.servers:
                self.forget(server)
            super().teardown()

    def ask_soon(self, server: Server) -> None:
        question = self.ask(server)
        if server.name == HERE:
            self.take_over(self.arrive(question))

    def take_over(self, answer: Message) -> None:
        sender, ends_s = answer.sender, answer.asked_s + LEASE_S
        if sender.name != HERE:
            sender.lease_ends_s = ends_s if sender.lease_ends_s == float("inf") else max(sender.lease_ends_s, ends_s)
        super().take_over(answer)

    @rule(number=servers, times=st.integers(1, 4), last=lasts, steps=mostly)
    def renew(self, number: int, times: int, last: str, steps: bool) -> None:
        """The engine may take longer than a second."""
        server = self.servers[number]
        then = (lambda: self.ask_again_and_compute(server)) if steps else (lambda: None)
        self.renew_lease(server, times, last if number else ARRIVES, then)

    def compute(self, server: Server) -> None:
        """Do one step; then whoever waited for it goes on."""
        server.engine.step()
        self.drain()

    def ask_again_and_compute(self, server: Server) -> None:
        self.ask_again(server)
        self.compute(server)

    def ask_again(self, server: Server) -> None:
        """Ask an engine again that used more than its share, as time does."""

        async def ask() -> None:
            holding = server.holder._holdings["mia"]
            if holding.held != holding.told and not server.engine.inbox:
                server.holder._tell_again("mia", holding, holding.num_told)

        self.in_loop(ask)

    # Clients.

    @rule(number=servers, count=st.integers(1, 7), max_tokens=st.sampled_from([1, 8, 200]), arrives=mostly)
    def request(self, number: int, count: int, max_tokens: int, arrives: bool) -> None:
        server = self.servers[number]
        self.make_ready(server.holder.prepare("mia", count), arrives and number > 0)
        server.engine.add(count, max_tokens)

    @rule(number=servers, steps=st.integers(1, 6))
    def step(self, number: int, steps: int) -> None:
        for _ in range(steps):
            self.ask_again_and_compute(self.servers[number])

    @rule(number=servers, most=st.integers(1, 4))
    def end(self, number: int, most: int) -> None:
        self.servers[number].engine.end(most)

    # Time and death.

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0, LEASE_S + 1]))
    def wait(self, seconds: float) -> None:
        while seconds > 0:
            self.pass_time(min(seconds, GRACE_S / 2))
            seconds -= GRACE_S / 2

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        for server in self.servers[1:]:
            self.in_loop(lambda s=server: _call(s))
            if self.clock.now >= server.lease_ends_s:
                # The engine, which takes less than `GRACE_S` for a step, has been told.
                server.lease_ends_s = float("inf")
                self.compute(server)
                # docs/cluster.md says that these are not bounded.
                server.engine.end()
                self.computed, server.engine.computed = self.computed + server.engine.computed, 0
                self.starts += 1
                self.compute(server)

    def forget(self, server: Server) -> None:
        """Take over the tokens that a server has computed which is gone."""
        self.computed += server.engine.computed
        for task in server.holder._telling:
            task.cancel()
        if server.holder._timer is not None:
            server.holder._timer.cancel()
        self.drain()

    # What holds.

    @invariant()
    def shares_are_the_limit_at_most(self) -> None:
        engines = [server.engine for server in self.servers]
        assert sum(engine.running for engine in engines) <= RUNNING, [engine.running for engine in engines]
        assert sum(engine.rate for engine in engines) <= RATE * (1 + 1e-6), [engine.rate for engine in engines]

    @invariant()
    def no_more_than_the_rate_is_computed(self) -> None:
        """But for a burst of two seconds of the rate, and a step and its debt, of each server."""
        computed = self.computed + sum(server.engine.computed for server in self.servers)
        most = RATE * (self.clock.now - self.begun_s) + self.starts * (2 * RATE + 2 * CHUNK)
        assert computed <= most, (computed, most)

    def rounds(self, number: int) -> None:
        for _ in range(number):
            self.clock.now += RENEW_S
            for server in self.servers:
                self.take_over(self.arrive(self.ask(server)))
                self.compute(server)
                self.ask_again_and_compute(server)

    def all_is_used_and_everybody_has_some(self) -> None:
        """Once messages arrive, and requests end now and then."""
        for server in self.servers:
            server.engine.end()
        self.wait(LEASE_S + 1)
        self.rounds(6)
        for server in self.servers:
            server.engine.add(RUNNING, 1000)
        for _ in range(12):
            for server in self.servers:
                server.engine.end(1)
                server.engine.add(1, 1000)
            self.rounds(1)
        shares = [server.engine.running for server in self.servers]
        # What one has just given up, another has not been given yet.
        assert sum(shares) >= RUNNING - 1, shares
        assert min(shares) >= 1, shares
        assert sum(server.engine.rate for server in self.servers) >= RATE / 2
        for server in self.servers[:-1]:
            server.engine.end()
        self.rounds(8)
        last = self.servers[-1]
        assert (last.engine.num_running, last.engine.rate) == (RUNNING, pytest.approx(RATE))


async def _call(server: Server) -> None:
    server.holder._end_if_over()


TestShared = Shared.TestCase
TestShared.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def state() -> Iterator[Shared]:
    """A registry that knows both followers."""
    shared = Shared()
    for number in (0, 1, 2):
        shared.renew(number, 1, ARRIVES, True)
    yield shared
    shared.shares_are_the_limit_at_most()
    shared.teardown()


def shares(state: Shared) -> list[int]:
    return [server.engine.num_running for server in state.servers]


def test_a_server_whose_lease_had_ended_keeps_only_what_the_others_leave(state: Shared) -> None:
    """It reports what may have gone on since, and all of that is lent to the registry's own engine."""
    state.request(number=2, count=4, max_tokens=200, arrives=True)
    state.renew(2, 2, ARRIVES, True)
    assert shares(state) == [0, 0, 4]
    state.wait(LEASE_S + 1)
    state.request(number=0, count=3, max_tokens=200, arrives=True)
    state.request(number=2, count=2, max_tokens=200, arrives=True)
    state.renew(2, 3, ARRIVES, True)
    state.step(0, 1)
    assert shares(state) == [3, 0, 0]
    state.rounds(3)
    assert shares(state) == [3, 0, 2]


def test_one_that_uses_a_limit_alone_has_all_of_it_at_once(state: Shared) -> None:
    """Its first question is answered before its first request comes; more may come with that one."""
    state.request(1, 1, 200, arrives=True)
    state.servers[1].engine.add(RUNNING + 1, 200)
    state.step(1, 3)
    assert shares(state) == [0, RUNNING, 0]
    assert state.servers[1].engine.rate == RATE


def test_nothing_is_granted_that_another_still_uses(state: Shared) -> None:
    """A server keeps for its running requests what it is told to give up, and no more."""
    state.request(1, RUNNING + 2, 1000, arrives=True)
    state.step(1, 3)
    state.request(2, RUNNING, 1000, arrives=True)
    state.step(2, 3)
    assert shares(state) == [0, RUNNING, 0]
    for number in (1, 2, 1, 2):
        state.renew(number, 1, ARRIVES, True)
    assert shares(state) == [0, RUNNING, 0], "none of them has ended"
    state.end(1, 2)
    for number in (1, 2, 1, 2):
        state.renew(number, 1, ARRIVES, True)
    assert sum(shares(state)) == RUNNING
    assert shares(state)[2] == 2, "none began in the place of those that ended"


def test_a_late_question_frees_nothing(state: Shared) -> None:
    early = next(question for question in state.questions if question.sender is state.servers[1])
    state.request(1, RUNNING, 1000, arrives=True)
    state.step(1, 2)
    state.arrive(early)
    state.request(2, RUNNING, 1000, arrives=True)
    state.step(2, 2)
    assert shares(state) == [0, RUNNING, 0]


def test_servers_take_turns_at_a_limit_of_one(state: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for server in state.servers[1:]:
        server.engine.add(3, 1000)
    with monkeypatch.context() as patched:
        patched.setitem(LIMITS, "max_running", 1)
        for _ in range(int(4 * TURN_S)):
            for number in (1, 2):
                state.servers[number].engine.end(1)
                state.servers[number].engine.add(1, 1000)
                state.renew(number, 1, ARRIVES, True)
            seen |= {number for number in (1, 2) if shares(state)[number]}
            assert sum(shares(state)) <= 1
    assert seen == {1, 2}


def test_a_killed_server_leaves_its_share_after_its_lease(state: Shared) -> None:
    state.request(1, RUNNING, 1000, arrives=True)
    state.step(1, 2)
    state.kill(1)
    state.request(2, 2, 1000, arrives=True)
    state.renew(2, 3, ARRIVES, True)
    assert shares(state)[2] == 0
    for _ in range(int(LEASE_S) + 1):
        state.renew(2, 1, ARRIVES, True)
    assert shares(state)[2] == 2


def test_a_new_registry_waits_for_what_is_out(state: Shared) -> None:
    state.request(1, RUNNING, 1000, arrives=True)
    state.step(1, 2)
    state.restart_registry()
    state.renew(0, 1, ARRIVES, True)
    state.request(2, 2, 1000, arrives=True)
    state.step(2, 2)
    assert shares(state) == [0, RUNNING, 0]
    state.renew(1, 1, ARRIVES, True)
    assert shares(state) == [0, RUNNING, 0]


def test_a_server_that_is_cut_off_begins_no_more(state: Shared) -> None:
    """Before the registry may lend its share again; what runs goes on, at its rate."""
    state.request(1, 2, 1000, arrives=True)
    state.step(1, 2)
    server = state.servers[1]
    before, rate = server.engine.num_running, server.engine.rate
    state.clock.now += LEASE_S - GRACE_S
    state.in_loop(lambda: _call(server))
    state.compute(server)
    server.engine.add(2, 1000)
    state.compute(server)
    assert (before, server.engine.num_running) == (2, 2)
    assert server.engine.rate == rate > 0
    state.renew(1, 1, ARRIVES, True)
    assert server.holder._holdings["mia"].held != NO_SHARE


def test_an_answer_that_comes_after_the_next_question_is_for_nobody(state: Shared) -> None:
    """The registry takes the next question to say that it was lost, and may have lent the share to others."""
    state.request(1, RUNNING, 1000, arrives=False)
    late = state.arrive(state.questions[-1])
    state.clock.now += RENEW_S
    again = state.ask(state.servers[1])
    state.servers[1].engine.end(RUNNING - 1)
    state.arrive(again)
    state.clock.now += 2 * RENEW_S
    state.take_over(state.arrive(state.ask(state.servers[1])))
    state.step(1, 1)
    state.request(2, RUNNING, 1000, arrives=True)
    for number in (1, 2, 1, 2):
        state.renew(number, 1, ARRIVES, True)
    state.ask(state.servers[1])
    state.take_over(late)
    state.step(1, 1)
    assert shares(state)[2]
    assert sum(server.engine.running for server in state.servers) <= RUNNING


def test_shares_that_have_just_ended_are_not_claimed_again(state: Shared) -> None:
    """The engine has not been told yet when the registry can be reached again, and has lent them to another."""
    state.request(1, RUNNING, 1000, arrives=True)
    server = state.servers[1]
    state.clock.now += LEASE_S + 1
    state.take_over(state.arrive(state.ask(state.servers[2])))
    state.request(2, RUNNING, 1000, arrives=True)
    state.step(2, 2)
    state.take_over(state.arrive(state.ask(server)))
    server.engine.end()
    state.step(1, 2)
    state.take_over(state.arrive(state.ask(server)))
    state.step(1, 2)
    server.engine.add(RUNNING, 1000)
    state.step(1, 2)
    assert shares(state) == [0, 0, RUNNING]


async def test_a_server_holds_what_its_engine_may_still_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the engine was told since: what counts is its answer to the last of it."""
    clock = LoopTime(monkeypatch)
    told: list[tuple[LimitShare, asyncio.Future[LimitShare]]] = []

    async def set_share(_: str, share: LimitShare) -> LimitShare:
        told.append((share, asyncio.get_running_loop().create_future()))
        return await told[-1][1]

    async def uses(number: int, share: LimitShare) -> None:
        told[number][1].set_result(share)
        await clock.let_pass()

    def held() -> LimitShare:
        return LimitShare(*holder.question()["shares"][0][1:3])

    async def may_hold(share: LimitShare) -> None:
        number = holder.question()["number"]
        answer = ["mia", share.max_running, share.tokens_per_s]
        holder.on_answer({"number": number, "shares": [answer]}, float("inf"))
        await clock.let_pass()

    engine = SimpleNamespace(set_share=set_share, in_flight=SimpleNamespace(by_adapter={"mia": {1: 9}}))
    holder = ShareHolder(cast(Any, engine), clock)
    await holder.begin(lambda: asyncio.sleep(0), lambda: None)
    limited = asyncio.ensure_future(holder.set_limited("mia", LIMITS))
    await clock.let_pass()
    assert held() == LimitShare(), "it ran without limits"
    await uses(0, LimitShare(2, 40.0))
    await limited
    assert held() == LimitShare(2, 40.0)
    large, small = LimitShare(5, 40.0), LimitShare(3, 20.0)
    await may_hold(large)
    assert held() == large, "as soon as the engine is told"
    await may_hold(NO_SHARE)
    await may_hold(small)
    await uses(1, large)
    await uses(2, NO_SHARE)
    assert held() == large, "it may know of another share by now"
    await uses(3, LimitShare(4, 20.0))
    assert held() == LimitShare(4, 20.0)
    await clock.let_pass(TELL_AGAIN_S)
    assert [share for share, _ in told[4:]] == [small], "until it uses no more"
    await uses(4, small)
    await clock.let_pass(TELL_AGAIN_S)
    await may_hold(small)
    assert (held(), len(told)) == (small, 5)


async def test_what_waits_is_refused_when_the_lease_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it may still be renewed."""

    async def set_share(_: str, share: LimitShare) -> LimitShare:
        return share

    def renewed(for_s: float) -> None:
        number = holder.question()["number"]
        holder.on_answer({"number": number, "shares": []}, clock.now + for_s)

    clock, refused = LoopTime(monkeypatch), list[tuple[str, Exception]]()
    live = SimpleNamespace(by_adapter={"mia": {1: 9}}, abort_unanswered=lambda *told: refused.append(told))
    holder = ShareHolder(cast(Any, SimpleNamespace(set_share=set_share, in_flight=live)), clock)
    await holder.begin(lambda: asyncio.sleep(0), lambda: None)
    await holder.set_limited("mia", LIMITS)
    renewed(GRACE_S + 1.0)
    await clock.let_pass(2.0)
    renewed(60.0)
    await clock.let_pass(GRACE_S + 1.0)
    renewed(GRACE_S + 1.0)
    await clock.let_pass(1.0)
    await clock.let_pass(GRACE_S - 0.5)
    assert not refused
    await clock.let_pass(0.5)
    assert [name for name, _ in refused] == ["mia"]
    assert isinstance(refused[0][1], OriginUnreachable)


def test_shares_that_end_are_still_held_until_the_engine_has_heard(state: Shared) -> None:
    """The lease is renewed with the question that comes first."""
    state.request(1, RUNNING, 1000, arrives=True)
    state.step(1, 2)
    state.renew(2, 1, ARRIVES, True)
    state.clock.now += LEASE_S - GRACE_S
    state.take_over(state.arrive(state.ask(state.servers[1])))
    state.request(2, RUNNING, 1000, arrives=True)
    state.step(2, 2)
    state.step(1, 2)
    state.take_over(state.arrive(state.ask(state.servers[2])))
    state.step(2, 2)
    assert shares(state) == [0, RUNNING, 0]


def test_a_limit_that_a_server_has_not_heard_of_is_all_its(state: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.delitem(LIMITS, "max_running")
        state.request(1, 1, 1000, arrives=True)
        state.step(1, 2)
        assert state.servers[1].holder._holdings["mia"].held.max_running is None
    state.renew(1, 1, UNANSWERED, True)
    state.request(2, RUNNING, 1000, arrives=True)
    state.step(2, 2)
    state.servers[1].engine.add(RUNNING, 1000)
    state.step(1, 2)
    assert shares(state) == [0, RUNNING, 0]


@pytest.mark.parametrize(
    ("most", "seconds"), [(1, 1), *(pytest.param(1, s, marks=pytest.mark.exhaustive) for s in (3, 6)), (2, 20)]
)
def test_nobody_starves_where_a_limit_is_too_small(
    state: Shared, monkeypatch: pytest.MonkeyPatch, most: int, seconds: int
) -> None:
    """Answers take some seconds; whoever waited longest comes next."""
    places, finished = range(FOLLOWERS + 1)[-most - 1 :], Counter[int]()
    with monkeypatch.context() as patched:
        patched.setitem(LIMITS, "max_running", most)
        patched.setitem(LIMITS, "tokens_per_s", 1e6)
        begun: dict[int, float] = {}
        for tick in range(1600):
            state.clock.now += RENEW_S / 4
            if tick % 13 == 0 and tick // 13 < len(places):
                # One after the other, so that their answers do not end together.
                state.servers[places[tick // 13]].engine.add(3, 10_000)
            for number in places:
                server = state.servers[number]
                if (tick + number) % 4 == 0:
                    state.take_over(state.arrive(state.ask(server)))
                if server.engine.num_running and state.clock.now - begun[number] >= seconds:
                    finished[number] += 1
                    server.engine.end(server.engine.num_running)
                    server.engine.add(1, 10_000)
                state.ask_again(server)
                state.step(number, 1)
                begun[number] = begun.get(number, state.clock.now) if server.engine.num_running else state.clock.now
            assert sum(shares(state)) <= most
    for server in state.servers:
        server.engine.end()
    state.rounds(6)
    fair = sum(finished.values()) / len(places)
    assert all(finished[number] >= 0.7 * fair for number in places), finished
    assert sum(finished.values()) * seconds >= 0.5 * most * 400, finished


def test_searches_on_two_servers_come_to_their_ends(state: Shared) -> None:
    """Their beams need more together than half of the limit: one after the other, and none holds what it cannot use."""
    for server in state.servers[1:]:
        for number in range(4):
            server.engine.bench.add_beams(f"b{server.name}{number}", PROMPT, 6, RUNNING - 1, adapter_id="mia")
    for _ in range(150):
        for number in (1, 2):
            state.renew(number, 1, ARRIVES, True)
            state.step(number, 2)
        if not any(server.engine.in_flight.by_adapter for server in state.servers):
            return
    raise AssertionError("they wait for ever")


async def test_many_limited_adapters_are_told_once() -> None:
    told = Counter[str]()

    async def set_share(adapter_id: str, share: LimitShare) -> LimitShare:
        told[adapter_id] += 1
        await asyncio.sleep(0)
        return share

    holder = ShareHolder(cast(Any, SimpleNamespace(set_share=set_share, in_flight=SimpleNamespace(by_adapter={}))))
    for number in range(500):
        await holder.set_limited(f"a{number}", LIMITS)
    with tempfile.TemporaryDirectory() as folder:
        lender = ShareLender(Leases(Path(folder)), lambda _: LIMITS)
        asks = asyncio.Event()

        async def ask() -> None:
            holder.on_answer(lender.lend(HERE, ShareQuestion.model_validate(holder.question())), float("inf"))

        await holder.begin(ask, asks.set)
        await ask()
        await ask()
    assert set(told.values()) == {1}
    assert len(told) == 500
    assert not holder.question()["shares"]
