"""The watchdog: busy and idle are not stuck; who is stuck is told of, shown, and ended. On the tests' own clock."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from clock import Clock

from lorasrv.engine import watchdog
from lorasrv.engine.watchdog import EXIT_CODE, Heartbeat, Watchdog

LIMIT_S = 10.0


class Engine:
    """What is watched."""

    def __init__(self, clock: Clock) -> None:
        self.heartbeat = Heartbeat(clock)
        self.is_alive = True
        self.broken_off: list[str] = []

    def abort_all(self, why: str) -> None:
        self.broken_off.append(why)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> dict[str, list[Any]]:
    """What faulthandler was asked for; the loop's naps pass the clock's time, and no other."""
    asked: dict[str, list[Any]] = {"now": [], "later": [], "ended": []}

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    # In the watchdog's module only: the event loops of other threads sleep in real time.
    monkeypatch.setattr(watchdog, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(
        watchdog,
        "faulthandler",
        SimpleNamespace(
            dump_traceback=lambda file, all_threads: asked["now"].append(all_threads),
            dump_traceback_later=lambda seconds, exit, file: asked["later"].append((seconds, exit)),
        ),
    )
    return asked


class _Ended(Exception):
    """In the place of the process's end."""


def watch(
    engine: Engine,
    dumps: dict[str, list[Any]],
    each_look: Callable[[int], object],
    looks: int,
    limit_s: float = LIMIT_S,
) -> bool:
    """Whether the watchdog has ended the process within so many looks."""

    def end(code: int) -> None:
        dumps["ended"].append(code)
        raise _Ended

    watching = Watchdog(engine, limit_s, end)
    put_off = watching._reset_timer

    def look() -> None:
        put_off()
        each_look(len(dumps["later"]))
        if len(dumps["later"]) > looks:
            raise TimeoutError

    watching._reset_timer = look  # type: ignore[method-assign]
    try:
        asyncio.run(watching._watch())
    except _Ended:
        return True
    except TimeoutError:
        return False
    raise AssertionError("it stopped watching")


def test_idle_is_healthy_for_ever(clock, dumps) -> None:
    engine = Engine(clock)
    engine.heartbeat.beat()
    engine.heartbeat.rest()
    assert not watch(engine, dumps, lambda _: None, 10_000)
    assert clock.now > 1000 + 10 * LIMIT_S
    assert not engine.heartbeat.is_stuck(LIMIT_S)


def test_busy_is_not_stuck(clock, dumps) -> None:
    """A long prompt is a beat every chunk, though nobody has an answer for minutes."""
    engine = Engine(clock)
    engine.heartbeat.computed()
    assert not watch(engine, dumps, lambda look: engine.heartbeat.beat() if look % 18 == 0 else None, 2_000)
    assert not dumps["now"]


def test_stuck_is_told_shown_and_ended(clock, dumps) -> None:
    engine = Engine(clock)
    engine.heartbeat.computed()
    engine.heartbeat.beat()
    begun = clock.now
    assert watch(engine, dumps, lambda _: None, 2_000)
    assert dumps["ended"] == [EXIT_CODE]
    assert dumps["now"] == [True], "all threads' stacks, once"
    assert LIMIT_S < clock.now - begun < 2 * LIMIT_S
    assert len(engine.broken_off) == 1
    assert "stuck" in engine.broken_off[0]


def test_the_first_step_may_compile(clock, dumps) -> None:
    engine = Engine(clock)
    engine.heartbeat.beat()
    clock.now += 4 * LIMIT_S
    assert not engine.heartbeat.is_stuck(LIMIT_S)
    clock.now += 2 * LIMIT_S
    assert engine.heartbeat.is_stuck(LIMIT_S)
    engine.heartbeat.beat()
    engine.heartbeat.computed()
    clock.now += 1.5 * LIMIT_S
    assert engine.heartbeat.is_stuck(LIMIT_S)


def test_a_process_that_was_stopped_is_not_stuck(clock, dumps) -> None:
    """SIGSTOP, a debugger, a suspended container: time has passed for everybody."""
    engine = Engine(clock)
    engine.heartbeat.computed()
    engine.heartbeat.beat()

    def each(look: int) -> None:
        if look == 5:
            clock.now += 100 * LIMIT_S
        if look == 6:
            # The engine has had its turn.
            engine.heartbeat.beat()

    assert not watch(engine, dumps, each, 12)


def test_a_dead_engine_ends_the_process(clock, dumps) -> None:
    engine = Engine(clock)
    engine.is_alive = False
    assert watch(engine, dumps, lambda _: None, 5)
    assert dumps["ended"] == [EXIT_CODE]


def test_the_last_resort_is_put_off_with_every_look_and_comes_later_than_the_watchdog(clock, dumps) -> None:
    engine = Engine(clock)
    assert not watch(engine, dumps, lambda look: engine.heartbeat.computed() if look == 3 else None, 6)
    assert all(does_exit for _, does_exit in dumps["later"])
    assert dumps["later"][0][0] > 5 * LIMIT_S
    assert LIMIT_S < dumps["later"][-1][0] < 5 * LIMIT_S


def test_a_limit_of_nothing_watches_nothing(clock) -> None:
    engine = Engine(clock)
    engine.heartbeat.computed()
    engine.heartbeat.beat()
    clock.now += 1e6

    async def main() -> None:
        watching = Watchdog(engine, 0.0)
        watching.start()
        assert watching._task is None
        watching.close()

    asyncio.run(main())
    assert not engine.heartbeat.is_stuck(0.0)
