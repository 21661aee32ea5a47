"""What thousands of registered adapters cost a server, and what a cold one costs its request and everybody else.

    python tests/benchmarks/bench_tiers.py make --adapters 5000    # once: 2.3 GB under build/bench/tiers
    python tests/benchmarks/bench_tiers.py startup                 # seconds and memory until ready
    python tests/benchmarks/bench_tiers.py throughput              # traffic over 16 names and over all of them
    python tests/benchmarks/bench_tiers.py curve                   # pools and host caches that do not hold them
    python tests/benchmarks/bench_tiers.py ttft [--streams 8]      # first token by tier, idle or beside streams
    python tests/benchmarks/bench_tiers.py itl                     # streams while others make adapters load

Each prints Markdown tables; what is compared takes turns within one run. `--quick` is a smoke test. Traffic: prompts
of 48 words that no cache has seen, streamed /v1/completions, greedy, adapters by Zipf's law. Tiers are what the
answers told (`usage.lorasrv.adapter_tier`), loads and evictions what /metrics counted. ITL is measured from event to
event with one event a token.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from peer_servers import machine
from tier_assets import FEW, make, names, store_opens_s
from tier_common import FEW_FOLDER, FOLDER, PROMPT_TOKENS, complain, pool_bytes, row, served, table
from tier_load import TRAFFIC_TITLES, Ask, Traffic, connect, traffic, zipf_asks
from tier_waits import itl, ttft

# Start.


def startup(a: argparse.Namespace) -> None:
    """Seconds from exec to /ready and resident memory then, with none, few and all adapters registered."""
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as empty:
        folders = {0: Path(empty), FEW: FEW_FOLDER, a.adapters: FOLDER}
        seconds: dict[int, list[float]] = {count: [] for count in folders}
        resident: dict[int, list[float]] = {count: [] for count in folders}
        for turn in range(a.rounds + 1):
            for count, folder in folders.items():
                with served(folder, a.serve_flags) as server:
                    mb = _resident_bytes(server.pid) / 1e6
                if turn:  # the first round fills the page cache, and compiles kernels on a new machine
                    seconds[count].append(server.start_s)
                    resident[count].append(mb)
    table(("registered", "best s", "median s", "all s", "extra s, best", "extra s, median", "resident MB", "extra MB"))
    none_best, none_median, none_mb = min(seconds[0]), statistics.median(seconds[0]), statistics.median(resident[0])
    for count, all_s in seconds.items():
        best, median, mb = min(all_s), statistics.median(all_s), statistics.median(resident[count])
        every = ", ".join(f"{s:.2f}" for s in all_s)
        extra = (f"{best - none_best:+.2f}", f"{median - none_median:+.2f}", f"{mb:.0f}", f"{mb - none_mb:+.0f}")
        row(count, f"{best:.2f}", f"{median:.2f}", every, *extra)
    opening = [
        f"{name}: {1e3 * store_opens_s(folder):.0f} ms" for name, folder in ((FEW, FEW_FOLDER), (a.adapters, FOLDER))
    ]
    print(f"\nopening the store alone, median of 5: {', '.join(opening)}", flush=True)


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


# Throughput.


async def _traffic(a: argparse.Namespace, url: str, count: int, requests: int, seed: int) -> Traffic:
    async with connect(url) as client:
        asks = zipf_asks(names(count), requests, a.max_tokens, seed, a.zipf)
        return await traffic(client, asks, a.concurrency)


def _measured(a: argparse.Namespace, url: str, count: int, seed: int) -> Traffic:
    done = asyncio.run(_traffic(a, url, count, a.requests, seed))
    complain(done.answers)
    return done


def _warm_up(a: argparse.Namespace, url: str, count: int) -> None:
    """The most popular names once each, then some of the traffic."""

    async def ask_each() -> None:
        async with connect(url) as client:
            complain(await client.loop([Ask(name, "warm up", 1) for name in names(FEW)], a.concurrency))

    asyncio.run(ask_each())
    asyncio.run(_traffic(a, url, count, a.warm_requests, seed=-1))


def throughput(a: argparse.Namespace) -> None:
    """The same traffic over 16 names and over all, on a server with all and on one with 16; they take turns."""
    room = pool_bytes(PROMPT_TOKENS + a.max_tokens, a.concurrency, a.adapters)
    cells = [(FEW, FEW), (a.adapters, FEW), (a.adapters, a.adapters)]
    done: dict[tuple[int, int], list[Traffic]] = {cell: [] for cell in cells}
    with ExitStack() as stack:
        few = stack.enter_context(served(FEW_FOLDER, a.serve_flags, pool_bytes=room))
        urls = {FEW: few.url, a.adapters: stack.enter_context(served(FOLDER, a.serve_flags, pool_bytes=room)).url}
        print(f"a pool for all of them, {room / 1e6:.0f} MB, host cache at its default", flush=True)
        for registered, count in cells:
            _warm_up(a, urls[registered], count)
        table(("registered", "names", "round", *TRAFFIC_TITLES))
        for seed in range(a.rounds):
            for cell in cells:
                done[cell].append(_measured(a, urls[cell[0]], cell[1], seed))
                row(*cell, seed + 1, *done[cell][-1].cells())
    table(("registered", "names", "best tok/s", "ratio to 16 of 16"))
    least = max(t.tok_per_s for t in done[cells[0]])
    for cell, rounds in done.items():
        best = max(t.tok_per_s for t in rounds)
        row(*cell, f"{best:.1f}", f"{best / least:.2f}")


def curve(a: argparse.Namespace) -> None:
    """Traffic over all names with pools and host caches of several sizes, beside 16 names that all fit."""
    kv_tokens = PROMPT_TOKENS + a.max_tokens
    with served(FEW_FOLDER, a.serve_flags, pool_bytes=pool_bytes(kv_tokens, a.concurrency, a.adapters)) as few:
        _warm_up(a, few.url, FEW)
        table(("pool holds", "host cache", *TRAFFIC_TITLES))
        base = [_measured(a, few.url, FEW, seed=0)]
        row(f"{FEW} of {FEW}", "1GiB", *base[0].cells())
        points = []
        for point in a.points.split(","):
            fitting, host = point.split("/")
            room = pool_bytes(kv_tokens, a.concurrency, a.adapters if fitting == "all" else int(fitting))
            with served(FOLDER, a.serve_flags, pool_bytes=room, host_cache_bytes=host) as server:
                _warm_up(a, server.url, a.adapters)
                points.append((fitting, host, _measured(a, server.url, a.adapters, seed=0)))
            row(*points[-1][:2], *points[-1][2].cells())
        base.append(_measured(a, few.url, FEW, seed=0))
        row(f"{FEW} of {FEW}, again", "1GiB", *base[1].cells())
    table(("pool holds", "host cache", "tok/s", f"ratio to {FEW} names"))
    mean = statistics.mean(t.tok_per_s for t in base)
    for fitting, host, done in points:
        row(fitting, host, f"{done.tok_per_s:.1f}", f"{done.tok_per_s / mean:.2f}")


# The command.


def make_stores(a: argparse.Namespace) -> None:
    """All adapters in one store, the first few in another."""
    make(FEW_FOLDER, FEW)
    make(FOLDER, a.adapters)


MEASURES = {
    "make": make_stores,
    "startup": startup,
    "throughput": throughput,
    "curve": curve,
    "ttft": ttft,
    "itl": itl,
}
QUICK = {
    "adapters": 200,
    "rounds": 1,
    "requests": 24,
    "warm_requests": 8,
    "max_tokens": 8,
    "points": "8/1GiB,8/16MiB",
    "count": 6,
    "stream_tokens": 48,
    "rates": "0,5",
}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--adapters", type=int, default=5000, help="how many the store has, or is to have")
    parser.add_argument("--rounds", type=int, help="times that each configuration has its turn")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few of everything")
    parser.add_argument("--serve-flags", default="", help="more flags for lorasrv serve")
    group = parser.add_argument_group("throughput and curve")
    group.add_argument("--requests", type=int, default=128, help="of each row")
    group.add_argument("--warm-requests", type=int, default=48, help="to each server before")
    group.add_argument("--concurrency", type=int, default=16)
    group.add_argument("--max-tokens", type=int, default=24)
    group.add_argument("--zipf", type=float, default=1.1)
    points = "8/1GiB,32/1GiB,128/1GiB,8/16MiB,32/16MiB"
    group.add_argument("--points", default=points, help="adapters that the pool holds beside KV / --host-cache-bytes")
    group = parser.add_argument_group("ttft and itl")
    group.add_argument("--streams", type=int, help="long answers beside; ttft: 0, itl: 8")
    group.add_argument("--count", type=int, default=120, help="ttft: requests of each tier")
    group.add_argument("--files", default="in memory,cold", help="ttft: the kernel's page cache, by turns")
    group.add_argument("--cold", dest="files", action="store_const", const="cold", help="ttft: cold files only")
    group.add_argument("--rates", default="0,5,20", help="itl: adapters a second")
    group.add_argument("--by", choices=("warm", "reject"), default="warm", help="itl: how adapters are made to load")
    group.add_argument("--deadline-ms", type=int, default=2000, help="itl: of :warm")
    group.add_argument("--stream-tokens", type=int, default=300, help="itl: of each stream in each phase")
    return parser


def main() -> None:
    parser = options()
    known, _ = parser.parse_known_args()
    if known.quick:
        parser.set_defaults(**QUICK)
    a = parser.parse_args()
    a.rounds = a.rounds or (3 if a.measure == "startup" else 2)
    a.streams = (8 if a.measure == "itl" else 0) if a.streams is None else a.streams
    print(machine(), flush=True)
    begun = time.monotonic()
    MEASURES[a.measure](a)
    print(f"\n{a.measure}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
