"""What each scheduling policy does to those who wait: one hot persona, bursts, long prompts, priorities.

    python tests/benchmarks/bench_policies.py hot         # nine personas beside one with ten times the load of each
    python tests/benchmarks/bench_policies.py bursts      # 64 mixed requests at once
    python tests/benchmarks/bench_policies.py chunking    # long prompts among 32 streams, by target_itl_ms
    python tests/benchmarks/bench_policies.py priorities  # a few urgent requests among many
    python tests/benchmarks/bench_policies.py sharing     # fair with and without preference for the batch's adapters
    python tests/benchmarks/bench_policies.py overhead    # microseconds of the bare scheduler [--profile]
    python tests/benchmarks/bench_policies.py all [--model smollm2-135m]

Through the engine in this process, without HTTP. Each prints Markdown tables; what is compared takes turns within one
run. Traffic is random tokens that no cache has seen, from fixed seeds: the same for every policy. TTFT counts from the
request's arrival. Answers end by an end-of-sequence token (`policy_load.Script`), as the scheduler cannot know
before; before anything is measured, a burst teaches it lengths and costs. `--quick` is a smoke test.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from peer_servers import machine
from policy_assets import TINY, base_of, open_store
from policy_chunking import chunking
from policy_load import NUM_PERSONAS, Answer, Ask, Server, burst, middling, poisson, quantile, row, run, serving, table
from policy_overhead import overhead

from lorasrv.config import BUILTIN_MODEL, POLICIES, SchedulerOptions
from lorasrv.scheduler.policies import fair
from lorasrv.worker import device as threads

HOT = 0
HOT_FACTOR = 10
CLASSES = (-1, 0, 1)


@asynccontextmanager
async def _server(
    a: argparse.Namespace, policy: str, adapters: int = NUM_PERSONAS, **more: Any
) -> AsyncIterator[Server]:
    """An engine that has seen a burst of the traffic to come."""
    options = SchedulerOptions(**{"max_num_seqs": a.seats, "policy": policy, "target_itl_ms": None, **more})
    store, keys = await asyncio.to_thread(open_store, a.base, adapters)
    with store:
        async with serving(a.base, store, keys, options, a.pages) as server:
            yield server


# One hot persona.


def hot(a: argparse.Namespace) -> None:
    run(_hot(a))


async def _hot(a: argparse.Namespace) -> None:
    per_s = a.capacity or await _capacity(a)
    each = a.load * per_s / (HOT_FACTOR + NUM_PERSONAS - 1)
    arrivals = {p: poisson(p, each * (HOT_FACTOR if p == HOT else 1), a.seconds, seed=1) for p in range(NUM_PERSONAS)}
    nine = [ask for p, asks in arrivals.items() if p != HOT for ask in asks]
    print(
        f"{a.seats} seats do {per_s:.1f} requests/s; offered {a.load:g} times that for {a.seconds:g} s: "
        f"the hot persona {HOT_FACTOR * each:.1f}/s, the others {each:.1f}/s each"
    )
    ends = ("p50", "p99")
    titles = [f"{name} {end} ms" for name in ("TTFT", "TPOT") for end in ends]
    table(("policy", "who", "requests", *titles, *(f"{t.removesuffix(' ms')} to alone" for t in titles)))
    for policy in a.policies:
        async with _server(a, policy) as server:
            await server.loop(_mixed(3 * a.seats), 2 * a.seats)
            alone = _latencies(await server.all(nine))
            row(policy, "the nine alone", len(nine), *alone, *(1.0 for _ in alone))
            answers = await server.all([*nine, *arrivals[HOT]])
        for who, is_hot in (("the nine beside the hot one", False), ("the hot one", True)):
            chosen = [answer for answer in answers if (answer.ask.persona == HOT) == is_hot]
            ratios = [x / y for x, y in zip(_latencies(chosen), alone, strict=True)]
            row(policy, who, len(chosen), *_latencies(chosen), *ratios)


async def _capacity(a: argparse.Namespace) -> float:
    """Requests a second with all seats taken."""
    async with _server(a, "fcfs") as server:
        await server.loop(_mixed(3 * a.seats), 2 * a.seats)
        begun = time.perf_counter()
        await server.loop(_mixed(a.probes), 2 * a.seats)
        return a.probes / (time.perf_counter() - begun)


def _mixed(count: int) -> list[Ask]:
    rng = random.Random(0)
    return [middling(i % NUM_PERSONAS, rng) for i in range(count)]


def _latencies(answers: list[Answer]) -> list[float]:
    kinds = ([answer.ttft_ms for answer in answers], [answer.tpot_ms for answer in answers])
    return [quantile(values, q) for values in kinds for q in (0.5, 0.99)]


# Bursts.


def bursts(a: argparse.Namespace) -> None:
    run(_bursts(a))


async def _bursts(a: argparse.Namespace) -> None:
    print(f"{a.burst} requests at once over {NUM_PERSONAS} personas, {a.seats} seats, {a.rounds} times")
    titles = ("TTFT mean ms", "p50", "p99", "completion mean s", "ms a token, mean", "p99", "all done s")
    table(("policy", *titles, "preemptions", "within prediction"))
    for policy in a.policies:
        async with _server(a, policy) as server:
            for turn in range(2):
                await server.all(burst(2 * a.burst, seed=-1 - turn))
            before, answers, took = server.engine.metrics.snapshot(), [], []
            for turn in range(a.rounds):
                answers += await server.all(burst(a.burst, seed=turn))
                took.append(max(x.arrivals_s[-1] for x in answers) - min(x.sent_s for x in answers[-a.burst :]))
            after = server.engine.metrics.snapshot()
        ttfts = [answer.ttft_ms for answer in answers]
        each = [1e3 * answer.took_s / answer.ask.answer for answer in answers]
        cells = [statistics.mean(ttfts), quantile(ttfts, 0.5), quantile(ttfts, 0.99)]
        cells += [statistics.mean(answer.took_s for answer in answers), statistics.mean(each), quantile(each, 0.99)]
        covered = after.answers_within_prediction_total - before.answers_within_prediction_total
        covered /= after.answers_predicted_total - before.answers_predicted_total
        preemptions = after.preemptions_total - before.preemptions_total
        row(policy, *cells, statistics.mean(took), preemptions, float(covered))


# Priorities.


def priorities(a: argparse.Namespace) -> None:
    run(_priorities(a))


async def _priorities(a: argparse.Namespace) -> None:
    print(f"{3 * a.seats} clients of priority 1 on {a.seats} seats, one client each of 0 and -1")
    table(("policy", "priority", "requests", "TTFT mean ms", "p50", "p99", "p50 to that of 1"))
    for policy in a.policies:
        async with _server(a, policy) as server:
            await server.loop(_mixed(3 * a.seats), 2 * a.seats)
            answers = await _by_priority(a, server)
        usual = quantile([x.ttft_ms for x in answers if x.ask.priority == 1], 0.5)
        for priority in CLASSES:
            ttfts = [answer.ttft_ms for answer in answers if answer.ask.priority == priority]
            p50 = quantile(ttfts, 0.5)
            row(policy, priority, len(ttfts), statistics.mean(ttfts), p50, quantile(ttfts, 0.99), p50 / usual)


async def _by_priority(a: argparse.Namespace, server: Server) -> list[Answer]:
    """The urgent ones ask one after another for as long as the many last; counted once all seats are taken."""
    rng, answers, over = random.Random(2), [], asyncio.Event()

    async def urgent(priority: int) -> None:
        await asyncio.sleep(0.2)
        while not over.is_set():
            answers.append(await server.ask(middling(rng.randrange(NUM_PERSONAS), rng, priority=priority)))

    async def many() -> list[Answer]:
        asks = [middling(i % NUM_PERSONAS, rng, priority=1) for i in range(a.many)]
        done = await server.loop(asks, 3 * a.seats)
        over.set()
        return done

    usual, *_ = await asyncio.gather(many(), *(urgent(priority) for priority in CLASSES if priority < 1))
    return [*usual, *answers]


# Sharing.


def sharing(a: argparse.Namespace) -> None:
    run(_sharing(a))


async def _sharing(a: argparse.Namespace) -> None:
    print(f"{a.many} requests at once over {a.adapters} adapters, {a.few_seats} seats, fair")
    table(("preference", "round", "adapters a step", "tok/s", "TTFT mean ms", "p99"))
    most = fair.SHARING_TOKENS
    async with _server(a, "fair", a.adapters, max_num_seqs=a.few_seats) as server:
        await server.all(_spread(a, seed=-1))
        for turn in range(a.rounds):
            for label, tokens in (("with", most), ("without", 0.0)):
                fair.SHARING_TOKENS = tokens
                server.script.adapters_by_step.clear()
                begun = time.perf_counter()
                answers = await server.all(_spread(a, seed=turn))
                rate = sum(x.ask.answer for x in answers) / (time.perf_counter() - begun)
                ttfts = [answer.ttft_ms for answer in answers]
                distinct = statistics.mean(server.script.adapters_by_step)
                row(label, turn + 1, distinct, rate, statistics.mean(ttfts), quantile(ttfts, 0.99))
    fair.SHARING_TOKENS = most


def _spread(a: argparse.Namespace, seed: int) -> list[Ask]:
    rng = random.Random(seed)
    return [middling(rng.randrange(a.adapters), rng) for _ in range(a.many)]


# The command.

MEASURES = {
    "hot": hot,
    "bursts": bursts,
    "chunking": chunking,
    "priorities": priorities,
    "sharing": sharing,
    "overhead": overhead,
}
QUICK = {"seconds": 1.0, "probes": 40, "burst": 12, "rounds": 1, "many": 48, "adapters": 16, "prompts": 2, "steps": 30}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=(*MEASURES, "all"))
    parser.add_argument("--model", choices=(TINY, BUILTIN_MODEL), default=TINY)
    parser.add_argument("--policies", type=lambda text: text.split(","), default=list(POLICIES))
    parser.add_argument("--seats", type=int, default=16, help="max_num_seqs")
    parser.add_argument("--threads", type=int, help="that compute; 1 for the tiny base, all for the built-in one")
    parser.add_argument("--pages", type=int, help="of the pool; 6000 of the tiny base, 2000 of the built-in one")
    parser.add_argument("--rounds", type=int, default=3, help="bursts and sharing")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few of everything")
    group = parser.add_argument_group("hot")
    group.add_argument("--load", type=float, default=1.3, help="what is offered, as a part of what the seats can do")
    group.add_argument("--capacity", type=float, help="requests/s that the seats can do; measured if left out")
    group.add_argument("--seconds", type=float, default=6.0, help="of arrivals")
    group.add_argument("--probes", type=int, default=160, help="requests that tell what the seats can do")
    group = parser.add_argument_group("bursts, priorities and sharing")
    group.add_argument("--burst", type=int, default=64)
    group.add_argument("--many", type=int, default=256, help="requests of priority 1; those that share")
    group.add_argument("--adapters", type=int, default=48, help="sharing")
    group.add_argument("--few-seats", type=int, default=8, help="sharing")
    group = parser.add_argument_group("chunking")
    group.add_argument("--streams", type=int, default=32)
    group.add_argument("--prompts", type=int, default=8)
    group.add_argument("--prompt-tokens", type=int, default=1000)
    group.add_argument("--plain-s", type=float, default=1.0, help="without prompts")
    group.add_argument("--targets", default="2,4", help="target_itl_ms, in plain steps")
    group = parser.add_argument_group("overhead")
    group.add_argument("--waiting", default="0,64,1000,4000")
    group.add_argument("--asked", type=int, default=200, help="adapters, of 200, that requests are for")
    group.add_argument("--steps", type=int, default=100)
    group.add_argument("--profile", action="store_true", help="where the time goes, with the most waiting")
    return parser


def main() -> None:
    parser = options()
    known, _ = parser.parse_known_args()
    if known.quick:
        parser.set_defaults(**QUICK)
    a = parser.parse_args()
    a.base = base_of(a.model)
    threads.ENGINE_THREADS = a.threads or (1 if a.model == TINY else threads.ENGINE_THREADS)
    a.pages = a.pages or (6000 if a.model == TINY else 2000)
    print(machine(), flush=True)
    for name in MEASURES if a.measure == "all" else (a.measure,):
        begun = time.monotonic()
        print(f"\n## {name}, {a.model}\n", flush=True)
        MEASURES[name](a)
        print(f"\n{name}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
