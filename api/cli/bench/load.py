"""Sends requests as an arrival says and keeps what came of them, also if it is interrupted."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from api.cli.bench.client import Ask, RequestOutcome


class ScheduledCall(Protocol):
    """What sends a request: `Caller`, or a test's own."""

    def __call__(self, ask: Ask) -> Coroutine[Any, Any, RequestOutcome]: ...


@dataclass
class Load:
    """What a load came to, so far: outcomes in the order of their ends."""

    outcomes: list[RequestOutcome] = field(default_factory=list)
    begun_s: float = 0.0
    ended_s: float | None = None

    @property
    def wall_s(self) -> float:
        """From the first request to the end of the last; of an interrupted load, to the last end that was seen."""
        if self.ended_s is not None:
            return self.ended_s - self.begun_s
        return max((outcome.ended_s for outcome in self.outcomes), default=self.begun_s) - self.begun_s


async def closed(
    ask: ScheduledCall, asks: Sequence[Ask], concurrency: int, load: Load, tell: Callable[[int], None] = lambda _: None
) -> None:
    """So many clients, each of which sends its next request when the last one is answered."""
    left: Iterator[Ask] = iter(asks)

    async def client() -> None:
        for one in left:
            load.outcomes.append(await ask(one))
            tell(len(load.outcomes))

    load.begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asks))):
            group.create_task(client())
    load.ended_s = time.perf_counter()


async def opened(
    ask: ScheduledCall, asks: Sequence[Ask], load: Load, tell: Callable[[int], None] = lambda _: None
) -> None:
    """Each at its time (`at_s`), however many wait then."""

    async def at_its_time(one: Ask) -> None:
        assert one.at_s is not None
        await asyncio.sleep(max(0.0, load.begun_s + one.at_s - time.perf_counter()))
        load.outcomes.append(await ask(one))
        tell(len(load.outcomes))

    load.begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for one in asks:
            group.create_task(at_its_time(one))
    load.ended_s = time.perf_counter()


def poisson(per_s: float, count: int, rng: random.Random) -> list[float]:
    """Seconds after the beginning at which `count` requests arrive; the first at once."""
    times, at_s = [], 0.0
    for _ in range(count):
        times.append(at_s)
        at_s += rng.expovariate(per_s)
    return times
