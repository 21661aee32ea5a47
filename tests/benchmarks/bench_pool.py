"""Compare one pool for adapters and KV with fixed splits of the same bytes, and time the page allocator.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_pool.py corners [--corners few/short,many/long]
    python tests/benchmarks/bench_pool.py allocator

`corners`: few or many adapters (rank 16 on all linears, 27 pages each) times short or long prompts, in a pool so small
that memory limits the throughput. All requests of a corner are present from the beginning, each for a random adapter;
`EngineCore` is stepped in this process, adapters are loaded in threads from host memory. Splits (`serve
--adapter-pool-fraction`) take turns with the shared pool on the same model and memory; the better of two rounds counts.

`allocator`: microseconds of `PagePool`'s calls while random holders come and go, by the pool's size.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from harness import ASSETS, PAGE_BYTES, adapter_folders, arguments, open_store, quantiles, row, shapes_of, table
from adapter_keys import key_of

from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import BUILTIN_MODEL, EngineConfig, MemoryOptions
from lorasrv.engine.core import EngineCore
from lorasrv.engine.factory import build
from lorasrv.engine.input_processor import InputProcessor
from lorasrv.engine.parts import EngineParts
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.memory.page_pool import PagePool
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.worker.adapter_loader import ThreadedLoader

FEW, MANY = 4, 64
IDLE_S = 0.05


@dataclass(frozen=True)
class Corner:
    """A load: each request has a prompt of so many tokens and one of so many adapters."""

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
    """Figures of one run; `running` requests as mean over steps, and maximum."""

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
    spec: ModelSpec
    keys: list[AdapterKey]

    @contextmanager
    def engine(self, fraction: float | None) -> Iterator[tuple[EngineCore, InputProcessor, threading.Event]]:
        """Provide an engine with an empty pool, its input processor, and the event that loads set."""
        source, options = self.parts.source, replace(self.config.memory, adapter_pool_fraction=fraction)
        assert source is not None
        accounts = MemoryManager.make(
            self.parts.memory.layout, options, self.config.scheduler.preemption_mode, source.is_on_host
        )
        scheduler = Scheduler(self.config.scheduler, accounts, frozenset(self.spec.eos_token_ids))
        reported = threading.Event()
        loader = ThreadedLoader(source, self.parts.executor.write_adapter, reported.set)
        engine = EngineCore(replace(self.parts, memory=accounts, scheduler=scheduler), loader)
        try:
            yield engine, InputProcessor(accounts, source, self.parts.max_model_len, self.spec.vocab_size), reported
        finally:
            engine.close()


@contextmanager
def bench(a: argparse.Namespace) -> Iterator[Bench]:
    """Build a model and memory, with all adapters in host memory."""
    config = EngineConfig(memory=MemoryOptions(pool_bytes=a.pages * PAGE_BYTES))
    with open_store(ASSETS / "pool" / "store", shapes_of()) as store, closing(open_checkpoint(BUILTIN_MODEL)) as base:
        built = build(base, config, store)
        keys = _register(store)
        assert built.parts.source is not None
        for key in keys:
            built.parts.source.fetch_pinned(key)
            built.parts.source.unpin(key)
        yield Bench(built.parts, config, built.spec, keys)


def _register(store: AdapterStore) -> list[AdapterKey]:
    known = {str(record.adapter_id): key_of(record) for record in store.list_adapters()}
    folders = adapter_folders(MANY)
    for folder in folders:
        if folder.name not in known:
            peft = read_peft_dir(folder)
            digest = store.add_blob(peft.weights_path)
            known[folder.name] = key_of(store.register(folder.name, peft.config, digest).ref)
    return [known[folder.name] for folder in folders]


def run(made: Bench, corner: Corner, fraction: float | None, new_tokens: int) -> Outcome:
    """Step an engine until all requests of a corner have ended."""
    rng = random.Random(0)
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    running: list[int] = []
    with made.engine(fraction) as (engine, inputs, reported):
        for number in range(corner.requests):
            prompt = [rng.randrange(100, 40_000) for _ in range(corner.prompt_tokens)]
            key = made.keys[rng.randrange(corner.adapters)]
            engine.add_request(
                inputs.process(RequestId(f"r{number}"), prompt, sampling, RequestOptions(adapter_key=key))
            )
        begin = time.perf_counter()
        while engine.has_requests:
            reported.clear()
            engine.step()
            if engine.made_progress:
                running.append(engine.metrics.stats().requests_running)
            else:
                reported.wait(IDLE_S)
        seconds = time.perf_counter() - begin
        engine.check_integrity()
        s = engine.metrics.stats()
    assert s.generated_tokens_total == corner.requests * new_tokens, "a request did not end as it should"
    loads = s.adapter_loads_disk_total + s.adapter_loads_host_total
    mean = statistics.mean(running)
    rate = s.generated_tokens_total / seconds
    return Outcome(rate, (mean, max(running)), s.preemptions_total, loads, s.adapter_evictions_total)


def corners(a: argparse.Namespace) -> None:
    """Compare the shared pool with every split in the corners."""
    fractions = [None, *a.fractions]
    labels = {fraction: "shared" if fraction is None else f"split {fraction:g}" for fraction in fractions}
    chosen = {name: replace(CORNERS[name], requests=a.requests or CORNERS[name].requests) for name in a.corners}
    best: dict[tuple[str, float | None], Outcome] = {}
    with bench(a) as made:
        print(f"{a.pages} pages of {PAGE_BYTES} bytes, {a.new_tokens} new tokens a request", flush=True)
        run(made, Corner(1, 32, 2), None, 4)
        for name, turn, fraction in ((n, t, f) for n in chosen for t in range(a.rounds) for f in fractions):
            done = run(made, chosen[name], fraction, a.new_tokens)
            best[name, fraction] = max(done, best.get((name, fraction), done), key=lambda outcome: outcome.tok_per_s)
            print(f"  {name}, {labels[fraction]}, round {turn + 1}: {done.tok_per_s:.1f} tok/s", flush=True)
    table(("adapters/prompts", "pool", "tok/s", "running, mean", "most", "preemptions", "adapter loads", "evictions"))
    for (name, fraction), o in best.items():
        counts = (o.preemptions, o.loads, o.evictions)
        row(name, labels[fraction], f"{o.tok_per_s:.1f}", f"{o.running[0]:.1f}", o.running[1], *counts)
    table(("ratio of the shared pool to", *(labels[f] for f in fractions[1:]), "the best split"))
    for name in chosen:
        ratios = [best[name, None].tok_per_s / best[name, fraction].tok_per_s for fraction in fractions[1:]]
        row(name, *ratios, min(ratios))


# The allocator.


def allocator(a: argparse.Namespace) -> None:
    """Time taking pages and giving them back."""
    table(("pages", "free runs", "call and its release", "µs, median", "µs, p99", "µs a page"))
    for pages in a.sizes:
        pool, rng = PagePool(pages), random.Random(0)
        holders: list[list[int]] = []
        while pool.num_free > pages // 2:
            churn(pool, holders, rng)
        for _ in range(a.churn):
            churn(pool, holders, rng)
        for count in (1, 27):
            median, p99 = quantiles(timed(pool, holders, rng, count, a.samples), 0.5, 0.99)
            call = "allocate_singles(1)" if count == 1 else f"allocate_run({count})"
            row(f"{pages:,}", pool.fragmentation.free_runs, call, f"{median:.1f}", f"{p99:.1f}", median / count)


def take_run(pool: PagePool, count: int) -> list[int] | None:
    """Allocate pages that lie side by side."""
    found = pool.allocate_run(count)
    return None if found is None else list(range(found[0], sum(found)))


def churn(pool: PagePool, holders: list[list[int]], rng: random.Random) -> None:
    """Add a holder (a request's KV, or an adapter) while under 60 % of the pages are used, else release one."""
    if pool.num_free > 0.4 * pool.num_pages:
        single = rng.random() < 0.7
        pages = pool.allocate_singles(rng.randrange(1, 9)) if single else take_run(pool, rng.choice((2, 9, 27)))
        if pages:
            holders.append(pages)
            return
    if holders:
        chosen = rng.randrange(len(holders))
        holders[chosen], holders[-1] = holders[-1], holders[chosen]
        pool.release(holders.pop())


def timed(pool: PagePool, holders: list[list[int]], rng: random.Random, count: int, samples: int) -> Iterator[float]:
    """Yield microseconds of this thread for taking pages and giving them back, with churn in between."""
    for _ in range(samples):
        for _ in range(4):
            churn(pool, holders, rng)
        begin = time.thread_time_ns()
        pages = pool.allocate_singles(1) if count == 1 else take_run(pool, count)
        if pages is not None:
            pool.release(pages)
            yield (time.thread_time_ns() - begin) / 1e3


def main() -> None:
    measures = {"corners": corners, "allocator": allocator}
    a = arguments(
        __doc__,
        measures,
        quick={"rounds": 1, "new_tokens": 8, "requests": 6},
        corners=(tuple(CORNERS), "to compare"),
        fractions=((0.25, 0.5, 0.75), "shares of adapters in the splits"),
        pages=(450, "of the pool: 16 adapters, or 7,200 tokens"),
        new_tokens=(48, "of each answer"),
        rounds=(2, "times that each pool has its turn"),
        requests=(int, "of every corner, instead of its own number"),
        sizes=((1000, 10_000, 100_000), "allocator: pages"),
        churn=(20_000, "allocator: changes before it is timed"),
        samples=(5000, "allocator: timed calls"),
    )
    measures[a.measure](a)


if __name__ == "__main__":
    main()
