"""One pool for adapters and KV against fixed splits of the same bytes, and what the allocator costs.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_pool.py corners [--corners few/short,many/long]
    python tests/benchmarks/bench_pool.py allocator

`corners`: few or many adapters (rank 16 on all linears, 27 pages each) times short or long prompts, in a pool so small
that memory is what limits. All requests of a corner are there from the beginning, each for an adapter drawn at random;
`EngineCore` is stepped in this process, adapters are loaded in threads out of host memory. Splits (`serve
--adapter-pool-fraction`) take turns with the shared pool on the same model and memory; the better of two rounds counts.

`allocator`: microseconds of `PagePool`'s calls while random holders come and go, by the pool's size.
"""

import argparse
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import BUILTIN_MODEL, EngineConfig, MemoryOptions
from lorasrv.engine.core import EngineCore, EngineParts
from lorasrv.engine.factory import build
from lorasrv.engine.input_processor import InputProcessor
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.memory.page_pool import PagePool
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.worker.adapter_loader import ThreadedLoader

ASSETS = Path(__file__).parents[2] / "build" / "bench"
BLOCK_BYTES = 2 * 192 * 16 * 2 * 30
FEW, MANY = 4, 64
IDLE_S = 0.05


@dataclass(frozen=True)
class Corner:
    adapters: int
    prompt_tokens: int
    requests: int


CORNERS = {
    "few/short": Corner(FEW, 32, 64),
    "many/short": Corner(MANY, 32, 48),
    "few/long": Corner(FEW, 600, 16),
    "many/long": Corner(MANY, 600, 16),
}


@dataclass(frozen=True)
class Outcome:
    """Figures of one run; `running` is a mean over steps, and the most."""

    tok_per_s: float
    running: tuple[float, int]
    preemptions: int
    loads: int
    evictions: int


@dataclass(frozen=True)
class Bench:
    """One model in one memory, and everything needed to put a fresh engine around it."""

    parts: EngineParts
    config: EngineConfig
    eos: frozenset[int]
    keys: list[AdapterKey]

    @contextmanager
    def engine(self, fraction: float | None) -> Iterator[tuple[EngineCore, InputProcessor, threading.Event]]:
        """An engine with an empty pool, its requests' maker, and the event that is set when a load has something to
        report."""
        source, options = self.parts.source, replace(self.config.memory, adapter_pool_fraction=fraction)
        assert source is not None
        books = MemoryManager.make(
            self.parts.memory.layout, options, self.config.scheduler.preemption, source.is_on_host
        )
        scheduler = Scheduler(self.config.scheduler, books, self.eos, source.is_on_host)
        reported = threading.Event()
        loader = ThreadedLoader(source, self.parts.executor.write_adapter, reported.set)
        engine = EngineCore(replace(self.parts, memory=books, scheduler=scheduler), loader)
        try:
            yield engine, InputProcessor(books, source, self.parts.max_model_len, self.parts.vocab_size), reported
        finally:
            engine.close()


@contextmanager
def bench(a: argparse.Namespace) -> Iterator[Bench]:
    config = EngineConfig(memory=MemoryOptions(pool_bytes=a.pages * BLOCK_BYTES))
    checkpoint = open_checkpoint(BUILTIN_MODEL)
    shapes = base_shapes(checkpoint.spec, checkpoint.name)
    with AdapterStore(ASSETS / "pool" / "store", shapes) as store:
        built = build(checkpoint, config, store)
        checkpoint.close()
        made = Bench(built.parts, config, frozenset(built.spec.eos_token_ids), _register(store))
        for key in made.keys:
            made.parts.source.fetch_pinned(key)
            made.parts.source.unpin(key)
        yield made


def _register(store: AdapterStore) -> list[AdapterKey]:
    script = Path(__file__).parent / "peers" / "make_assets.py"
    subprocess.run([sys.executable, script, "--out", ASSETS, "--adapters", str(MANY)], check=True)
    known = {str(record.adapter_id): record.key for record in store.list_adapters()}
    keys = []
    for folder in sorted((ASSETS / "adapters").iterdir())[:MANY]:
        if folder.name not in known:
            peft = read_peft_dir(folder)
            known[folder.name] = store.register(folder.name, peft.config, store.add_blob(peft.weights_path)).ref.key
        keys.append(known[folder.name])
    return keys


def run(made: Bench, corner: Corner, fraction: float | None, new_tokens: int) -> Outcome:
    rng = random.Random(0)
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    running: list[int] = []
    with made.engine(fraction) as (engine, inputs, reported):
        for number in range(corner.requests):
            prompt = [rng.randrange(100, 40_000) for _ in range(corner.prompt_tokens)]
            key = made.keys[rng.randrange(corner.adapters)]
            engine.add_request(inputs.process(RequestId(f"r{number}"), prompt, sampling, key))
        begin = time.perf_counter()
        while engine.has_requests:
            reported.clear()
            engine.step()
            if engine.made_progress:
                running.append(engine.metrics.snapshot().requests_running)
            else:
                reported.wait(IDLE_S)
        seconds = time.perf_counter() - begin
        engine.check_integrity()
        s = engine.metrics.snapshot()
    assert s.generated_tokens_total == corner.requests * new_tokens, "a request did not end as it should"
    loads = s.adapter_loads_disk_total + s.adapter_loads_host_total
    mean = statistics.mean(running)
    rate = s.generated_tokens_total / seconds
    return Outcome(rate, (mean, max(running)), s.preemptions_total, loads, s.adapter_evictions_total)


def corners(a: argparse.Namespace) -> None:
    fractions = [None, *(float(fraction) for fraction in a.fractions.split(","))]
    chosen = {name: CORNERS[name] for name in a.corners.split(",")}
    if a.requests:
        chosen = {name: replace(corner, requests=a.requests) for name, corner in chosen.items()}
    best: dict[tuple[str, float | None], Outcome] = {}
    with bench(a) as made:
        print(f"{a.pages} pages of {BLOCK_BYTES} bytes, {a.new_tokens} new tokens a request", flush=True)
        run(made, Corner(1, 32, 2), None, 4)
        for name, corner in chosen.items():
            for turn in range(a.rounds):
                for fraction in fractions:
                    begin = time.perf_counter()
                    done = run(made, corner, fraction, a.new_tokens)
                    known = best.get((name, fraction), done)
                    best[name, fraction] = max(done, known, key=lambda outcome: outcome.tok_per_s)
                    took = time.perf_counter() - begin
                    print(
                        f"  {name}, {label(fraction)}, round {turn + 1}: {done.tok_per_s:.1f} tok/s in {took:.0f} s",
                        flush=True,
                    )
    print_corners(chosen, fractions, best)


def label(fraction: float | None) -> str:
    return "shared" if fraction is None else f"split {fraction:g}"


def print_corners(
    chosen: dict[str, Corner], fractions: Sequence[float | None], best: dict[tuple[str, float | None], Outcome]
) -> None:
    table(("adapters/prompts", "pool", "tok/s", "running, mean", "most", "preemptions", "adapter loads", "evictions"))
    for (name, fraction), o in best.items():
        counts = (o.preemptions, o.loads, o.evictions)
        row(name, label(fraction), f"{o.tok_per_s:.1f}", f"{o.running[0]:.1f}", o.running[1], *counts)
    table(("tok/s of the shared pool over", *(label(f) for f in fractions[1:]), "the best split of this corner"))
    for name in chosen:
        shared = best[name, None].tok_per_s
        ratios = [shared / best[name, fraction].tok_per_s for fraction in fractions[1:]]
        row(name, *(f"{ratio:.2f}" for ratio in ratios), f"{min(ratios):.2f}")


# The allocator.


def allocator(a: argparse.Namespace) -> None:
    table(("pages", "free runs", "call and its release", "µs, median", "µs, p99", "µs a page"))
    for pages in (int(number) for number in a.sizes.split(",")):
        pool, holders, rng = PagePool(pages), [], random.Random(0)
        while pool.num_free > pages // 2:
            churn(pool, holders, rng)
        for _ in range(a.churn):
            churn(pool, holders, rng)
        for count in (1, 27):
            times = sorted(timed(pool, holders, rng, count, a.samples))
            median, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
            what = "allocate_singles(1)" if count == 1 else f"allocate_run({count})"
            runs = pool.fragmentation.free_runs
            row(f"{pages:,}", runs, what, f"{median:.1f}", f"{p99:.1f}", f"{median / count:.2f}")


def churn(pool: PagePool, holders: list[list[int]], rng: random.Random) -> None:
    """Somebody comes (KV of a request, or an adapter) if there is room under 60 %, else somebody goes."""
    if pool.num_free > 0.4 * pool.num_pages:
        if rng.random() < 0.7:
            pages = pool.allocate_singles(rng.randrange(1, 9))
        else:
            found = pool.allocate_run(rng.choice((2, 9, 27)))
            pages = None if found is None else list(range(found[0], sum(found)))
        if pages:
            holders.append(pages)
            return
    if holders:
        chosen = rng.randrange(len(holders))
        holders[chosen], holders[-1] = holders[-1], holders[chosen]
        pool.release(holders.pop())


def timed(pool: PagePool, holders: list[list[int]], rng: random.Random, count: int, samples: int) -> Iterator[float]:
    """Microseconds of this thread for taking pages and giving them back; others come and go in between."""
    for _ in range(samples):
        for _ in range(4):
            churn(pool, holders, rng)
        begin = time.thread_time_ns()
        if count == 1:
            pages = pool.allocate_singles(1)
        else:
            found = pool.allocate_run(count)
            pages = None if found is None else range(found[0], sum(found))
        if pages is not None:
            pool.release(pages)
            yield (time.thread_time_ns() - begin) / 1e3


def table(titles: Sequence[str]) -> None:
    print(f"\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=("corners", "allocator"))
    parser.add_argument("--corners", default=",".join(CORNERS))
    parser.add_argument("--fractions", default="0.25,0.5,0.75", help="shares of adapters in the splits")
    parser.add_argument("--pages", type=int, default=450, help="of the pool: 16 adapters, or 7,200 tokens")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, help="of every corner, instead of its own number")
    parser.add_argument("--sizes", default="1000,10000,100000")
    parser.add_argument("--churn", type=int, default=20_000, help="comings and goings before the allocator is timed")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--quick", action="store_true", help="a smoke test: few requests")
    a = parser.parse_args()
    if a.quick:
        a.rounds, a.new_tokens, a.requests = 1, 8, a.requests or 6
    {"corners": corners, "allocator": allocator}[a.measure](a)


if __name__ == "__main__":
    main()
