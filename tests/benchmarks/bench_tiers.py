"""Measure what thousands of registered adapters cost a server, and what cold ones cost their and other requests.

    python tests/benchmarks/bench_tiers.py make --adapters 5000    # once: 2.3 GB under build/bench/tiers
    python tests/benchmarks/bench_tiers.py startup                 # seconds and memory until ready
    python tests/benchmarks/bench_tiers.py throughput              # traffic over 16 names and over all of them
    python tests/benchmarks/bench_tiers.py ttft [--streams 8]      # first token by tier, idle or beside streams
    python tests/benchmarks/bench_tiers.py itl                     # streams while other adapters load
    python tests/benchmarks/bench_tiers.py uploads --rates 0,1,4   # streams while adapters are uploaded
    python tests/benchmarks/bench_tiers.py forms                   # adapters in a pool, and their loads, by form

Adapters: rank 4 on q_proj and v_proj of the built-in base in bf16, 460 KB each, written straight into a store folder.
Markdown tables; what is compared takes turns within one run. Traffic: prompts of 48 words that no cache has seen,
streamed /v1/completions, greedy, adapters by Zipf's law. Tiers are from `usage.lorasrv.adapter_tier` of the answers,
loads and evictions from /metrics. ITL is measured from event to event with one event per token.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from harness import (
    ASSETS,
    PAGE_BYTES,
    PAGE_TOKENS,
    Server,
    adapter_folders,
    arguments,
    closed_loop,
    finish_cancelled,
    lorasrv_server,
    machine_line,
    open_store,
    quantiles,
    register_seeded,
    row,
    shapes_of,
    table,
    unique_prompt,
)
from flood import Outcome, call
from process_watch import held_by

from adapter_store.spec import FORMS
from api.cli.bench.workload import Law
from api.client import Client

FEW = 16
FOLDER = ASSETS / "tiers" / "store"
FEW_FOLDER = ASSETS / f"tiers-{FEW}" / "store"
RANK, MODULES = 4, ("self_attn.q_proj", "self_attn.v_proj")
ADAPTER_PAGES = 2
PROMPT_WORDS, PROMPT_TOKENS = 48, 80
MAX_STREAM_TOKENS = 400
TRIES = 5
MANY, MANY_POOL_MIB = 32, 128
TIERS = ("resident", "host", "disk")
DISK_LOADS, HOST_LOADS = (f'lorasrv_adapter_loads_total{{tier="{tier}"}}' for tier in ("disk", "host"))
LOAD_SECONDS = 'lorasrv_adapter_load_seconds_sum{tier="disk"}'
COUNTED = (DISK_LOADS, HOST_LOADS, 'lorasrv_adapter_evictions_total{tier="pool"}', "lorasrv_preemptions_total")


def names(count: int) -> list[str]:
    """Return ids in the order of their popularity."""
    return [f"a{number:04d}" for number in range(count)]


def make_store(folder: Path, count: int) -> None:
    """Register adapters that are missing in a store folder; may be interrupted and called again."""
    begun = time.monotonic()
    with open_store(folder, shapes_of()) as store:
        register_seeded(store, names(count), RANK, MODULES)
    print(f"{folder.parent.name}: {count} adapters, {time.monotonic() - begun:.0f} s", flush=True)


def server_of(folder: Path, more_flags: str = "", **flags: object) -> AbstractContextManager[Server]:
    """Start a server on a store that `make` has filled; `pool_bytes=1` is `--pool-bytes 1`."""
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return lorasrv_server(folder, *given, *more_flags.split())


def pool_bytes(kv_tokens: int, requests: int, adapters: int) -> int:
    """Return the size of a pool for the keys and values of so many requests and so many adapters."""
    return PAGE_BYTES * (requests * -(-kv_tokens // PAGE_TOKENS) + adapters * ADAPTER_PAGES)


# Requests and their answers.


def completion(model: str, prompt: str, max_tokens: int, *, every_token: bool = False) -> dict[str, Any]:
    """Return a greedy request of exactly `max_tokens` tokens. `every_token`: an event for each of them."""
    options = {"include_usage": True, "continuous_usage_stats": every_token}
    fixed = {"temperature": 0, "ignore_eos": True, "stream_options": options}
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, **fixed}


def ttft_ms(answer: Outcome) -> float:
    """Return the time to the first token."""
    return 1e3 * answer.ttft


def told(answer: Outcome, what: str) -> Any:
    """Return a field of `usage.lorasrv`: `adapter_tier`, `load_ms` or `queue_ms`."""
    return answer.usage["lorasrv"][what]


class Caller:
    """One server, asked by many clients at once."""

    def __init__(self, http: httpx2.AsyncClient, url: str) -> None:
        self.http, self._metrics = http, Client(url).metrics

    async def ask(self, body: dict[str, Any]) -> Outcome:
        answer = await call(self.http, body)
        if answer.error is None and (tokens := answer.usage["completion_tokens"]) != body["max_tokens"]:
            answer.error = f"{tokens} tokens instead of {body['max_tokens']}"
        return answer

    async def metrics(self) -> dict[str, float]:
        return await asyncio.to_thread(self._metrics)


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Caller]:
    """Open a connection pool to a server."""
    limits = httpx2.Limits(max_connections=256)
    async with httpx2.AsyncClient(base_url=url, timeout=900, trust_env=False, limits=limits) as http:
        yield Caller(http, url)


def complain(answers: Sequence[Any]) -> None:
    """Print how many answers failed, if any did."""
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors:
        print(f"\n{len(errors)} of {len(answers)} failed; the first: {errors[0]}", flush=True)


# Start.


def startup(a: argparse.Namespace) -> None:
    """Measure seconds from exec to /ready and resident memory then, with none, few and all adapters registered."""
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as empty:
        folders = {0: Path(empty), FEW: FEW_FOLDER, a.adapters: FOLDER}
        found: dict[int, list[tuple[float, float]]] = {count: [] for count in folders}
        for turn in range(a.rounds + 1):
            for count, folder in folders.items():
                with server_of(folder, a.serve_flags) as server:
                    done = server.start_s, held_by(server.pid).rss_bytes / 1e6
                if turn:  # the first round fills the page cache, and compiles kernels on a new machine
                    found[count].append(done)
    table(("registered", "best s", "median s", "all s", "resident MB", "opening the store alone, ms"))
    shapes = shapes_of()
    for count, runs in found.items():
        seconds, resident = zip(*runs, strict=True)
        begun = time.perf_counter()
        if count:
            open_store(folders[count], shapes).close()
        opening = f"{1e3 * (time.perf_counter() - begun):.0f}"
        every = ", ".join(f"{s:.2f}" for s in seconds)
        row(count, min(seconds), statistics.median(seconds), every, f"{statistics.median(resident):.0f}", opening)


# Throughput.


@dataclass(frozen=True)
class Traffic:
    """Figures of one closed loop; `counted`: what the server's counters rose by."""

    tok_per_s: float
    num_adapters: int
    answers: list[Outcome]
    counted: list[float]

    def cells(self) -> list[object]:
        good = [a for a in self.answers if a.error is None]
        tiers = Counter(told(a, "adapter_tier") for a in good)
        shares = (tiers[tier] / max(1, len(good)) for tier in TIERS)
        return [
            self.num_adapters,
            f"{self.tok_per_s:.1f}",
            *(f"{ms:.0f}" for ms in quantiles(map(ttft_ms, good), 0.5, 0.99)),
            " / ".join(f"{100 * share:.0f}" for share in shares),
            *(f"{count:.0f}" for count in self.counted),
            len(self.answers) - len(good),
        ]


TRAFFIC_TITLES = (
    *("distinct", "tok/s", "TTFT p50 ms", "TTFT p99 ms", "resident / host / disk %", "disk loads"),
    *("host loads", "evictions", "preemptions", "failed"),
)


async def _traffic(a: argparse.Namespace, url: str, count: int, requests: int, seed: int) -> Traffic:
    rng = random.Random(seed)
    picked = Law("zipf", a.zipf).pick(count, requests, rng)
    asks = [completion(f"a{number:04d}", unique_prompt(rng, PROMPT_WORDS), a.max_tokens) for number in picked]
    async with connect(url) as caller:
        before, begun = await caller.metrics(), time.perf_counter()
        answers = await closed_loop(caller.ask, asks, a.concurrency)
        seconds, after = time.perf_counter() - begun, await caller.metrics()
    complain(answers)
    tokens = sum(answer.usage["completion_tokens"] for answer in answers if answer.error is None)
    counted = [after.get(name, 0.0) - before.get(name, 0.0) for name in COUNTED]
    return Traffic(tokens / seconds, len({*picked}), answers, counted)


async def _warm_up(a: argparse.Namespace, url: str, count: int) -> None:
    """Ask for the most popular names once each, then send some of the traffic."""
    async with connect(url) as caller:
        complain(await closed_loop(caller.ask, [completion(name, "warm up", 1) for name in names(FEW)], a.concurrency))
    await _traffic(a, url, count, a.warm_requests, seed=-1)


def throughput(a: argparse.Namespace) -> None:
    """Send the same traffic over 16 names and over all, to a server with all and to one with 16, in turn."""
    room = pool_bytes(PROMPT_TOKENS + a.max_tokens, a.concurrency, a.adapters)
    cells = [(FEW, FEW), (a.adapters, FEW), (a.adapters, a.adapters)]
    best: dict[tuple[int, int], float] = dict.fromkeys(cells, 0.0)
    with ExitStack() as stack:
        folders = {FEW: FEW_FOLDER, a.adapters: FOLDER}
        servers = {n: server_of(folder, a.serve_flags, pool_bytes=room) for n, folder in folders.items()}
        urls = {n: stack.enter_context(server).url for n, server in servers.items()}
        print(f"a pool for all of them, {room / 1e6:.0f} MB, host cache at its default", flush=True)
        for registered, count in cells:
            asyncio.run(_warm_up(a, urls[registered], count))
        table(("registered", "adapters in the traffic", "round", *TRAFFIC_TITLES))
        for seed in range(a.rounds):
            for cell in cells:
                done = asyncio.run(_traffic(a, urls[cell[0]], cell[1], a.requests, seed))
                best[cell] = max(best[cell], done.tok_per_s)
                row(*cell, seed + 1, *done.cells())
    table(("registered", "adapters in the traffic", "best tok/s", "ratio to 16 of 16"))
    for cell, rate in best.items():
        row(*cell, f"{rate:.1f}", rate / best[cells[0]])


# Streams in the background.


@asynccontextmanager
async def streaming(caller: Caller, models: Sequence[str]) -> AsyncIterator[None]:
    """Keep long answers for each of `models` going; a stream that ends is begun again."""

    async def stream(model: str) -> None:
        rng = random.Random(model)
        while True:
            answer = await caller.ask(completion(model, unique_prompt(rng, PROMPT_WORDS), MAX_STREAM_TOKENS))
            if answer.error is not None:
                complain([answer])
                return

    tasks = [asyncio.create_task(stream(model)) for model in models]
    try:
        if tasks:
            await _until_running(caller, len(tasks))
        yield
    finally:
        await finish_cancelled(tasks)


async def _until_running(caller: Caller, count: int) -> None:
    while (await caller.metrics())["lorasrv_requests_running"] < count:
        await asyncio.sleep(0.2)
    await asyncio.sleep(1.0)


# Time to first token.


class Files:
    """The weights files of a store folder, which the next read finds in memory or has to fetch from the disk."""

    def __init__(self, folder: Path) -> None:
        with open_store(folder, shapes_of()) as store:
            self._paths = {
                str(record.adapter_id): folder / "blobs" / "sha256" / record.versions[-1].weights_digest
                for record in store.list_adapters()
            }

    def warm(self, name: str) -> None:
        self._paths[name].read_bytes()

    def cool(self, name: str) -> None:
        """Drop the file from the kernel's page cache."""
        fd = os.open(self._paths[name], os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def ttft(a: argparse.Namespace) -> None:
    """Send requests one after another, in turn for an adapter that is in the pool, on host, on disk."""
    room = pool_bytes(PROMPT_TOKENS + MAX_STREAM_TOKENS, a.streams, 2 * FEW)
    every = names(a.adapters)
    # Twice what the pool can hold: most of them have left it when their turn comes.
    filled = a.streams + 2 * (room // PAGE_BYTES) // ADAPTER_PAGES + a.count
    if len(every) < filled + 2 * a.count:
        raise SystemExit(f"{a.count} a tier need {filled + 2 * a.count} adapters: --adapters, --count")
    streams, on_host, fresh = every[: a.streams], every[a.streams : filled], every[filled:]
    files = Files(FOLDER)
    with server_of(FOLDER, a.serve_flags, pool_bytes=room) as server:
        asked, load_ms = asyncio.run(_ask_by_tier(a, server.url, files, streams, on_host, iter(fresh)))
    complain([answer for _, answer in asked])
    groups: dict[str, list[Outcome]] = {}
    for kind, answer in asked:
        if answer.error is None:
            tier = told(answer, "adapter_tier")
            label = f"disk, file {kind}" if tier == "disk" else str(tier)
            groups.setdefault(label, []).append(answer)
    print(f"\n{a.streams} streams beside; pool of {room // PAGE_BYTES} pages", flush=True)
    _print_ttft(groups)
    print(f"\nreading, checking and packing an adapter from disk took its thread {load_ms:.1f} ms on average")


async def _ask_by_tier(
    a: argparse.Namespace, url: str, files: Files, streams: list[str], on_host: list[str], fresh: Iterator[str]
) -> tuple[list[tuple[str, Outcome]], float]:
    """Return (kind, answer) of each request, and the mean ms of a load from disk without its wait for the engine."""
    rng, asked = random.Random(0), []
    prepare: dict[str, Callable[[str], None]] = {"in memory": files.warm, "cold": files.cool}
    async with connect(url) as caller:

        async def ask(kind: str, name: str) -> str | None:
            answer = await caller.ask(completion(name, unique_prompt(rng, PROMPT_WORDS), 1))
            asked.append((kind, answer))
            return None if answer.error else told(answer, "adapter_tier")

        print(f"asking for {len(on_host)} adapters, so that they are on host", flush=True)
        complain(await closed_loop(caller.ask, [completion(name, unique_prompt(rng, 4), 1) for name in on_host], 4))
        turns = itertools.cycle(rng.sample(on_host, len(on_host)))
        before = await caller.metrics()
        async with streaming(caller, streams):
            for turn in range(a.count):
                chosen = {kind: next(fresh) for kind in prepare}
                for kind, name in chosen.items():
                    prepare[kind](name)
                    await ask(kind, name)
                await ask("again", chosen["cold"])
                for _ in range(TRIES):
                    if await ask("perhaps not in the pool", next(turns)) == "host":
                        break
                if turn % 20 == 19:
                    print(f"  {turn + 1} of {a.count} turns", flush=True)
        after = await caller.metrics()
    loads, seconds = (after[name] - before.get(name, 0.0) for name in (DISK_LOADS, LOAD_SECONDS))
    return asked, 1e3 * seconds / max(1.0, loads)


def _print_ttft(groups: dict[str, list[Outcome]]) -> None:
    titles = ("found", "requests", "TTFT p50 ms", "p90", "p99", "max", "load p50", "p99", "queue p50", "p99")
    table((*titles, "p50 above resident", "p99 above resident"))
    resident = quantiles(map(ttft_ms, groups.get("resident", [])), 0.5, 0.99)
    for label, answers in sorted(groups.items(), reverse=True):
        times = quantiles(map(ttft_ms, answers), 0.5, 0.9, 0.99, 1.0)
        for what in ("load_ms", "queue_ms"):
            times += quantiles((told(answer, what) for answer in answers), 0.5, 0.99)
        above = [times[0] - resident[0], times[2] - resident[1]]
        row(label, len(answers), *(f"{t:.1f}" for t in times), *(f"{t:+.1f}" for t in above))


# Latency between tokens.


Work = Callable[[Caller, int], Awaitable[httpx2.Response]]
"""The n-th operation beside the streams."""


@dataclass(frozen=True)
class _Phase:
    """Streams beside operations at one rate; `took_ms`: of each operation that succeeded."""

    rate: float
    seconds: float
    gaps_ms: list[float]
    took_ms: list[float]
    errors: list[str]


def itl(a: argparse.Namespace) -> None:
    """Measure the gaps of long answers while other adapters load from disk."""
    every = names(a.adapters)

    async def warm(caller: Caller, number: int) -> httpx2.Response:
        name = every[a.streams + number % (len(every) - a.streams)]
        return await caller.http.post(f"/v1/adapters/{name}:warm", json={"deadline_ms": a.deadline_ms})

    _measure_beside(a, "loads", warm, FOLDER)


def uploads(a: argparse.Namespace) -> None:
    """Measure the gaps of long answers while adapters of rank 16 on all linears are uploaded, 9.8 MB each."""
    [folder] = adapter_folders(1)
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = (folder / "adapter_model.safetensors").read_bytes()[:-256]

    async def upload(caller: Caller, number: int) -> httpx2.Response:
        # Small numbers still, of whatever type they are.
        changed = weights + bytes((number % 60, number // 60)) * 128
        digest = f"sha256:{(await asyncio.to_thread(hashlib.sha256, changed)).hexdigest()}"
        sent = await caller.http.put(f"/v1/blobs/{digest}", content=changed)
        body = {"id": f"upload-{number}", "config": config, "weights": digest}
        return await caller.http.post("/v1/adapters", json=body) if sent.is_success else sent

    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as temporary:
        store = Path(temporary) / "store"
        make_store(store, a.streams)
        _measure_beside(a, "uploads", upload, store)


def _measure_beside(a: argparse.Namespace, what: str, work: Work, store: Path) -> None:
    adapters = a.streams + 2 * FEW + int(max(a.rates) * a.deadline_ms / 1000)
    room = pool_bytes(PROMPT_TOKENS + a.stream_tokens, a.streams, adapters)
    with server_of(store, a.serve_flags, pool_bytes=room, host_cache_bytes="32MiB") as server:
        phases = asyncio.run(_phases(a, server.url, what, work))
    times = ("ITL p50 ms", "p90 ms", "p99 ms", "max ms", "tok/s", "tok/s ratio")
    table((f"{what}/s requested", "round", "done", "ms, mean", "gaps", *times))
    least = statistics.mean(len(p.gaps_ms) / p.seconds for p in phases if p.rate == min(a.rates))
    for number, phase in enumerate(phases):
        tok_per_s = len(phase.gaps_ms) / phase.seconds
        took = f"{statistics.mean(phase.took_ms):.0f}" if phase.took_ms else "–"
        gaps = (f"{ms:.1f}" for ms in quantiles(phase.gaps_ms, 0.5, 0.9, 0.99, 1.0))
        counts = (number // len(a.rates) + 1, len(phase.took_ms), took, len(phase.gaps_ms))
        row(f"{phase.rate:g}", *counts, *gaps, f"{tok_per_s:.1f}", tok_per_s / least)
    for error in {error for phase in phases for error in phase.errors}:
        print(f"\nfailed: {error}", flush=True)


async def _phases(a: argparse.Namespace, url: str, what: str, work: Work) -> list[_Phase]:
    phases, rng, numbers = [], random.Random(0), itertools.count()
    streams = names(a.streams)
    async with connect(url) as caller:
        warm_up = [completion(name, unique_prompt(rng, 4), 1) for name in streams]
        complain(await closed_loop(caller.ask, warm_up, len(streams)))
        for turn in range(a.rounds):
            for rate in a.rates:
                phases.append(await _phase(a, caller, streams, work, numbers, rate))
                print(f"  round {turn + 1}, {rate:g} {what}/s: {len(phases[-1].gaps_ms)} gaps", flush=True)
    return phases


async def _phase(
    a: argparse.Namespace, caller: Caller, streams: Sequence[str], work: Work, numbers: Iterator[int], rate: float
) -> _Phase:
    """Measure gaps for as long as every stream runs."""
    rng = random.Random(0)
    prompts = {name: unique_prompt(rng, PROMPT_WORDS) for name in streams}
    asks = [completion(name, prompt, a.stream_tokens, every_token=True) for name, prompt in prompts.items()]
    running = [asyncio.create_task(caller.ask(ask)) for ask in asks]
    await _until_running(caller, len(asks))
    begin, took_ms, errors = time.monotonic(), list[float](), list[str]()
    beside = asyncio.create_task(_at_rate(caller, work, numbers, rate, took_ms, errors))
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    end = time.monotonic()
    await finish_cancelled([beside])
    answers = await asyncio.gather(*running)
    complain(answers)
    times = ([t for t in answer.arrivals if begin <= t <= end] for answer in answers)
    gaps = [1e3 * (later - earlier) for one in times for earlier, later in itertools.pairwise(one)]
    return _Phase(rate, end - begin, gaps, took_ms, errors)


async def _at_rate(
    caller: Caller, work: Work, numbers: Iterator[int], rate: float, took_ms: list[float], errors: list[str]
) -> None:
    """Start one operation after another, without waiting for any, until cancelled."""
    begun = time.monotonic()

    async def timed(number: int) -> None:
        sent = time.monotonic()
        response = await work(caller, number)
        if response.is_success:
            took_ms.append(1e3 * (time.monotonic() - sent))
        else:
            errors.append(f"{response.status_code} {response.text[:300]}")

    async with asyncio.TaskGroup() as group:
        for number in itertools.count() if rate else ():
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            group.create_task(timed(next(numbers)))


# Forms.


def forms(a: argparse.Namespace) -> None:
    """Ask adapters of rank 16 on all linears once each, in turn; count those that a pool holds afterwards."""
    folders, pool = adapter_folders(MANY), MANY_POOL_MIB << 20
    print(f"\n{MANY} adapters, pool of {MANY_POOL_MIB} MiB", flush=True)
    table(("form", "resident", "pages of one", "ms of a load from disk", "of a copy to the pool"))
    for form in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            flags = ("--adapter-storage", form, "--pool-bytes", pool, *a.serve_flags.split())
            with lorasrv_server(Path(folder), *flags, adapters=folders) as server, Client(server.url) as client:
                asyncio.run(_ask_each(server.url, [folder.name for folder in folders]))
                metrics, held = client.metrics(), client.pool()["adapters"]
        seconds = [LOAD_SECONDS.replace("disk", tier) for tier in ("disk", "host")]
        means = [f"{1e3 * metrics[name] / metrics[name.replace('_sum', '_count')]:.1f}" for name in seconds]
        row(form, len(held), held[0]["pages"], *means)


async def _ask_each(url: str, adapters: Sequence[str]) -> None:
    async with connect(url) as caller:
        complain([await caller.ask(completion(name, name, 2)) for name in adapters])


# The command.


def make(a: argparse.Namespace) -> None:
    """Put all adapters into one store, the first few into another."""
    make_store(FEW_FOLDER, FEW)
    make_store(FOLDER, a.adapters)


MEASURES = {
    "make": make,
    "startup": startup,
    "throughput": throughput,
    "ttft": ttft,
    "itl": itl,
    "uploads": uploads,
    "forms": forms,
}
QUICK = {"adapters": 200, "rounds": 1, "requests": 24, "warm_requests": 8, "max_tokens": 8, "count": 6}


def main() -> None:
    a = arguments(
        __doc__,
        MEASURES,
        quick={**QUICK, "stream_tokens": 150, "rates": (0.0, 5.0)},
        adapters=(5000, "how many the store has, or is to have"),
        rounds=(int, "times that each configuration has its turn; startup: 3, others: 2"),
        serve_flags=("", "more flags for lorasrv serve"),
        requests=(128, "throughput: of each row"),
        warm_requests=(48, "throughput: to each server before"),
        concurrency=(16, "throughput: clients"),
        max_tokens=(24, "throughput: of each answer"),
        zipf=(1.1, "throughput: exponent"),
        streams=(int, "long answers beside; ttft: 0, itl, uploads: 8"),
        count=(120, "ttft: requests of each tier"),
        rates=((0.0, 5.0, 20.0), "itl: loads a second; uploads: uploads a second"),
        deadline_ms=(2000, "itl: of :warm"),
        stream_tokens=(300, "itl, uploads: of each stream in each phase"),
    )
    a.rounds = a.rounds or (3 if a.measure == "startup" else 2)
    a.streams = (8 if a.measure in ("itl", "uploads") else 0) if a.streams is None else a.streams
    print(machine_line(), flush=True)
    begun = time.monotonic()
    MEASURES[a.measure](a)
    print(f"\n{a.measure}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
