"""Reads that never return: their waiters fail, other reads go on, and what is left behind is bounded."""

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from disk_time import DiskTime
from server import eventually

from lorasrv.errors import AdapterLoadTimeout
from lorasrv.worker.disk_threads import MAX_REPLACED, DiskReadStats, DiskThreads

NUM_THREADS, LIMIT_S = 2, 60.0
MOST_HUNG = NUM_THREADS + MAX_REPLACED


class Disk:
    """Reads that hang until their gate is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.time = DiskTime(patch)
        self.threads = DiskThreads(NUM_THREADS, "test", LIMIT_S)
        self.gates: dict[object, threading.Event] = {}
        self.late: list[object] = []

    def hang(self, key: object) -> "Future[Any]":
        gate = self.gates[key] = threading.Event()

        def work() -> object:
            assert gate.wait(30)
            return key

        return self.threads.submit(key, work, self.late.append)

    def give_up(self, *hung: "Future[Any]") -> None:
        """Let time pass until these have failed."""
        eventually(lambda: self.time.let_pass(self.threads, LIMIT_S) or all(read.done() for read in hung))

    def read(self, key: object) -> "Future[Any]":
        return self.threads.submit(key, lambda: key)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    for gate in disk.gates.values():
        gate.set()
    eventually(lambda: disk.threads.stats().num_hung == 0)
    disk.threads.close()


def test_a_read_that_hangs_fails_those_of_its_key_alone(disk: Disk) -> None:
    hung = disk.hang("a")
    behind = disk.read("a")
    disk.give_up(hung)
    for read in (hung, behind):
        with pytest.raises(AdapterLoadTimeout, match=r"within 60 s \(--load-timeout-s\)"):
            read.result(30)
    with pytest.raises(AdapterLoadTimeout, match="an earlier read"):
        disk.read("a").result(30)
    assert [disk.read(key).result(30) for key in "bcd"] == ["b", "c", "d"]
    assert disk.threads.stats() == DiskReadStats(num_given_up=1, num_hung=1)
    disk.gates["a"].set()
    eventually(lambda: disk.late == ["a"])
    assert disk.read("a").result(30) == "a"
    assert disk.threads.stats() == DiskReadStats(num_given_up=1, num_hung=0)


def test_when_no_thread_is_left_every_read_fails_until_one_returns(disk: Disk) -> None:
    hung = [disk.hang(number) for number in range(MOST_HUNG)]
    queued = disk.read("queued")
    disk.give_up(*hung)
    for read in (*hung, queued):
        assert isinstance(read.exception(30), AdapterLoadTimeout)
    with pytest.raises(AdapterLoadTimeout, match="none is read until it does"):
        disk.read("x").result(0)
    assert disk.threads.stats().num_hung == MOST_HUNG
    disk.gates[0].set()
    eventually(lambda: disk.late == [0])
    assert disk.read("x").result(30) == "x"


def test_reads_of_a_key_run_one_after_another() -> None:
    threads = DiskThreads(NUM_THREADS, "test", None)
    gate, under_way, ended = threading.Event(), [], []

    def work(number: int) -> None:
        under_way.append(number)
        assert gate.wait(30)
        ended.append((number, len(under_way)))
        under_way.remove(number)

    reads = [threads.submit("a", partial(work, number)) for number in range(20)]
    other = threads.submit("b", gate.set)
    for read in (*reads, other):
        read.result(30)
    assert ended == [(number, 1) for number in range(20)]
    threads.close()


def test_errors_are_the_caller_s_and_a_cancelled_read_is_not_begun() -> None:
    threads = DiskThreads(1, "test", None)
    gate, begun = threading.Event(), []
    first = threads.submit("a", lambda: gate.wait(30))
    cancelled, broken = threads.submit("b", lambda: begun.append(1)), threads.submit("b", lambda: 1 / 0)
    assert cancelled.cancel()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        broken.result(30)
    assert (first.result(0), begun) == (True, [])
    threads.close()


def test_closing_leaves_behind_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    disk.threads = DiskThreads(1, "test", LIMIT_S)
    hung, waiting = disk.hang("a"), disk.hang("b")
    eventually(hung.running)
    disk.threads.close(wait_s=0.01)
    for read in (hung, waiting, disk.read("c")):
        with pytest.raises(AdapterLoadTimeout, match="shutting down"):
            read.result(0)
    disk.gates["a"].set()
    eventually(lambda: disk.late == ["a"])


@pytest.mark.parametrize("fails", [False, True])
def test_idle_threads_keep_nothing_of_what_they_read(fails: bool) -> None:
    """A read holds its adapter in the store, and a deleted one stays until nothing holds it."""

    class Hold:
        def read(self) -> object:
            if fails:
                raise OSError("gone")
            return self

    threads, holds = DiskThreads(NUM_THREADS, "test", 60.0), [Hold() for _ in range(4)]
    held = [weakref.ref(hold) for hold in holds]
    done = [threads.submit(number, hold.read) for number, hold in enumerate(holds)]
    assert all(bool(future.exception(30)) is fails for future in done)
    del holds, done
    eventually(lambda: not any(hold() for hold in held))
    threads.close()
