"""A registry counts what its followers have written exactly once, whatever happens to messages and processes."""

import json
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adapter_store.spec import AdapterKey
from lorasrv.metrics import usage_db as module
from lorasrv.metrics.histogram import Histogram
from lorasrv.metrics.usage import Usage
from lorasrv.metrics.usage_batch import MAX_NUMBER, UsageBatch, from_rows, to_rows
from lorasrv.metrics.usage_db import LedgerFile
from lorasrv.request import Account

ACCOUNTS: tuple[Account, ...] = (
    ("", None),
    ("mia", AdapterKey("a" * 64)),
    ("mia", AdapterKey("b" * 64)),
    ("tom", None),
)
FOLLOWERS = 2
followers = st.integers(0, FOLLOWERS - 1)


class Killed(BaseException):
    """A process ends here."""


class _Mortal:
    """A connection whose process ends before a statement."""

    def __init__(self, db: sqlite3.Connection, left: int) -> None:
        self._db, self._left = db, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, *what: Any) -> Any:
        if self._left == 0 and what[0] != "ROLLBACK":
            raise Killed
        self._left -= what[0] != "ROLLBACK"
        return self._db.execute(*what)


class MortalFile(LedgerFile):
    """A ledger whose process may be killed inside of a call: at the statement `dies_at`."""

    dies_at = -1

    def _connect(self) -> Any:
        return _Mortal(super()._connect(), self.dies_at)

    @contextmanager
    def dying(self, at: int) -> Iterator[None]:
        self.dies_at = at
        try:
            yield
        except Killed:
            pass
        finally:
            self.dies_at = -1


class ExactlyOnce(RuleBasedStateMachine):
    """Two followers and a registry; every message that was ever sent may still arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.registry = MortalFile(self.folder / "registry.db")
        self.nodes = [self.started(number) for number in range(FOLLOWERS)]
        # What each follower has committed.
        self.served: Counter[Account] = Counter()
        self.messages: list[tuple[int, UsageBatch]] = []
        self.answers: list[tuple[int, UsageBatch]] = []

    def teardown(self) -> None:
        try:
            self.settle()
            assert self.counted() == self.served
        finally:
            shutil.rmtree(self.folder)

    def started(self, number: int) -> MortalFile:
        return MortalFile(self.folder / f"{number}.db", sends=True)

    def counted(self) -> Counter[Account]:
        return Counter(
            {
                (name, key or None): usage.requests
                for name in ("", "mia", "tom")
                for key, usage in self.registry.read(name).items()
            }
        )

    def settle(self) -> None:
        for node in self.nodes:
            while (batch := node.next_batch()) is not None:
                self.registry.receive(batch.source, batch.sequence, from_rows(batch.to_dict()["usage"]))
                node.on_batch_counted(batch)

    @rule(number=followers, account=st.sampled_from(ACCOUNTS), requests=st.integers(1, 3))
    def serve(self, number: int, account: Account, requests: int) -> None:
        self.nodes[number].add({account: Usage(requests=requests)})
        self.served[account] += requests

    @rule(number=followers)
    def send(self, number: int) -> None:
        if (batch := self.nodes[number].next_batch()) is not None:
            self.messages.append((number, batch))

    @rule(data=st.data(), at=st.none() | st.integers(0, 9))
    def arrive(self, data: st.DataObject, at: int | None) -> None:
        """Late, again, or out of order; the registry may be killed in it."""
        if self.messages:
            number, batch = data.draw(st.sampled_from(self.messages))
            with self.registry.dying(-1 if at is None else at):
                self.registry.receive(batch.source, batch.sequence, from_rows(batch.to_dict()["usage"]))
                self.answers.append((number, batch))
            if at is not None:
                self.registry = MortalFile(self.registry.path)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.answers:
            number, batch = data.draw(st.sampled_from(self.answers))
            self.nodes[number].on_batch_counted(batch)

    @rule(number=followers, at=st.integers(0, 9), sends=st.booleans())
    def kill(self, number: int, at: int, sends: bool) -> None:
        """Kill a follower inside of a call, or between two."""
        node = self.nodes[number]
        with node.dying(at):
            if sends:
                node.next_batch()
            else:
                node.add({ACCOUNTS[0]: Usage(requests=1)})
                self.served[ACCOUNTS[0]] += 1
        self.nodes[number] = self.started(number)

    @invariant()
    def never_too_much(self) -> None:
        assert self.counted() <= self.served


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_ACCOUNTS", 2)


TestExactlyOnce = ExactlyOnce.TestCase
TestExactlyOnce.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


def test_a_batch_is_what_was_counted_to_the_last_bit() -> None:
    usage = Usage(requests=3, generated_tokens=MAX_NUMBER - 1, compute_s=0.1 + 0.2, first_used_s=1.5, last_used_s=2.5)
    for seconds in (0.001, 0.3, 1e6):
        usage.hot.add(seconds)
    got = from_rows(UsageBatch("s", 1, json.dumps(to_rows({ACCOUNTS[1]: usage}))).to_dict()["usage"])
    assert module._row(got[ACCOUNTS[1]]) == module._row(usage)


@pytest.mark.parametrize("damage", [
    None, [], ["mia"], ["mia", "", {}, [1, 2]], [1, "", {}, None], ["mia", "", {"requests": -1}, None],
    ["mia", "", {"requests": 1.5}, None], ["mia", "", {"requests": True}, None],
    ["mia", "", {"compute_s": 1e400}, None], ["mia", "", {"hot": 1}, None], ["mia", "", {"requests": MAX_NUMBER}, None],
    ["mia", "", [], None], ["mia", "", {"requests": "1"}, None],
    ["mia", "", {}, [[[0], 0.0], [[0], 0.0]]], ["mia", None, {}, None],
])  # fmt: skip
def test_what_is_no_usage_is_refused(damage: Any) -> None:
    right = [[Histogram().counts, 0.0]] * 2
    row = [*damage[:3], right] if damage and len(damage) == 4 and damage[3] is None else damage
    with pytest.raises(ValueError, match=r"."):
        from_rows([row])
