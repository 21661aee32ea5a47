"""Recorded programs: threads run each launch together, whenever they come."""

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgmv_kernels.cpu_kernels import program as kernel
from sgmv_kernels.cpu_runtime import launch, openmp
from sgmv_kernels.cpu_runtime.launch import NUM_ROWS, ROWS, Program, recording
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


def run_by(monkeypatch: pytest.MonkeyPatch, program: Program, delays: list[float]) -> list[float]:
    """Run a program by a thread for each delay, which comes so late; return the seconds that each took."""
    took = [0.0] * len(delays)

    def team(kernel: int, block: openmp.Arguments, threads: int, tasks: int) -> None:
        block[0] = block[1] = 0

        def member(number: int) -> None:
            time.sleep(delays[number])
            begun = time.perf_counter()
            openmp._KERNEL(kernel)(block)
            took[number] = time.perf_counter() - begun

        members = [threading.Thread(target=member, args=(number,)) for number in range(len(delays))]
        for each in members:
            each.start()
        for each in members:
            each.join(30.0)
            assert not each.is_alive()

    monkeypatch.setattr(launch, "run", team)
    program.run({ROWS: {NUM_ROWS: T}})
    return took


def test_nobody_waits_for_a_thread_that_never_comes(program, monkeypatch: pytest.MonkeyPatch) -> None:
    made = program.made
    run_by(monkeypatch, made, [0.0])
    assert torch.equal(program.got, program.want)
    assert sum(made.ticks().values()) > 0


def test_threads_may_come_at_any_launch(program, monkeypatch: pytest.MonkeyPatch) -> None:
    made, got = program.made, program.got
    alone = run_by(monkeypatch, made, [0.0])[0]
    draw = random.Random(3)
    for _ in range(150):
        got.zero_()
        run_by(monkeypatch, made, [draw.uniform(0.0, 1.2 * alone) for _ in range(3)])
        assert torch.equal(got, program.want)
        assert min(made.ticks().values()) > 0
    # One that comes when all is over has nothing to do.
    assert run_by(monkeypatch, made, [0.0, 0.5])[1] < 0.1


CLOCK_AT = 1000
COUNT_TICKS = kernel._count_ticks.py_func


class Turns:
    """Runs the kernel's own Python in threads that take turns at random, one access to shared memory a turn."""

    def __init__(self, seed: int, launches: int) -> None:
        self.memory: dict[int, int] = {}
        self._draw, self._launches = random.Random(seed), launches
        self._own = threading.local()
        self._inside: dict[object, int] = {}
        self.begun: list[int] = []
        self.began = self._now = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(kernel, "load_shared", self._turn(lambda at: self.memory.get(at, 0)))
        patch.setattr(kernel, "store_shared", self._turn(self.memory.__setitem__))
        patch.setattr(kernel, "add_shared", self._turn(self._add))
        patch.setattr(kernel, "replace_shared", self._turn(self._replace))
        patch.setattr(kernel, "call_kernel", self._call)
        patch.setattr(kernel, "i64", lambda items, at: at // launch.ITEM_WORDS)
        patch.setattr(kernel, "ticks", self._ticks)
        patch.setattr(kernel, "_count_ticks", COUNT_TICKS)
        patch.setattr(kernel, "yield_processor", lambda: None)

    def run(self, threads: int) -> None:
        args = {launch.BARRIER: 0, launch.CLOCK: CLOCK_AT, launch.NUM_ITEMS: self._launches, launch.ITEMS: 0}
        members = [SimpleNamespace(go=threading.Semaphore(0), back=threading.Semaphore(0)) for _ in range(threads)]
        errors: list[BaseException] = []

        def work(member: Any) -> None:
            self._own.member = member
            member.go.acquire()
            try:
                kernel._run_items.py_func(args)
            except BaseException as error:
                errors.append(error)
            member.over = True
            member.back.release()

        for member in members:
            threading.Thread(target=work, args=(member,), daemon=True).start()
        left = list(members)
        for _ in range(20_000):
            member = self._draw.choice(left)
            member.go.release()
            member.back.acquire()
            left = [each for each in left if not hasattr(each, "over")]
            if errors:
                raise errors[0]
            if not left:
                return
        raise AssertionError("threads wait for each other")

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

    def _replace(self, at: int, old: int, new: int) -> bool:
        is_old = self.memory.get(at, 0) == old
        if is_old:
            self.memory[at] = new
        return is_old

    def _ticks(self) -> int:
        self._now += 1
        self.began = self.began or self._now
        return self._now

    def _call(self, number: int, block: int) -> None:
        assert set(self._inside.values()) <= {number}, f"launch {number} runs beside {set(self._inside.values())}"
        self.begun.append(number)
        self._inside[self._own.member.go] = number
        for _ in range(self._draw.randrange(3)):
            self._pause()
        del self._inside[self._own.member.go]


def test_no_launch_runs_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(400):
        turns = Turns(seed, launches=4)
        turns.install(monkeypatch)
        turns.run(threads=2 + seed % 3)
        assert turns.begun == sorted(turns.begun)
        assert set(turns.begun) == set(range(4))
        spent = [turns.memory[CLOCK_AT + 8 * (1 + item)] for item in range(4)]
        assert min(spent) > 0
        assert sum(spent) == turns.memory[CLOCK_AT] - turns.began
