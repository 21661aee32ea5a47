"""How well `lorasrv plan` predicts: three workloads are recorded by a real server, then each trace is replayed.

    python tests/benchmarks/bench_plan.py                    # some five minutes
    python tests/benchmarks/bench_plan.py --only closed      # one workload
    python tests/benchmarks/bench_plan.py --recalibrate      # measures this machine's costs first

Workloads: `closed`, 16 clients on 16 adapters, each asking again when it is answered (a replay of it is an open loop:
arrivals are fixed, and a wrong prediction does not feed back); `open`, Poisson arrivals over 64 adapters by Zipf's law,
answers of 8 to 64 tokens; `bursts`, 12 requests at once over 64 adapters in a pool where adapters and keys and values
compete. Adapters are those of `tier_assets`. Each row compares the figures that the server recorded with a replay by
costs that were measured before, and by those that the server itself learnt while serving.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peer_servers import machine
from tier_assets import make, names
from tier_common import FOLDER, complain, pool_bytes, row, served, table
from tier_load import Answer, Ask, Client, connect, prompt, zipf_names

ADAPTERS = 64
ZIPF = 1.0
WARM_UP = 4
COMPARED = ("tok_per_s", "ttft_p50_ms", "ttft_p99_ms")


@dataclass(frozen=True)
class Workload:
    """`gaps_s` between the requests, None: a closed loop of `concurrency`."""

    name: str
    asks: Sequence[Ask]
    gaps_s: Sequence[float] | None
    pool: int
    host_cache: str = "1GiB"
    concurrency: int = 16

    @property
    def flags(self) -> list[str]:
        return ["--pool-bytes", str(self.pool), "--host-cache-bytes", self.host_cache]


def workloads(scale: float) -> list[Workload]:
    rng = random.Random(0)

    def asks(count: int, adapters: int, low: int, high: int) -> list[Ask]:
        chosen = zipf_names(names(adapters), max(8, round(scale * count)), ZIPF, rng)
        return [Ask(name, prompt(rng, rng.randint(16, 96)), rng.randint(low, high)) for name in chosen]

    closed, open_, bursts = asks(128, 16, 32, 48), asks(160, ADAPTERS, 8, 64), asks(144, ADAPTERS, 16, 48)
    return [
        Workload("closed", closed, None, pool_bytes(256, 32, ADAPTERS)),
        Workload("open", open_, [rng.expovariate(2.0) for _ in open_], pool_bytes(256, 32, ADAPTERS)),
        Workload("bursts", bursts, [0.0 if n % 12 else 5.0 for n in range(len(bursts))], pool_bytes(160, 8, 8), "4MiB"),
    ]


async def drive(url: str, work: Workload) -> list[Answer]:
    """Some requests to the base first, which are no part of the figures: they touch pages and compile nothing new."""
    async with connect(url) as client:
        rng = random.Random(1)
        warm_up = [Ask("smollm2-135m", prompt(rng), 8) for _ in range(WARM_UP)]
        complain(await client.loop(warm_up, WARM_UP))
        if work.gaps_s is None:
            return await client.loop(work.asks, work.concurrency)
        return await _open_loop(client, work.asks, work.gaps_s)


async def _open_loop(client: Client, asks: Sequence[Ask], gaps_s: Sequence[float]) -> list[Answer]:
    running = []
    for ask, gap_s in zip(asks, gaps_s, strict=True):
        await asyncio.sleep(gap_s)
        running.append(asyncio.create_task(client.ask(ask)))
    return await asyncio.gather(*running)


def without_warm_up(trace: Path) -> None:
    """Drop the requests to the base, and begin at the first that is left."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    kept = [line for line in lines if line.get("adapter") is not None]
    begin = min(line["arrival_s"] for line in kept)
    trace.write_text("".join(json.dumps({**k, "arrival_s": k["arrival_s"] - begin}) + "\n" for k in kept))


def plan(trace: Path, work: Workload, *more: str) -> dict[str, dict[str, float]]:
    command = [str(Path(sys.executable).parent / "lorasrv"), "plan", "--trace", str(trace), "--predict-only", "--json"]
    done = subprocess.run([*command, *work.flags, *more], check=True, stdout=subprocess.PIPE, text=True)
    plan: dict[str, dict[str, float]] = json.loads(done.stdout)
    return plan


def record(work: Workload, trace: Path, flags: str) -> tuple[list[Answer], dict[str, dict[str, float]]]:
    """The answers, and the plan by what the server had learnt at the end."""
    with served(FOLDER, flags, pool_bytes=work.pool, host_cache_bytes=work.host_cache, record_trace=trace) as server:
        answers = asyncio.run(drive(server.url, work))
        without_warm_up(trace)
        return answers, plan(trace, work, "--server", server.url)


def report(work: Workload, by: str, done: dict[str, dict[str, float]]) -> None:
    cells = []
    for name in COMPARED:
        cells += [
            f"{done['predicted'][name]:.1f}",
            f"{done['measured'][name]:.1f}",
            f"{done['ratio'].get(name, 0):.2f}",
        ]
    row(work.name, by, *cells, f"{done['replay']['times_real_time']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="workloads, separated by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many requests")
    parser.add_argument("--recalibrate", action="store_true", help="measure this machine's costs first")
    parser.add_argument("--keep", type=Path, help="folder for the traces")
    parser.add_argument("--serve-flags", default="", help="more flags for lorasrv serve")
    a = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    print(machine(), flush=True)
    make(FOLDER, ADAPTERS)
    wanted = a.only.split(",") if a.only else None
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as temporary:
        folder = a.keep or Path(temporary)
        again = ["--recalibrate"] if a.recalibrate else []
        titles = [
            f"{figure} {what}" for figure in ("tok/s", "TTFT p50 ms", "p99 ms") for what in ("plan", "real", "ratio")
        ]
        lines = []
        for work in workloads(a.scale):
            if wanted is not None and work.name not in wanted:
                continue
            trace = folder / f"{work.name}.jsonl"
            trace.unlink(missing_ok=True)
            answers, learnt = record(work, trace, a.serve_flags)
            complain(answers)
            lines += [(work, "measured before", plan(trace, work, *again)), (work, "learnt by the server", learnt)]
            again = []
        table(("workload", "costs", *titles, "times real time"))
        for line in lines:
            report(*line)


if __name__ == "__main__":
    main()
