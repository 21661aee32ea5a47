"""A registry and followers whose messages may be lost, late or repeated, for tests of what a registry lends."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from clock import Clock
from hypothesis.stateful import RuleBasedStateMachine, rule

from api.replication.headers import LEASE_S, RENEW_S
from api.replication.leases import Leases

FOLLOWERS = 2
servers = st.integers(0, FOLLOWERS)
followers = st.integers(1, FOLLOWERS)
mostly = st.sampled_from([True, True, False])
ARRIVES, UNANSWERED, LOST = "arrives", "is not answered", "is lost"
lasts = st.sampled_from([ARRIVES, UNANSWERED, LOST])


@dataclass(frozen=True)
class Message:
    """A question or an answer in transit; `text` is its content. The `sender` has a `name`: "" for the registry."""

    sender: Any
    text: str
    asked_s: float


class LossyNetwork(RuleBasedStateMachine):
    """A registry, which also serves, and two followers. Tests define the servers, their questions and their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.clock, self.loop = Path(tempfile.mkdtemp()), Clock(), asyncio.new_event_loop()
        self.begun_s, self.started = self.clock.now, 0
        self.questions: list[Message] = []
        self.answers: list[Message] = []
        self.servers = [self.registry(), *(self.follower() for _ in range(FOLLOWERS))]

    def make_registry(self) -> Any:
        """Return a server that knows `leases`."""
        raise NotImplementedError

    def make_follower(self, name: str) -> Any:
        raise NotImplementedError

    def asker(self, server: Any) -> Any:
        """Return the object that creates a server's questions and receives the answers."""
        raise NotImplementedError

    def reply(self, name: str, question: str) -> Any:
        """Return the registry's answer to a server's question, both as JSON."""
        raise NotImplementedError

    def forget(self, server: Any) -> None:
        """Record that a server is gone."""
        raise NotImplementedError

    def pass_time(self, seconds: float) -> None:
        raise NotImplementedError

    def registry(self) -> Any:
        self.leases = Leases(self.folder, self.clock)
        return self.make_registry()

    def follower(self) -> Any:
        self.started += 1
        return self.make_follower(f"{self.started:08x}")

    def teardown(self) -> None:
        self.loop.close()
        shutil.rmtree(self.folder)

    # Messages.

    def ask(self, server: Any) -> Message:
        async def question() -> None:
            self.questions.append(Message(server, json.dumps(self.asker(server).question()), self.clock.now))

        self.in_loop(question)
        return self.questions[-1]

    def arrive(self, question: Message) -> Message:
        name = question.sender.name
        if name:
            self.in_loop(lambda: self.leases.renew(name, 0, 0))
        self.answers.append(Message(question.sender, json.dumps(self.reply(name, question.text)), question.asked_s))
        return self.answers[-1]

    def take_over(self, answer: Message) -> None:
        until_s = answer.asked_s + LEASE_S if answer.sender.name else float("inf")

        async def take() -> None:
            self.asker(answer.sender).on_answer(json.loads(answer.text), until_s)

        self.in_loop(take)

    def in_loop(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine, also from within one."""
        coroutine = call()
        if self.loop.is_running():
            try:
                coroutine.send(None)
            except StopIteration:
                return
            raise AssertionError("the registry's own question waits for nothing")
        self.loop.run_until_complete(coroutine)
        self.drain()

    def drain(self) -> None:
        """Run all tasks that are ready."""
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))

    def renew_lease(self, server: Any, times: int, last: str, then: Callable[[], object] = lambda: None) -> None:
        """Ask every second, and receive the answers, perhaps except the last one."""
        for left in range(times - 1, -1, -1):
            self.pass_time(RENEW_S)
            question = self.ask(server)
            if left or last != LOST:
                answer = self.arrive(question)
                if left or last == ARRIVES:
                    self.take_over(answer)
            then()

    def make_ready(self, ready: Coroutine[Any, Any, None], arrives: bool) -> None:
        """Ask the registry if the server needs to; the answer arrives, or is late."""
        before = len(self.questions)
        self.in_loop(lambda: ready)
        for question in self.questions[before:] if arrives else ():
            self.take_over(self.arrive(question))

    @rule(data=st.data())
    def question_arrives(self, data: st.DataObject) -> None:
        """Deliver a question late, again, or out of order."""
        if self.questions:
            self.arrive(data.draw(st.sampled_from(self.questions)))

    @rule(data=st.data())
    def answer_arrives(self, data: st.DataObject) -> None:
        if self.answers:
            self.take_over(data.draw(st.sampled_from(self.answers)))

    # Death.

    @rule(number=followers)
    def kill(self, number: int) -> None:
        self.forget(self.servers[number])
        self.servers[number] = self.follower()

    @rule()
    def restart_registry(self) -> None:
        """Restart the registry. Connections to the old process end, so that no question to it reaches the new one."""
        self.questions.clear()
        self.forget(self.servers[0])
        self.servers[0] = self.registry()
