"""Who waits, and how long, when adapters are cold: first tokens by tier, and the streams of everybody else.

`bench_tiers.py ttft` and `bench_tiers.py itl` call this.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tier_assets import FEW, Files, names
from tier_common import ADAPTER_PAGES, BLOCK_BYTES, FOLDER, PROMPT_TOKENS, complain, pool_bytes, row, served, table
from tier_load import Answer, Ask, Client, connect, prompt, quantile

MAX_STREAM_TOKENS = 400
TRIES = 5
_LOAD_S = 'adapter_load_seconds_sum{tier="disk"}'
REFUSED_ARE_SPARED_S = 30.0
"""The server keeps adapters that it has refused a request for so long (lorasrv.scheduler.scheduler)."""


# Streams in the background.


@contextlib.asynccontextmanager
async def streaming(client: Client, models: Sequence[str]) -> AsyncIterator[None]:
    """Long answers for each of `models` for as long as this lasts; a stream that ends is begun again."""

    async def stream(model: str) -> None:
        rng = random.Random(model)
        while True:
            answer = await client.ask(Ask(model, prompt(rng), MAX_STREAM_TOKENS))
            if answer.error is not None:
                complain([answer])
                return

    tasks = [asyncio.create_task(stream(model)) for model in models]
    try:
        if tasks:
            await _until_running(client, len(tasks))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_running(client: Client, count: int) -> None:
    while (await client.metrics())["requests_running"] < count:
        await asyncio.sleep(0.2)
    await asyncio.sleep(1.0)


# Time to first token.


@dataclass(frozen=True)
class _Plan:
    """Which adapters are asked for: those of streams, those that are in the host cache, and fresh ones."""

    streams: list[str]
    on_host: list[str]
    fresh: list[str]

    @classmethod
    def make(cls, a: argparse.Namespace, pool_pages: int) -> "_Plan":
        every = names(a.adapters)
        # Twice what the pool can hold: most of them have left it when their turn comes.
        filled = 2 * pool_pages // ADAPTER_PAGES + a.count
        streams, rest = every[: a.streams], every[a.streams :]
        if len(rest) < filled + 2 * a.count:
            raise SystemExit(f"{a.count} a tier need {a.streams + filled + 2 * a.count} adapters: --adapters, --count")
        return cls(streams, random.Random(0).sample(rest[:filled], filled), rest[filled:])


def ttft(a: argparse.Namespace) -> None:
    """Requests one after another, by turns for an adapter that is in the pool, on host, on disk."""
    room = pool_bytes(PROMPT_TOKENS + MAX_STREAM_TOKENS, a.streams, 2 * FEW)
    plan = _Plan.make(a, room // BLOCK_BYTES)
    with served(FOLDER, a.serve_flags, pool_bytes=room) as server:
        asked, load_ms = asyncio.run(_ask_by_tier(a, server.url, plan))
    complain([answer for _, answer in asked])
    groups: dict[str, list[Answer]] = {}
    for kind, answer in asked:
        if answer.error is None:
            label = f"disk, file {kind}" if answer.tier == "disk" else str(answer.tier)
            groups.setdefault(label, []).append(answer)
    print(f"\n{a.streams} streams beside; pool of {room // BLOCK_BYTES} pages", flush=True)
    _print_ttft(groups)
    print(
        f"\nreading, checking and packing an adapter from disk took its thread {load_ms:.1f} ms on average", flush=True
    )


async def _ask_by_tier(a: argparse.Namespace, url: str, plan: _Plan) -> tuple[list[tuple[str, Answer]], float]:
    """(kind, answer) of each request, and the mean time of a load from disk without its wait for the engine, ms."""
    rng, files = random.Random(0), Files(FOLDER)
    fresh, on_host = iter(plan.fresh), itertools.cycle(plan.on_host)
    asked: list[tuple[str, Answer]] = []
    prepare: dict[str, Callable[[str], None]] = {"in memory": files.warm, "cold": files.cool}
    async with connect(url) as client:

        async def ask(kind: str, name: str) -> str | None:
            answer = await client.ask(Ask(name, prompt(rng), max_tokens=1))
            asked.append((kind, answer))
            return answer.tier

        print(f"asking for {len(plan.on_host)} adapters, so that they are on host", flush=True)
        complain(await client.loop([Ask(name, prompt(rng, 4), 1) for name in sorted(plan.on_host)], 4))
        before = await client.metrics()
        async with streaming(client, plan.streams):
            for turn in range(a.count):
                for kind in a.files.split(","):
                    name = next(fresh)
                    prepare[kind](name)
                    await ask(kind, name)
                await ask("again", name)
                for _ in range(TRIES):
                    if await ask("perhaps not in the pool", next(on_host)) == "host":
                        break
                if turn % 20 == 19:
                    print(f"  {turn + 1} of {a.count} turns", flush=True)
        after = await client.metrics()
    loads = after['adapter_loads{tier="disk"}'] - before['adapter_loads{tier="disk"}']
    seconds = after[_LOAD_S] - before[_LOAD_S]
    return asked, 1e3 * seconds / max(1.0, loads)


def _print_ttft(groups: dict[str, list[Answer]]) -> None:
    titles = ("tier", "requests", "TTFT p50 ms", "p90", "p99", "max", "load_ms p50", "p99", "queue_ms p50", "p99")
    table((*titles, "p50 over resident", "p99 over resident", "the same without load_ms p99"))
    resident = [x.ttft_ms for x in groups.get("resident", [])]
    for label, answers in sorted(groups.items(), key=lambda item: item[0], reverse=True):
        ttfts, loads, queues = ([getattr(x, n) for x in answers] for n in ("ttft_ms", "load_ms", "queue_ms"))
        times = [quantile(ttfts, q) for q in (0.5, 0.9, 0.99, 1.0)]
        times += [quantile(values, q) for values in (loads, queues) for q in (0.5, 0.99)]
        over = [quantile(ttfts, q) - quantile(resident, q) for q in (0.5, 0.99)]
        over.append(over[1] - quantile(loads, 0.99))
        row(label, len(answers), *(f"{t:.1f}" for t in times), *(f"{t:+.1f}" for t in over))


# Latency between tokens.


@dataclass(frozen=True)
class _Phase:
    """Streams beside loads at one rate."""

    rate: float
    gaps_ms: list[float]
    tok_per_s: float
    disk_loads_a_second: float
    errors: list[str]


def itl(a: argparse.Namespace) -> None:
    """Gaps of long answers while adapters load at several rates, the rates by turns."""
    rates = [float(rate) for rate in a.rates.split(",")]
    spared_s = REFUSED_ARE_SPARED_S if a.by == "reject" else a.deadline_ms / 1000
    room = pool_bytes(PROMPT_TOKENS + a.stream_tokens, a.streams, a.streams + 2 * FEW + int(max(rates) * spared_s))
    with served(FOLDER, a.serve_flags, pool_bytes=room, host_cache_bytes="32MiB") as server:
        phases = asyncio.run(_phases(a, server.url, rates))
    table(("loads/s", "loads/s from disk", "gaps", "ITL p50 ms", "p99", "max", "tok/s", "p99 to none", "tok/s to none"))
    least = _joined([phase for phase in phases if phase.rate == min(rates)])
    for rate in rates:
        rounds = [phase for phase in phases if phase.rate == rate]
        for label, phase in [(f"{rate:g}", _joined(rounds)), *((f"{rate:g}, one round", p) for p in rounds)]:
            p99 = quantile(phase.gaps_ms, 0.99)
            times = [quantile(phase.gaps_ms, 0.5), p99, max(phase.gaps_ms), phase.tok_per_s]
            ratios = p99 / quantile(least.gaps_ms, 0.99), phase.tok_per_s / least.tok_per_s
            loads, cells = f"{phase.disk_loads_a_second:.1f}", [f"{t:.1f}" for t in times]
            row(label, loads, len(phase.gaps_ms), *cells, *(f"{ratio:.2f}" for ratio in ratios))
    for error in {error for phase in phases for error in phase.errors}:
        print(f"\nfailed: {error}", flush=True)


def _joined(phases: Sequence[_Phase]) -> _Phase:
    tok_per_s = statistics.mean(phase.tok_per_s for phase in phases)
    loads = statistics.mean(phase.disk_loads_a_second for phase in phases)
    return replace(
        phases[0], gaps_ms=[g for p in phases for g in p.gaps_ms], tok_per_s=tok_per_s, disk_loads_a_second=loads
    )


async def _phases(a: argparse.Namespace, url: str, rates: Sequence[float]) -> list[_Phase]:
    every = names(a.adapters)
    streams, cold = every[: a.streams], itertools.cycle(every[a.streams :])
    phases = []
    async with connect(url) as client:
        complain(await client.loop([Ask(name, prompt(random.Random(0), 4), 1) for name in streams], len(streams)))
        for turn in range(a.rounds):
            for rate in rates:
                phases.append(await _phase(a, client, streams, cold, rate))
                print(f"  round {turn + 1}, {rate:g} loads/s: {len(phases[-1].gaps_ms)} gaps", flush=True)
    return phases


async def _phase(
    a: argparse.Namespace, client: Client, streams: Sequence[str], cold: Iterator[str], rate: float
) -> _Phase:
    """Gaps count while every stream runs."""
    rng = random.Random(0)
    asks = [Ask(name, prompt(rng), a.stream_tokens, every_token=True) for name in streams]
    running = [asyncio.create_task(client.ask(ask)) for ask in asks]
    await _until_running(client, len(asks))
    before, begin = await client.metrics(), time.perf_counter()
    errors: list[str] = []
    loading = asyncio.create_task(_load_at(a, client, cold, rate, errors))
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    end, after = time.perf_counter(), await client.metrics()
    loading.cancel()
    answers = await asyncio.gather(*running)
    complain(answers)
    gaps = [gap for answer in answers for gap in answer.gaps_ms(begin, end)]
    loads = after['adapter_loads{tier="disk"}'] - before['adapter_loads{tier="disk"}']
    await asyncio.gather(loading, return_exceptions=True)
    return _Phase(rate, gaps, len(gaps) / (end - begin), loads / (end - begin), errors)


async def _load_at(a: argparse.Namespace, client: Client, cold: Iterator[str], rate: float, errors: list[str]) -> None:
    """Ask for one cold adapter after another, and do not wait for any, until cancelled."""
    under_way: set[asyncio.Task[None]] = set()
    begin = time.perf_counter()
    try:
        for number in itertools.count() if rate else ():
            await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            task = asyncio.create_task(_ask_for(a, client, next(cold), errors))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    finally:
        await asyncio.gather(*under_way, return_exceptions=True)


async def _ask_for(a: argparse.Namespace, client: Client, name: str, errors: list[str]) -> None:
    if a.by == "warm":
        error = await client.warm(name, a.deadline_ms)
    else:
        error = (await client.ask(Ask(name, "cold", 1, on_cold="reject"))).error
        error = None if error is not None and "adapter_cold" in error else error or "not refused"
    if error is not None:
        errors.append(error)
