"""Streamed completions sent at a fixed rate, whether or not the server keeps up, and the outcome of each."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

Body = Callable[[int], dict[str, Any]]
"""Function that returns the body of the n-th request."""


@dataclass
class Outcome:
    """Times in seconds on the monotonic clock; `arrivals` of every event with a choice."""

    sent: float
    status: int = 0
    retry_after: str | None = None
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """The error, whatever the status: its code, or the exception."""

    @property
    def is_refused(self) -> bool:
        """Return whether it was refused as by an overloaded server: 429, or too long a wait, with the time to retry."""
        return self.status in (429, 503, 504) and not self.arrivals

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and self.error is None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]


async def call(http: httpx2.AsyncClient, body: dict[str, Any]) -> Outcome:
    """Send one streamed completion and read it to its end; never raises for errors of the server or the network."""
    outcome = Outcome(time.monotonic())
    try:
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            outcome.status = response.status_code
            outcome.retry_after = response.headers.get("retry-after")
            if response.status_code != 200:
                outcome.error = json.loads(await response.aread())["error"]["code"]
            else:
                await _read(outcome, response)
    except (httpx2.HTTPError, OSError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def _read(outcome: Outcome, response: httpx2.Response) -> None:
    ended = False
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            ended = True
        elif data:
            event = json.loads(data)
            if "error" in event:
                outcome.error = event["error"].get("code")
                return
            if event["choices"]:
                outcome.arrivals.append(time.monotonic())
            outcome.text += "".join(choice["text"] for choice in event["choices"])
            outcome.usage = event.get("usage") or outcome.usage
    if not ended:
        outcome.error = "the stream broke off"


async def open_loop(
    http: httpx2.AsyncClient, body: Body, per_second: float, seconds: float, most: int, seed: int = 0
) -> list[Outcome]:
    """Send requests with Poisson arrivals for `seconds`, at most `most`; return when all have ended."""
    rng, begun, due = random.Random(seed), time.monotonic(), 0.0
    calls: list[asyncio.Task[Outcome]] = []
    while len(calls) < most:
        due += rng.expovariate(per_second)
        if due > seconds:
            break
        # Sleep even if late: the event loop must run for the requests in progress.
        await asyncio.sleep(max(0.0, begun + due - time.monotonic()))
        calls.append(asyncio.create_task(call(http, body(len(calls)))))
    return [await one for one in calls]


async def closed_loop(http: httpx2.AsyncClient, body: Body, clients: int, seconds: float) -> list[Outcome]:
    """Run `clients` clients, each with one request at a time, for `seconds`."""
    end, numbers = time.monotonic() + seconds, itertools.count()

    async def client() -> list[Outcome]:
        done = []
        while time.monotonic() < end:
            done.append(await call(http, body(next(numbers))))
        return done

    works: Sequence[Awaitable[list[Outcome]]] = [client() for _ in range(clients)]
    return [outcome for outcomes in await asyncio.gather(*works) for outcome in outcomes]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile by nearest rank; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
