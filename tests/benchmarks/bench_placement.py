"""Compare placements on a simulated cluster of GPUs: the real scheduler on each machine, and the router's own policies.

    python tests/benchmarks/bench_placement.py                          # 16 machines, some minutes a policy
    python tests/benchmarks/bench_placement.py --placements bounded,least --laws flash --routers 4
    python tests/benchmarks/bench_placement.py --machines 100 --seconds 10 --placements bounded,least

The machines are invented: steps that cost about what an 8B model's do on a GPU, adapters of 42 MB of which a disk gives
0.5 GB a second, a pool of 16 GB and a host cache of 32 GB. Nothing here was measured on one: compare rows, and take no
row for a promise. `within` is the share of the requests with a TTFT of 1 s and a TPOT of 100 ms at most.
"""

import time

from harness import arguments, machine_line, row, table

from lorasrv.config import MemoryOptions, SchedulerOptions
from lorasrv.memory.memory_manager import PoolLayout
from lorasrv.offline.cluster.options import ClusterOptions
from lorasrv.offline.cluster.report import cluster_stats
from lorasrv.offline.cluster.sim_cluster import replay_on
from lorasrv.offline.planner.adapter_sizes import layout_of_bytes
from lorasrv.offline.planner.laws import LAWS, TrafficLaw
from lorasrv.offline.planner.machine_profile import MachineProfile
from lorasrv.offline.planner.sim_replica import SimServer
from lorasrv.placement.kinds import PLACEMENTS

LAYERS, PAGE_BYTES = 32, 16 * 4096
ADAPTER_BYTES = 42_000_000
# Seconds: weights read once a step, 20,000 prompt tokens a second, adapters and keys read at some TB/s.
STEP = {"step": 9e-3, "token": 4e-5, "request": 2e-5, "adapter_byte": 8e-13, "attention_pair": 4e-8, "second_token": 0}
COSTS = MachineProfile(
    step=STEP, between_steps_s=5e-4, edge_s=2e-3, load_s=2e-3, load_byte_s=2e-9, copy_byte_s=1 / 12e9, swap_byte_s=4e-11
)
BOUNDS_MS = {"ttft": 1000.0, "tpot": 100.0}


def server(pool: float, host: float) -> SimServer:
    """Return one machine; `pool` and `host` are GB."""
    layout = layout_of_bytes(ADAPTER_BYTES, LAYERS, 2)
    return SimServer(
        PoolLayout.of_bytes(int(pool * 1e9), PAGE_BYTES, 16, LAYERS),
        MemoryOptions(host_cache_bytes=int(host * 1e9)),
        SchedulerOptions(max_num_seqs=64, max_num_batched_tokens=1024),
        COSTS,
        lambda name: layout,
        8192,
        has_drafts=False,
    )


def main() -> None:
    a = arguments(
        __doc__,
        placements=(PLACEMENTS, "policies"),
        laws=((*LAWS,), "laws of arrival"),
        machines=(16, "machines"),
        rate=(15.0, "requests a second for each machine"),
        seconds=(20.0, "length of the traffic"),
        answer=(64.0, "mean tokens of an answer"),
        adapters=(100_000, "adapters"),
        zipf=(1.0, "exponent of their popularity"),
        routers=(1, "routers that do not know each other"),
        report_s=(0.5, "seconds between two reports of a machine"),
        pool=(16.0, "GB of the pool"),
        host=(32.0, "GB of the host cache"),
        storage=(0.0, "GB/s of one storage that all share; 0: each has a disk of its own"),
        seed=(0, "seed"),
    )
    print(machine_line(), flush=True)
    table(("law", "placement", "TTFT p50 ms", "p95", "p99", "loads", "within", "busiest/mean", "tok/s", "s"))
    for law in a.laws:
        traffic = TrafficLaw(law, a.rate * a.machines, a.seconds, a.adapters, a.zipf, 405, a.answer, 0.8, a.seed)
        for name in a.placements:
            storage = 1e9 * a.storage or None
            options = ClusterOptions(a.machines, name, a.routers, a.report_s, (), a.seed, storage)
            begun = time.perf_counter()
            done = cluster_stats(name, replay_on(server(a.pool, a.host), traffic.trace(), options), BOUNDS_MS)
            times = (f"{ms:,.0f}" for ms in (done.ttft_p50_ms, done.ttft_p95_ms, done.ttft_p99_ms))
            shares = (f"{done.within:.3f}", f"{done.busiest_requests:.2f}", f"{done.tok_per_s:,.0f}")
            row(law, name, *times, f"{done.loads_from_disk:,}", *shares, f"{time.perf_counter() - begun:.0f}")


if __name__ == "__main__":
    main()
