"""Scenarios run once, watched, and what crashes would have left of them."""

import contextlib
import copy
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from disk_watch import DiskWatch
from forgetful_disk import KILLED, ForgetfulDisk, Loss, Op, crash_states, read_tree, write_tree
from store_scenarios import SCENARIOS, Hand, Outcome, prepare

from adapter_store.errors import AdapterError


@dataclass
class Run:
    """A scenario that happened: the disk before, every change of it, what was visible when."""

    name: str
    before: ForgetfulDisk
    ops: list[Op]
    outcome: Outcome
    turns: list[str]
    """The calls, by kind."""
    _passed: set[int] = field(default_factory=set)

    def sites(self) -> set[str]:
        """Who called fsync."""
        return {op.site for op in self.ops if op.kind == "sync"}

    def failure(
        self, folder: Path, losses: Iterable[Loss], dropped_sites: frozenset[str] = frozenset()
    ) -> tuple[int, str | None]:
        """Crash after each change: (how many different disks were looked at, what was wrong with the first bad one)."""
        looked = 0
        for done, tree in crash_states(copy.deepcopy(self.before), self.ops, losses, dropped_sites):
            state = hash((done, frozenset(tree.items())))
            if state in self._passed:
                continue
            looked += 1
            top = folder / f"crash-{looked}"
            top.mkdir()
            write_tree(tree, top)
            try:
                with fast_fsync():
                    self.outcome.check(top, done)
            except (AssertionError, AdapterError) as error:
                return looked, f"{self.name}: {type(error).__name__}: {error}"
            finally:
                shutil.rmtree(top)
            self._passed.add(state)
        return looked, None


def run(name: str, top: Path) -> Run:
    """Let a scenario happen, undisturbed."""
    scenario, outcome, turns = SCENARIOS[name], Outcome(), []
    prepare(scenario, top)
    before = ForgetfulDisk(top)
    watch, hand = DiskWatch(top, lambda number, kind: turns.append(kind)), Hand(top)
    with watch.active():
        scenario.open(hand)
        with watch.paused():
            outcome.note(hand)
        for step in scenario.steps:
            step(hand)
            watch.acknowledge()
            with watch.paused():
                outcome.note(hand)
        hand.close()
    assert watch.failures == []
    assert watch.disk.tree(KILLED) == read_tree(top), "something changed the disk unseen"
    return Run(name, before, watch.ops, outcome, turns)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in memory, if there is one: SQLite waits for its disk thousands of times in these tests."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@contextlib.contextmanager
def fast_fsync() -> Iterator[None]:
    """No waiting for the disk where nothing is pulled out of it."""
    with mock.patch("os.fsync"):
        yield
