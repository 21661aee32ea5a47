"""Measure how well `lorasrv plan` predicts: a real server records three workloads, then each trace is replayed.

    python tests/benchmarks/bench_plan.py                    # some five minutes
    python tests/benchmarks/bench_plan.py --only closed      # one workload
    python tests/benchmarks/bench_plan.py --recalibrate      # measures this machine's costs first

Workloads: `closed`, 16 clients on 16 adapters, each asking again when it is answered (a replay of it is an open loop:
arrivals are fixed, and a wrong prediction does not feed back); `open`, Poisson arrivals over 64 adapters by Zipf's law,
answers of 8 to 64 tokens; `bursts`, 12 requests at once over 64 adapters in a pool where adapters and keys and values
compete. Adapters are those of `bench_tiers.py`. Each row compares the figures that the server recorded with a replay by
costs that were measured before, and by those that the server itself learned while serving.
"""

import asyncio
import itertools
import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import arguments, closed_loop, machine_line, open_loop, row, run_json, table, unique_prompt
from bench_tiers import FOLDER, make_store, pool_bytes, server_of

from api.cli.bench.client import BenchClient, BenchRequest
from api.cli.bench.workload import Law
from lorasrv.config import BUILTIN_MODEL

ADAPTERS = 64
CLIENTS = 16
WARM_UP = 4
COMPARED = ("tok_per_s", "ttft_p50_ms", "ttft_p99_ms")


@dataclass(frozen=True)
class Workload:
    """Requests, at their times or in a closed loop, and the memory of the server."""

    name: str
    requests: Sequence[BenchRequest]
    pool: int
    host_cache: str = "1GiB"


def workloads(scale: float) -> list[Workload]:
    """Return the three workloads with `scale` times as many requests."""
    rng = random.Random(0)

    def drawn(count: int, adapters: int, low: int, high: int) -> list[BenchRequest]:
        chosen = Law("zipf", 1.0).pick(adapters, max(8, round(scale * count)), rng)
        return [
            BenchRequest(f"a{k:04d}", unique_prompt(rng, rng.randint(16, 96)), rng.randint(low, high)) for k in chosen
        ]

    def after(gaps_s: Sequence[float], requests: list[BenchRequest]) -> list[BenchRequest]:
        return [replace(one, at_s=at_s) for one, at_s in zip(requests, itertools.accumulate(gaps_s), strict=True)]

    closed, open_, bursts = drawn(128, 16, 32, 48), drawn(160, ADAPTERS, 8, 64), drawn(144, ADAPTERS, 16, 48)
    open_ = after([rng.expovariate(2.0) for _ in open_], open_)
    bursts = after([0.0 if n % 12 else 5.0 for n in range(len(bursts))], bursts)
    return [
        Workload("closed", closed, pool_bytes(256, 32, ADAPTERS)),
        Workload("open", open_, pool_bytes(256, 32, ADAPTERS)),
        Workload("bursts", bursts, pool_bytes(160, 8, 8), "4MiB"),
    ]


async def drive(url: str, work: Workload) -> None:
    """Send the workload, after a few requests to the base that touch pages and are dropped from the trace."""
    async with BenchClient(url) as client:
        rng = random.Random(1)
        warm_up = [BenchRequest(BUILTIN_MODEL, unique_prompt(rng, 48), 8) for _ in range(WARM_UP)]
        outcomes = await closed_loop(client.send, warm_up, WARM_UP)
        if work.requests[0].at_s is None:
            outcomes += await closed_loop(client.send, work.requests, CLIENTS)
        else:
            outcomes += await open_loop(client.send, work.requests)
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    if failed:
        print(f"\n{len(failed)} of {len(outcomes)} failed; the first: {failed[0].failure}, {failed[0].detail}")


def without_warm_up(trace: Path) -> None:
    """Drop the requests to the base, and begin at the first that is left."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    kept = [line for line in lines if line.get("adapter") is not None]
    begin = min(line["arrival_s"] for line in kept)
    trace.write_text("".join(json.dumps({**k, "arrival_s": k["arrival_s"] - begin}) + "\n" for k in kept))


def plan(trace: Path, work: Workload, *more: str) -> dict[str, dict[str, float]]:
    """Return what `lorasrv plan` predicts for a trace, beside what the trace has recorded."""
    flags = ["--pool-bytes", work.pool, "--host-cache-bytes", work.host_cache, *more]
    return run_json("plan", "--trace", trace, "--predict-only", "--json", *flags)


def report(work: Workload, by: str, done: dict[str, dict[str, float]]) -> None:
    """Print a row: predicted, measured and their ratio for each figure."""
    cells = [
        cell
        for name in COMPARED
        for cell in (f"{done['predicted'][name]:.1f}", f"{done['measured'][name]:.1f}", done["ratio"].get(name, 0.0))
    ]
    row(work.name, by, *cells, f"{done['replay']['times_real_time']:.0f}")


def main() -> None:
    a = arguments(
        __doc__,
        only=(("closed", "open", "bursts"), "workloads"),
        scale=(1.0, "times as many requests"),
        recalibrate=(False, "measure this machine's costs first"),
        keep=(Path, "folder for the traces"),
        serve_flags=("", "more flags for lorasrv serve"),
    )
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    print(machine_line(), flush=True)
    make_store(FOLDER, ADAPTERS)
    lines, again = [], ["--recalibrate"] if a.recalibrate else []
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as temporary:
        for work in (work for work in workloads(a.scale) if work.name in a.only):
            trace = (a.keep or Path(temporary)) / f"{work.name}.jsonl"
            trace.unlink(missing_ok=True)
            memory = {"pool_bytes": work.pool, "host_cache_bytes": work.host_cache}
            with server_of(FOLDER, a.serve_flags, **memory, record_trace=trace) as server:
                asyncio.run(drive(server.url, work))
                without_warm_up(trace)
                learned = plan(trace, work, "--server", server.url)
            lines += [(work, "measured before", plan(trace, work, *again)), (work, "learned by the server", learned)]
            again = []
    titles = [f"{figure} {kind}" for figure in ("tok/s", "TTFT p50 ms", "p99 ms") for kind in ("plan", "real", "ratio")]
    table(("workload", "costs", *titles, "times real time"))
    for line in lines:
        report(*line)


if __name__ == "__main__":
    main()
