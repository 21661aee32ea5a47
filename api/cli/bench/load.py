"""Send requests with a given arrival process and keep their outcomes, even after an interruption."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from api.cli.bench.client import BenchRequest, RequestOutcome


class ScheduledCall(Protocol):
    """Send a request; implemented by `BenchClient.send` and by tests."""

    def __call__(self, request: BenchRequest, /) -> Coroutine[Any, Any, RequestOutcome]: ...


@dataclass
class Load:
    """Hold the outcomes so far, in the order in which requests ended."""

    outcomes: list[RequestOutcome] = field(default_factory=list)
    begun_s: float = 0.0
    ended_s: float | None = None

    @property
    def wall_s(self) -> float:
        """Return the seconds from the first request to the end of the last; to the last recorded end if interrupted."""
        if self.ended_s is not None:
            return self.ended_s - self.begun_s
        return max((outcome.ended_s for outcome in self.outcomes), default=self.begun_s) - self.begun_s


async def closed_loop(
    send: ScheduledCall,
    requests: Sequence[BenchRequest],
    concurrency: int,
    load: Load,
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Run `concurrency` clients; each sends its next request after the previous answer."""
    left: Iterator[BenchRequest] = iter(requests)

    async def client() -> None:
        for one in left:
            load.outcomes.append(await send(one))
            on_progress(len(load.outcomes))

    load.begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(client())
    load.ended_s = time.perf_counter()


async def open_loop(
    send: ScheduledCall,
    requests: Sequence[BenchRequest],
    load: Load,
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Send each request at its time (`at_s`), however many others are unanswered."""

    async def at_its_time(one: BenchRequest) -> None:
        assert one.at_s is not None
        await asyncio.sleep(max(0.0, load.begun_s + one.at_s - time.perf_counter()))
        load.outcomes.append(await send(one))
        on_progress(len(load.outcomes))

    load.begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for one in requests:
            group.create_task(at_its_time(one))
    load.ended_s = time.perf_counter()


def poisson(per_s: float, count: int, rng: random.Random) -> list[float]:
    """Return arrival times of `count` requests in seconds, the first one at 0."""
    times, at_s = [], 0.0
    for _ in range(count):
        times.append(at_s)
        at_s += rng.expovariate(per_s)
    return times
