"""Recorded programs: threads run each launch together, whenever they come."""

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server import eventually

from sgmv_kernels.cpu_arguments import team
from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_kernels import program as kernel
from sgmv_kernels.cpu_runtime.launch import ROWS, Program, recording
from sgmv_kernels.cpu_runtime.team import take_team
from sgmv_kernels.ops import Ops

OPS = Ops(torch.device("cpu"), "numba")
LAUNCHES, T, H = 60, 64, 256


@pytest.fixture
def program() -> SimpleNamespace:
    """A program for three threads whose launches read what all threads wrote in the one before; where its result comes
    to lie, and what that must be.
    """
    x, weight = torch.randn(T, H), torch.linspace(0.5, 1.5, H)

    def computed() -> torch.Tensor:
        y = x
        for _ in range(LAUNCHES // 2):
            y = OPS.gelu(OPS.add_rms_norm_(y, None, weight, 1e-5))
        return y

    want = computed()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    with recording() as recorded:
        got = computed()
    torch.set_num_threads(threads)
    # Launches point to the inputs.
    return SimpleNamespace(made=Program(recorded), got=got, want=want, inputs=(x, weight))


def begin(program: SimpleNamespace) -> None:
    program.got.zero_()
    program.made.prepare({ROWS: {NUM_ROWS: T}})
    program.made.begin()


def test_who_begins_takes_part_when_it_likes(program) -> None:
    made, draw = program.made, random.Random(3)
    begin(program)
    made.complete()
    seconds = sum(made.seconds().values())
    for _ in range(150):
        begin(program)
        for _ in range(draw.randrange(4)):
            time.sleep(draw.choice([0.0, draw.uniform(0.0, seconds)]))
            made.take_part(draw.uniform(0.0, 0.5 * seconds))
        made.complete()
        assert torch.equal(program.got, program.want)
        assert min(made.seconds().values()) > 0


def test_the_others_go_on_alone(program) -> None:
    """A run is complete before anyone asks, and tells when it was."""
    # How long a tick is: an end that was noticed late says too much.
    for _ in range(5):
        begin(program)
        program.made.complete()
    for pause in (0.0, 0.2):  # they sleep in between
        time.sleep(pause)
        begun = time.perf_counter()
        begin(program)
        eventually(lambda: not program.made._team.is_open)
        assert torch.equal(program.got, program.want)
        time.sleep(0.2)
        asked = time.perf_counter()
        program.made.complete()
        assert begun < program.made.ended_s < asked - 0.1


def test_without_others_it_is_computed_in_the_end(program) -> None:
    """Another thread has the team."""
    taken = take_team(3)
    try:
        begin(program)
        program.made.take_part(1e-4)
        program.made.complete()
    finally:
        taken.give_back()
    assert torch.equal(program.got, program.want)


def test_the_next_run_is_prepared_meanwhile(program) -> None:
    """Its rows are those that it was prepared for."""
    made = program.made
    begin(program)
    made.prepare({ROWS: {NUM_ROWS: 1}})
    made.complete()
    assert torch.equal(program.got, program.want)
    program.got.zero_()
    made.begin()
    made.complete()
    assert torch.equal(program.got[:1], program.want[:1])
    assert not program.got[1:].any()


PARTS = "_open", "_take_part", "wait_for", "_count_ticks", "_help", "_wake", "_sleep", "_compute"
CLOCK_AT, WORD = 100_000, 8


class Turns:
    """Runs the kernel's own Python in threads that take turns at random, one access to shared memory a turn."""

    def __init__(self, seed: int, threads: int, launches: int) -> None:
        self.memory: dict[int, int] = {WORD * team.HELPERS: threads - 1}
        self._draw, self._threads, self._launches = random.Random(seed), threads, launches
        self._changes = self._draw.choice([0.02, 0.2, 1.0])
        self._own = threading.local()
        self._inside: dict[object, int] = {}
        # The threads that ran each launch of the region, in order.
        self.ran: list[list[object]] = []
        self._now = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in PARTS:
            patch.setattr(kernel, name, getattr(kernel, name).py_func)
        patch.setattr(kernel, "load_shared", self._turn(lambda at: self.memory.get(at, 0)))
        patch.setattr(kernel, "store_shared", self._turn(self.memory.__setitem__))
        patch.setattr(kernel, "add_shared", self._turn(self._add))
        patch.setattr(kernel, "swap_shared", self._turn(self._swap))
        patch.setattr(kernel, "replace_shared", self._turn(self._replace))
        patch.setattr(kernel, "post", self._turn(lambda at: self._add(at, 1)))
        patch.setattr(kernel, "wait", self._wait)
        patch.setattr(kernel, "call_kernel", self._call)
        patch.setattr(kernel, "i64", lambda items, at: items + at // team.ITEM_WORDS)
        patch.setattr(kernel, "ticks", self._ticks)
        patch.setattr(kernel, "yield_processor", lambda: None)
        patch.setattr(kernel, "SPINS", 2)

    def run(self, regions: int) -> None:
        """Open regions one after another, and take part in each now and then."""
        members = [
            SimpleNamespace(go=threading.Semaphore(0), back=threading.Semaphore(0)) for _ in range(self._threads)
        ]
        errors: list[BaseException] = []
        for number in range(1, self._threads):
            self.memory[WORD * (team.SLEEPERS + team.SLEEPER_WORDS * number + 1)] = -number

        def work(number: int) -> None:
            self._own.member = members[number]
            members[number].go.acquire()
            try:
                kernel._help({team.TEAM: 0, team.NUMBER: number}) if number else self._open_regions(regions)
            except BaseException as error:
                errors.append(error)
            members[number].over = True
            members[number].back.release()

        for number in range(self._threads):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        left, member = list(members), members[0]
        for _ in range(200_000):
            # Now and then one goes on for long while the others have no processor.
            if member not in left or self._draw.random() < self._changes:
                member = self._draw.choice(left)
            member.go.release()
            member.back.acquire()
            left = [each for each in left if not hasattr(each, "over")]
            if errors:
                raise errors[0]
            if not left:
                return
        raise AssertionError("threads wait for each other")

    def _open_regions(self, regions: int) -> None:
        for region in range(regions):
            count = self._draw.randint(1, self._launches)
            # One region's launches are not another's.
            self.ran, self._items = [[] for _ in range(count)], 1000 * (1 + region)
            self._compute(self._items, count, self._draw.choice([0, 1, team.NEVER]))
            for _ in range(self._draw.randrange(3)):
                self._compute(0, 0, self._draw.randint(1, 20))
            self._compute(0, 0, team.NEVER)
            assert not self._inside, "a launch still runs"
            assert all(self.ran), "a launch was left out"
            assert all(CLOCK_AT + WORD * (1 + self._items + item) in self.memory for item in range(count))
        self.memory[WORD * team.STOP] = 1
        for number in range(1, self._threads):
            self._add(-number, 1)

    def _compute(self, items: int, count: int, num_ticks: int) -> None:
        new = {team.NEW_ITEMS: items, team.NEW_COUNT: count, team.NEW_CLOCK: CLOCK_AT}
        kernel._compute({team.TEAM: 0, **new, team.TICKS: num_ticks})

    def _pause(self) -> None:
        self._own.member.back.release()
        self._own.member.go.acquire()

    def _turn(self, access: Any) -> Any:
        def done(*args: int) -> Any:
            self._pause()
            return access(*args)

        return done

    def _add(self, at: int, value: int) -> int:
        self.memory[at] = self.memory.get(at, 0) + value
        return self.memory[at] - value

    def _swap(self, at: int, value: int) -> int:
        was, self.memory[at] = self.memory.get(at, 0), value
        return was

    def _replace(self, at: int, old: int, new: int) -> bool:
        is_old = self.memory.get(at, 0) == old
        if is_old:
            self.memory[at] = new
        return is_old

    def _wait(self, semaphore: int) -> int:
        self._pause()
        if self._draw.random() < 0.1:
            return -1  # a signal
        while not self.memory.get(semaphore):
            self._pause()
        self.memory[semaphore] -= 1
        return 0

    def _ticks(self) -> int:
        self._now += 1
        return self._now

    def _call(self, number: int, block: int) -> None:
        assert set(self._inside.values()) <= {number}, f"launch {number} runs beside {set(self._inside.values())}"
        item, me = number - self._items, self._own.member.go
        assert 0 <= item < len(self.ran), "a launch of another region"
        assert all(self.ran[:item]), "a launch was left out"
        assert not any(self.ran[item + 1 :]), "a launch was run again"
        assert me not in self.ran[item], "a thread has two places in scratch memory"
        self.ran[item].append(me)
        self._inside[me] = number
        for _ in range(self._draw.randrange(3)):
            self._pause()
        del self._inside[me]


def test_launches_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(120):
        turns = Turns(seed, threads=1 + seed % 4, launches=4)
        turns.install(monkeypatch)
        turns.run(regions=6)
        monkeypatch.undo()
