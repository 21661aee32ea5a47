"""One at a time, keys in turn."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from adapter_store.quota import ANONYMOUS
from lorasrv.errors import EngineOverloaded
from lorasrv.fair_lock import FairLock


class Scene:
    """Whoever comes waits for its turn, and has it until it is told to go on."""

    def __init__(self, max_waiting: int = 100) -> None:
        self.turns = FairLock("things", max_waiting)
        self.had: list[str] = []
        self.at_once = self.most = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._schedule_running = asyncio.Semaphore(0)

    async def comes(self, *names: str) -> None:
        self.tasks += [asyncio.create_task(self._has_a_turn(name)) for name in names]
        await settled()

    async def go_on(self, number: int = 1) -> None:
        for _ in range(number):
            self._schedule_running.release()
            await settled()

    async def _has_a_turn(self, name: str) -> None:
        async with self.turns.turn(name.rstrip("0123456789")):
            self.had.append(name)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            try:
                await self._schedule_running.acquire()
            finally:
                self.at_once -= 1

    def is_free(self) -> bool:
        return not self.turns._is_taken and not self.turns._waiting and self.most <= 1


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_who_asks_for_much_waits_for_itself() -> None:
    async def scenario() -> None:
        scene = Scene()
        await scene.comes("ann1", "ann2", "ann3", "ann4", "bob1", "bob2")
        await scene.go_on()
        await scene.comes("carl1", "bob3")
        await scene.go_on(8)
        assert scene.had == ["ann1", "ann2", "bob1", "ann3", "carl1", "bob2", "ann4", "bob3"]
        assert scene.is_free()

    play(scenario)


def test_a_turn_is_passed_on_by_who_fails_or_leaves() -> None:
    async def scenario() -> None:
        scene = Scene()
        await scene.comes("ann1", "ann2", "bob1", "bob2", "carl1")
        scene.tasks[2].cancel()
        await settled()
        scene.tasks[0].cancel()
        scene.tasks[1].cancel()  # which has its turn in the same moment, or never
        await settled()
        assert scene.had == ["ann1", "bob2"]
        scene.tasks[3].cancel()
        await settled()
        assert scene.had[-1] == "carl1"
        scene._schedule_running.release()
        scene.tasks[4].cancel()
        await settled()
        assert scene.is_free()
        await scene.comes("dora")
        assert scene.had[-1] == "dora"
        await scene.go_on()
        with pytest.raises(RuntimeError):
            async with scene.turns.turn("eve"):
                raise RuntimeError
        assert scene.is_free()

    play(scenario)


def test_nobody_takes_a_turn_that_was_given() -> None:
    async def scenario() -> None:
        scene = Scene()
        await scene.comes("ann1", "bob1")
        scene._schedule_running.release()
        while scene.at_once:
            await asyncio.sleep(0)
        await scene.comes("carl1")
        await scene.go_on(2)
        assert scene.had == ["ann1", "bob1", "carl1"]
        assert scene.is_free()

    play(scenario)


def test_how_many_may_wait_and_how_many_of_one_key() -> None:
    async def scenario() -> None:
        scene = Scene(max_waiting=4)
        await scene.comes("ann1", "ann2", "ann3", "ann4", "bob1", "bob2", "carl1")
        refused = [str(task.exception()) for task in scene.tasks if task.done()]
        assert refused == [
            "2 things of this key wait for their turn; retry in 1 s",
            "4 things wait for their turn; retry in 1 s",
        ]
        assert isinstance(scene.tasks[3].exception(), EngineOverloaded)
        await scene.go_on(5)
        assert scene.had == ["ann1", "ann2", "bob1", "ann3", "bob2"]
        await scene.comes(*[ANONYMOUS] * 6)
        assert sum(task.done() for task in scene.tasks[-6:]) == 1, "without keys one may have all"
        await scene.go_on(5)
        assert scene.is_free()

    play(scenario)
