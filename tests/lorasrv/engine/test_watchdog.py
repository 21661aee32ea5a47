"""The watchdog: a busy or idle engine is not stuck; a stuck one is reported, shown, and ended. On the tests' clock."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from clock import Clock

from lorasrv.engine import watchdog
from lorasrv.engine.watchdog import EXIT_CODE, Heartbeat, Watchdog

LIMIT_S = 10.0


class _Ended(Exception):
    """In the place of the process's end."""


class Scene:
    """An engine under a watchdog whose naps pass the clock's time, and no other; what it does is noted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.heartbeat = Heartbeat(self.clock)
        self.is_alive = True
        self.aborted: list[str] = []
        self.exit_codes: list[int] = []
        self.dumps: list[bool] = []
        self.timers: list[tuple[float, bool]] = []
        dumper = SimpleNamespace(
            dump_traceback=lambda file, all_threads: self.dumps.append(all_threads),
            dump_traceback_later=lambda seconds, exit, file: self.timers.append((seconds, exit)),
        )
        # In the watchdog's module only: the event loops of other threads sleep in real time.
        patch.setattr(watchdog, "asyncio", SimpleNamespace(sleep=self._sleep))
        patch.setattr(watchdog, "faulthandler", dumper)

    async def _sleep(self, seconds: float) -> None:
        self.clock.now += seconds

    def abort_all(self, why: str) -> None:
        self.aborted.append(why)

    def is_stuck(self) -> bool:
        return self.heartbeat.is_stuck(LIMIT_S)

    def step(self) -> None:
        """The first step, which may compile, is over, and another has begun."""
        self.heartbeat.on_step_computed()
        self.heartbeat.beat()

    def is_ended(self, looks: int, each_look: Callable[[int], object] = lambda _: None) -> bool:
        """Return whether the watchdog has ended the process within so many looks."""

        def end(code: int) -> None:
            self.exit_codes.append(code)
            raise _Ended

        watching: Any = Watchdog(self, LIMIT_S, end)
        reset_timer = watching._reset_timer

        def look() -> None:
            reset_timer()
            each_look(len(self.timers))
            if len(self.timers) > looks:
                raise TimeoutError

        watching._reset_timer = look
        with pytest.raises((_Ended, TimeoutError)) as stopped:
            asyncio.run(watching._watch())
        return stopped.type is _Ended


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_an_idle_engine_is_healthy_for_ever(scene: Scene) -> None:
    scene.heartbeat.beat()
    scene.heartbeat.rest()
    assert not scene.is_ended(10_000)
    assert scene.clock.now > 1000 + 10 * LIMIT_S
    assert not scene.is_stuck()


def test_a_busy_engine_is_not_stuck(scene: Scene) -> None:
    """A long prompt is a beat every chunk, though no request has an answer for minutes."""
    scene.heartbeat.on_step_computed()
    assert not scene.is_ended(2_000, lambda look: scene.heartbeat.beat() if look % 18 == 0 else None)
    assert not scene.dumps


def test_a_stuck_engine_is_reported_shown_and_ended(scene: Scene) -> None:
    scene.step()
    begun = scene.clock.now
    assert scene.is_ended(2_000)
    assert scene.exit_codes == [EXIT_CODE]
    assert scene.dumps == [True], "all threads' stacks, once"
    assert LIMIT_S < scene.clock.now - begun < 2 * LIMIT_S
    assert len(scene.aborted) == 1
    assert "stuck" in scene.aborted[0]


def test_the_first_step_may_compile(scene: Scene) -> None:
    scene.heartbeat.beat()
    scene.clock.now += 4 * LIMIT_S
    assert not scene.is_stuck()
    scene.clock.now += 2 * LIMIT_S
    assert scene.is_stuck()
    scene.heartbeat.beat()
    scene.heartbeat.on_step_computed()
    scene.clock.now += 1.5 * LIMIT_S
    assert scene.is_stuck()


def test_a_process_that_was_stopped_is_not_stuck(scene: Scene) -> None:
    """SIGSTOP, a debugger, a suspended container: time has passed for all threads, and the engine is next."""
    scene.step()

    def each(look: int) -> None:
        scene.clock.now += 100 * LIMIT_S * (look == 5)
        if look == 6:
            scene.heartbeat.beat()

    assert not scene.is_ended(12, each)


def test_a_dead_engine_ends_the_process(scene: Scene) -> None:
    scene.is_alive = False
    assert scene.is_ended(5)
    assert scene.exit_codes == [EXIT_CODE]


def test_the_last_resort_is_put_off_with_every_look_and_comes_later_than_the_watchdog(scene: Scene) -> None:
    assert not scene.is_ended(6, lambda look: scene.heartbeat.on_step_computed() if look == 3 else None)
    assert all(does_exit for _, does_exit in scene.timers)
    assert scene.timers[0][0] > 5 * LIMIT_S
    assert LIMIT_S < scene.timers[-1][0] < 5 * LIMIT_S


async def test_a_limit_of_nothing_watches_nothing() -> None:
    heartbeat = Heartbeat(clock := Clock())
    heartbeat.on_step_computed()
    heartbeat.beat()
    clock.now += 1e6
    watching = Watchdog(SimpleNamespace(heartbeat=heartbeat), 0.0)
    watching.start()
    assert watching._task is None
    watching.close()
    assert not heartbeat.is_stuck(0.0)
