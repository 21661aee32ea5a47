"""Measure how well `lorasrv plan --machines` predicts: two servers behind a placement, and the same trace simulated.

    python tests/benchmarks/bench_plan_cluster.py                          # some three minutes a run; 3 runs
    python tests/benchmarks/bench_plan_cluster.py --placements least --runs 1

Two plain `lorasrv serve` processes with one thread each answer Poisson traffic over 64 adapters by Zipf's law. The
script sends each request where `StaticChooser` says, the class that an edge runs, with the placement that is simulated.
Costs are those that both servers learned while both served other adapters before; what a request needs besides steps
and loads is the difference between the median TTFT of that traffic and of its simulation. The servers send no reports,
nor do the simulated ones. Until tok/s is within 10 % and the p99 TTFT within 25 % in every run, figures of simulated
clusters on this machine are no prediction: the last line says which it is.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from harness import ASSETS, Server, arguments, machine_line, open_loop, quantile, row, run_json, table, unique_prompt
from bench_tiers import make_store, names, pool_bytes, server_of
from traces import write_trace

from api.cli.bench.client import BenchClient, BenchRequest, RequestOutcome
from api.client import Client
from api.cluster.chooser import ReplicaAddress, StaticChooser
from lorasrv.memory.cost_model import PARTS
from lorasrv.metrics.trace import TraceRequest, read_trace
from lorasrv.offline.cluster.machine import Router
from lorasrv.offline.planner.laws import TrafficLaw
from lorasrv.offline.planner.machine_profile import MachineProfile
from lorasrv.placement.kinds import make_placement
from lorasrv.placement.work import WorkEstimator, WorkRates

ADAPTERS, OTHERS = 64, 64
"""Adapters of the traffic, and of the requests before it."""
WITHIN = {"tok/s": 0.10, "TTFT p99": 0.25}
NEVER_S = 1e6


class Pair:
    """Send requests to two servers as a router does."""

    def __init__(self, servers: Sequence[Server], placement: str, costs: MachineProfile, adapter_bytes: int) -> None:
        self._placement = make_placement(placement)
        addresses = [ReplicaAddress(f"m{number}", server.url) for number, server in enumerate(servers)]
        self._chooser = StaticChooser(addresses, self._placement)
        self._clients = {address.id: BenchClient(address.url) for address in addresses}
        self._adapter_bytes = adapter_bytes
        work = WorkEstimator(WorkRates.of_steps(costs.step))
        self._router = Router(0, self._placement, self._placement, work, costs.load_byte_s)
        self.sent = dict.fromkeys(self._clients, 0)

    async def send(self, sending: BenchRequest) -> RequestOutcome:
        """Send one, with its prompt's length guessed from its characters, as an edge must."""
        request = TraceRequest(0.0, max(1, len(sending.prompt) // 4), sending.max_tokens, sending.model)
        demand = self._router.demand(request, "", request.prompt_tokens, self._adapter_bytes)
        async with self._chooser.choose(demand, ()) as replica:
            self.sent[replica.id] += 1
            outcome = await self._clients[replica.id].send(sending)
        self._router.work.observe(sending.model, outcome.output_tokens)
        return outcome

    async def close(self) -> None:
        for client in self._clients.values():
            await client.__aexit__(None, None, None)


def drawn(law: TrafficLaw, first: int, rng: random.Random) -> list[BenchRequest]:
    """Return a law's requests, for adapters from a number on."""
    known = names(ADAPTERS + OTHERS)
    return [
        BenchRequest(
            known[first + int((request.adapter or "a0")[1:])],
            unique_prompt(rng, max(1, request.prompt_tokens // 2)),
            request.output_tokens,
            at_s=request.arrival_s,
        )
        for request in law.trace()
    ]


async def drive(pair: Pair, requests: Sequence[BenchRequest]) -> tuple[list[RequestOutcome], float]:
    """Send all at their times; return the outcomes, and when the first was due."""
    begun_s = time.perf_counter()
    try:
        outcomes = await open_loop(pair.send, requests)
    finally:
        await pair.close()
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(outcomes)} failed; the first: {failed[0].failure}, {failed[0].detail}")
    return outcomes, begun_s


def learned(servers: Sequence[Server]) -> MachineProfile:
    """Return the mean of what both servers have learned."""
    samples = []
    for server in servers:
        with Client(server.url) as client:
            samples.append(client.metrics())

    def mean(name: str) -> float:
        return statistics.mean(one[name] for one in samples)

    step = {part: mean(f'lorasrv_step_cost_seconds{{part="{part}"}}') for part in PARTS}
    load, copy = (mean(f'lorasrv_load_cost_seconds{{part="{part}"}}') for part in ("load_byte", "copy_byte"))
    return MachineProfile(step, load_byte_s=load, copy_byte_s=copy)


def disk_loads(servers: Sequence[Server]) -> float:
    """Return the adapters that both have read from their disks so far."""
    total = 0.0
    for server in servers:
        with Client(server.url) as client:
            total += client.metrics().get('lorasrv_adapter_loads_total{tier="disk"}', 0.0)
    return total


def measured(outcomes: Sequence[RequestOutcome], begun_s: float) -> dict[str, float]:
    """Return what the client saw."""
    seconds = max(o.last_s for o in outcomes) - min(o.sent_s for o in outcomes)
    ttft_ms = [o.ttft_ms for o in outcomes]
    tokens = sum(o.output_tokens for o in outcomes)
    return {"tok/s": tokens / seconds, "TTFT p50": quantile(ttft_ms, 0.5), "TTFT p99": quantile(ttft_ms, 0.99)}


def predicted(
    outcomes: Sequence[RequestOutcome],
    adapter_bytes: int,
    placement: str,
    costs: MachineProfile,
    flags: Mapping[str, object],
    folder: Path,
) -> dict[str, float]:
    """Return what `lorasrv plan` says of the same requests."""
    begin_s = min(o.sent_s for o in outcomes)
    trace, file = folder / "sent.jsonl", folder / "costs.json"
    requests = [
        TraceRequest(o.sent_s - begin_s, o.prompt_tokens, o.output_tokens, o.model, adapter_bytes=adapter_bytes)
        for o in outcomes
    ]
    write_trace(trace, requests)
    file.write_text(json.dumps(costs.to_dict()))
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    its = ("--machines", 2, "--placement", placement, "--report-s", NEVER_S)
    done = run_json("plan", "--trace", trace, *its, "--costs", file, "--json", *words)["placements"][0]
    keys = {"tok/s": "tok_per_s", "TTFT p50": "ttft_p50_ms", "TTFT p99": "ttft_p99_ms", "loads": "loads_from_disk"}
    return {title: done[key] for title, key in keys.items()}


def compare(placement: str, number: int, a: argparse.Namespace, folder: Path) -> bool:
    """Serve, simulate, and print a row a figure; return whether all are as near as they must be."""
    flags = {"pool_bytes": pool_bytes(160, 16, 24), "host_cache_bytes": "4MiB", "max_num_seqs": 16}
    rng = random.Random(number)
    with ExitStack() as stack:
        traces = [folder / f"{placement}-{number}-{side}.jsonl" for side in range(2)]
        servers = [
            stack.enter_context(server_of(_store(side), "--speculation off", **flags, record_trace=trace))
            for side, trace in enumerate(traces)
        ]
        law = TrafficLaw("poisson", a.rate, a.warm_up, OTHERS, 1.0, a.prompt, a.answer, 0.5, 1000 + number)
        guess = MachineProfile({"step": 2e-2, "token": 2e-3, "request": 2e-3, **dict.fromkeys(PARTS[3:], 0.0)})
        before, _ = asyncio.run(drive(Pair(servers, placement, guess, 0), drawn(law, ADAPTERS, rng)))
        told = [request for trace in traces for request in read_trace(trace)]
        nbytes = next(request.adapter_bytes for request in told if request.adapter_bytes) or 0
        costs = learned(servers)
        simulated_ms = predicted(before, nbytes, placement, costs, flags, folder)["TTFT p50"]
        besides_ms = max(0.0, statistics.median(o.ttft_ms for o in before) - simulated_ms)
        costs = replace(costs, edge_s=besides_ms / 1e3)
        loads = disk_loads(servers)
        pair = Pair(servers, placement, costs, nbytes)
        law = replace(law, seconds=a.seconds, adapters=ADAPTERS, seed=number)
        outcomes, begun_s = asyncio.run(drive(pair, drawn(law, 0, rng)))
        real = {**measured(outcomes, begun_s), "loads": disk_loads(servers) - loads}
    plan = predicted(outcomes, nbytes, placement, costs, flags, folder)
    ratios = {name: plan[name] / max(1e-9, real[name]) for name in plan}
    for name in plan:
        row(placement, number, name, plan[name], real[name], ratios[name])
    return all(abs(ratios[name] - 1.0) <= most for name, most in WITHIN.items())


def _store(side: int) -> Path:
    return ASSETS / f"cluster-{side}" / "store"


def main() -> None:
    a = arguments(
        __doc__,
        placements=(("bounded", "least"), "policies"),
        runs=(3, "runs of each, each with its own seed"),
        rate=(3.0, "requests a second, for both servers together"),
        warm_up=(30.0, "seconds of other traffic before, from which costs are learned"),
        seconds=(40.0, "length of the traffic"),
        prompt=(48.0, "mean tokens of a prompt, about"),
        answer=(20.0, "mean tokens of an answer"),
    )
    os.environ.update(OMP_NUM_THREADS="1", GOMP_SPINCOUNT="30000")
    print(machine_line(), flush=True)
    for side in range(2):
        make_store(_store(side), ADAPTERS + OTHERS)
    table(("placement", "run", "figure", "plan", "real", "plan/real"))
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder:
        near = [compare(name, number, a, Path(folder)) for name in a.placements for number in range(a.runs)]
    limits = ", ".join(f"{name} within {100 * most:.0f} %" for name, most in WITHIN.items())
    print(f"\n{sum(near)} of {len(near)} runs are valid ({limits})", flush=True)


if __name__ == "__main__":
    main()
