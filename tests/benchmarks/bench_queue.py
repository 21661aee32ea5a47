"""Measure what a step's planning costs beside a long queue, and what it costs to make room among idle adapters.

    python tests/benchmarks/bench_queue.py [--accounts 4000] [--policies fair,fcfs]

The bare scheduler with 16 running requests and one waiting request of each account, without a model. Times are this
thread's own, in milliseconds, of `schedule` alone; the first of the steps meets all requests as they have arrived.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from harness import arguments, machine_line, quantiles, row, table
from bare_scheduler import Bench
from tiny_scheduler import scheduler

from adapter_store.spec import AdapterKey
from lorasrv.config import POLICIES, Limits, MemoryOptions
from lorasrv.memory.eviction import EvictionLevel
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import SchedulerOutput
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

RUNNING, STEPS, PAGES = 16, 60, 64
LAYOUT = AdapterLayout((SiteDims(64, (64,)),), (((16,),),), 2)
PAGE_BYTES = 1024
FEW_BYTES = 1 << 17
"""Host memory for some hundred adapters."""


def key_of(number: int) -> AdapterKey:
    return AdapterKey(f"a{number:063x}")


def bench_of(policy: str, slots: int = RUNNING, host_cache_bytes: int = 1 << 30, **options: Any) -> Bench:
    """Return a scheduler with 16 running requests."""
    memory = MemoryOptions(host_cache_bytes=host_cache_bytes)
    fields = {"memory": memory, "step_s": 0.02, "checks": False}
    options = {"max_wait_steps": 1 << 30, **options}
    bench = scheduler(policy, slots=slots, budget=2048, pages=400_000, bench=fields, **options)
    for number in range(RUNNING):
        bench.add(f"r{number}", 64, 100_000, adapter_id=f"r{number}")
    while len(bench.scheduler._queue.running) < RUNNING:
        bench.step()
    return bench


def wait(bench: Bench, count: int, fields: Callable[[int], dict[str, Any]]) -> Bench:
    """Add a waiting request of each account."""
    for number in range(count):
        bench.add(f"w{number}", 64, 100, **fields(number))
    return bench


def plan_ms(bench: Bench, *, adapters_come: bool = False) -> list[float]:
    """Return the milliseconds of planning each of some steps."""
    took, schedule = [], bench.scheduler.schedule

    def timed(*, ahead: bool = False) -> SchedulerOutput:
        begun = time.thread_time()
        step = schedule(ahead=ahead)
        took.append(1e3 * (time.thread_time() - begun))
        return step

    bench.scheduler.schedule = timed  # type: ignore[method-assign]
    for _ in range(STEPS):
        if adapters_come:
            for keys, bring in ((bench.loading, bench.load), (bench.copying, bench.copy)):
                if keys:
                    bring(min(keys))
        bench.step()
    return took


def states(policy: str, count: int) -> dict[str, Callable[[], list[float]]]:
    """Return measurements by what the queue waits for."""
    one = Limits(max_running=1)

    def of_adapters(i: int) -> dict[str, Any]:
        return {"adapter_id": f"a{i}"}

    def of_keys(i: int) -> dict[str, Any]:
        return {"principal": f"k{i}"}

    def cold(i: int) -> dict[str, Any]:
        return {"key": key_of(i)}

    def limited(i: int) -> dict[str, Any]:
        return {"adapter_id": f"r{i % RUNNING}", "principal": f"k{i}"}

    return {
        "slots; one key": lambda: plan_ms(wait(bench_of(policy), count, of_adapters)),
        "slots; a key each": lambda: plan_ms(wait(bench_of(policy), count, of_keys)),
        "adapters, of which none comes": lambda: plan_ms(wait(bench_of(policy, 32, FEW_BYTES), count, cold)),
        "adapters, one comes in a step": lambda: plan_ms(
            wait(bench_of(policy, 32, FEW_BYTES), count, cold), adapters_come=True
        ),
        "a limit of their key": lambda: plan_ms(
            wait(bench_of(policy, 32, key_limits=Limits(max_running=RUNNING)), count, of_adapters)
        ),
        "limits of 16 adapters": lambda: plan_ms(wait(bench_of(policy, 32, adapter_limits=one), count, limited)),
        "slots; all starved": lambda: plan_ms(wait(bench_of(policy, max_wait_steps=5), count, of_adapters)),
    }


def room_ms(count: int) -> list[float]:
    """Return the milliseconds of making 64 pages free, some times, beside so many idle adapters that requests want."""
    pages = 2000
    layout = PoolLayout(count * LAYOUT.num_pages(PAGE_BYTES) + pages, 4, PAGE_BYTES, 1)
    accounts = MemoryManager.make(layout, MemoryOptions())
    manager = accounts.adapter_manager
    for key in map(key_of, range(count)):
        manager.begin_step()
        manager.request_load(key, LAYOUT)
        manager.on_loaded(key)
        manager.place(key)
        manager.on_copied(key)
        manager.add_request(key)
    rid, tokens = RequestId("prefix"), list(range(4 * pages))
    accounts.kv.open(rid, None, "")
    accounts.kv.allocate(rid, 0, len(tokens))
    accounts.kv.cache_full_pages(rid, tokens, len(tokens))
    accounts.kv.free(rid)
    took = []
    for times in range(1, 11):
        begun = time.thread_time()
        assert accounts.evictor.make_room(PAGES * times, EvictionLevel.ADMIT)
        took.append(1e3 * (time.thread_time() - begun))
    return took


def measure(a: argparse.Namespace) -> None:
    table(("policy", f"{a.accounts} accounts wait for", "p50 ms", "max ms", "first step ms"))
    for policy in a.policies:
        for name, run in states(policy, a.accounts).items():
            took = run()
            row(policy, name, *quantiles(took, 0.5, 1.0), took[0])
    print(f"\n{PAGES} pages made free:\n")
    table(("idle adapters that requests want", "p50 ms", "max ms"))
    for count in (100, a.accounts):
        row(count, *quantiles(room_ms(count), 0.5, 1.0))


def main() -> None:
    a = arguments(
        __doc__,
        quick={"accounts": 200},
        policies=(tuple(POLICIES), "to compare"),
        accounts=(4000, "with a waiting request"),
    )
    print(machine_line(), flush=True)
    measure(a)


if __name__ == "__main__":
    main()
