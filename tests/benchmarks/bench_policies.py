"""Measure what each scheduling policy does to waiting requests: a hot adapter, bursts, long prompts, priorities.

    python tests/benchmarks/bench_policies.py hot         # nine personas beside one with ten times the load of each
    python tests/benchmarks/bench_policies.py sharing     # four personas, one request at a time, beside 48 of another
    python tests/benchmarks/bench_policies.py bursts      # 64 mixed requests at once
    python tests/benchmarks/bench_policies.py chunking    # long prompts among 32 streams, by target_itl_ms
    python tests/benchmarks/bench_policies.py priorities  # a few urgent requests among many
    python tests/benchmarks/bench_policies.py overhead    # microseconds of the bare scheduler
    python tests/benchmarks/bench_policies.py all [--model smollm2-135m]

Engine in this process, without HTTP; Markdown tables. Traffic is random tokens that no cache has seen, from fixed
seeds: the same for every policy. TTFT counts from the request's arrival. Answers end by an end-of-sequence token
(`Script`), which the scheduler cannot foresee; before anything is measured, a burst teaches it lengths and costs.

overhead: 64 running requests over 200 adapters that are all in the pool, no model; times are this thread's own.
*steady*: long answers, nothing starts or ends. *churn*: answers of 16 to 48 tokens, about two start and end in a step.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from harness import (
    ASSETS,
    PAGE_BYTES,
    arguments,
    closed_loop,
    finish_cancelled,
    machine_line,
    open_loop,
    open_store,
    quantile,
    quantiles,
    register_seeded,
    row,
    shapes_of,
    table,
)
from bare_scheduler import Bench, layout_of
from tiny_checkpoints import write_tiny

from adapter_store.spec import AdapterKey
from lorasrv.config import BUILTIN_MODEL, POLICIES, EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.outputs import RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler.policies.fair import Fair
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.scheduler_output import ModelRunnerOutput
from lorasrv.worker import device
from lorasrv.worker.executor import StepHandle

FOLDER = ASSETS / "policies"
TINY = "tiny"
RANK = 8
NUM_PERSONAS = 10
NAMES = [f"p{number:03d}" for number in range(NUM_PERSONAS)]
# Most tokens that a request asks for beyond its answer: `max_tokens` tells the scheduler little.
ROOM = 64
HOT, HOT_FACTOR = 0, 10
CLASSES = (-1, 0, 1)
# Engines and their requests.


@dataclass(frozen=True)
class Base:
    """A base model: bytes of a page of 16 tokens in all layers, and token ids to draw prompts from."""

    options: ModelOptions
    page_bytes: int
    vocabulary: range


def base_of(name: str) -> Base:
    """Return the built-in base, or a random llama of three layers, which is made if it is missing."""
    if name == BUILTIN_MODEL:
        return Base(ModelOptions(model=name), PAGE_BYTES, range(100, 40_000))
    folder = FOLDER / TINY
    if not (folder / "tokenizer_config.json").exists():
        write_tiny(folder, "llama", max_position_embeddings=2048)
    options = ModelOptions(model=str(folder), quantization="none", dtype="float32")
    return Base(options, 2 * 32 * 16 * 4 * 3, range(10, 384))


@dataclass(frozen=True)
class Ask:
    """One request of a persona: `prompt` and `answer` tokens, `at_s` after the beginning."""

    persona: int
    prompt: int
    answer: int
    at_s: float = 0.0
    priority: int = 0


@dataclass
class Answer:
    """Times of one request on the performance counter's clock."""

    ask: Ask
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.arrivals_s[0] - self.sent_s)

    @property
    def took_s(self) -> float:
        return self.arrivals_s[-1] - self.sent_s

    @property
    def tpot_ms(self) -> float:
        return 1e3 * (self.arrivals_s[-1] - self.arrivals_s[0]) / max(1, len(self.arrivals_s) - 1)


class Script:
    """Stands before a model of random weights and ends answers where the labels of their requests say."""

    def __init__(self, engine: AsyncEngine) -> None:
        executor = engine._engine._parts.executor
        self._collect = executor.collect
        self._eos = min(engine.spec.eos_token_ids)
        executor.collect = self.collect  # type: ignore[method-assign]

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        output = self._collect(handle)
        ends = {s.request_id: s.num_generated + 1 >= _answer_of(s.request_id) for s in handle.step.requests}
        return ModelRunnerOutput({r: (self._said(tokens[0], ends[r]),) for r, tokens in output.sampled.items()})

    def _said(self, token: int, is_last: bool) -> int:
        if is_last:
            return self._eos
        return token if token != self._eos else token + 1


def _answer_of(request_id: RequestId) -> int:
    return int(request_id.partition("#")[0].partition(".")[2])


@dataclass
class Server:
    """A live engine whose adapters are all in the pool."""

    base: Base
    engine: AsyncEngine
    keys: Sequence[AdapterKey]
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def ask(self, ask: Ask) -> Answer:
        answer = Answer(ask, time.perf_counter())
        await self.follow(ask, answer.arrivals_s, SamplingParams(max_tokens=ask.answer + ROOM, temperature=0.0))
        assert len(answer.arrivals_s) == ask.answer, f"{len(answer.arrivals_s)} tokens instead of {ask.answer}"
        return answer

    async def follow(self, ask: Ask, arrivals_s: list[float], sampling: SamplingParams) -> None:
        """Append the time of each token of an answer as it comes."""
        prompt, label = self.rng.choices(self.base.vocabulary, k=ask.prompt), f"{ask.persona}.{ask.answer}"
        options = RequestOptions(
            adapter_key=self.keys[ask.persona], adapter_id=NAMES[ask.persona], priority=ask.priority
        )
        async for output in self.engine.generate(prompt, sampling, options, request_id=label):
            arrivals_s += [time.perf_counter()] * len(output.token_ids)

    async def warm_up(self, clients: int) -> None:
        await closed_loop(self.ask, mixed(3 * clients // 2), clients)


@asynccontextmanager
async def serving(a: argparse.Namespace, policy: str, pages: int | None = None, **more: Any) -> AsyncIterator[Server]:
    """Run an engine with all adapters in its pool; check its accounts at the end."""
    options = SchedulerOptions(**{"max_num_seqs": a.slots, "scheduling_policy": policy, "target_itl_ms": None, **more})
    memory = MemoryOptions(pool_bytes=(pages or a.pages) * a.base.page_bytes)
    config = EngineConfig(model=a.base.options, memory=memory, scheduler=options)
    with open_store(FOLDER / f"store-{a.model}", shapes_of(a.base.options.model)) as store:
        keys = register_seeded(store, NAMES, RANK)
        engine = await asyncio.to_thread(AsyncEngine.build, config, store)
        await engine.start()
        try:
            for key in keys:
                await engine.warm(key, 60.0)
            # The engine's own first step is behind it, whose request has no such label.
            Script(engine)
            yield Server(a.base, engine, keys)
            assert engine.is_alive, engine.error
        finally:
            await engine.shutdown()
        engine._engine.check_integrity()


def poisson(persona: int, per_s: float, seconds: float, seed: int) -> list[Ask]:
    """Return medium-sized requests at random times."""
    rng = random.Random(f"{seed} {persona}")
    asks, at_s = [], rng.expovariate(per_s)
    while at_s < seconds:
        asks.append(medium(persona, rng, at_s))
        at_s += rng.expovariate(per_s)
    return asks


def medium(persona: int, rng: random.Random, at_s: float = 0.0, priority: int = 0) -> Ask:
    """Return a request of medium size."""
    return Ask(persona, rng.randint(16, 96), rng.randint(16, 48), at_s, priority)


def mixed(count: int) -> list[Ask]:
    """Return medium-sized requests of all personas in turn."""
    rng = random.Random(0)
    return [medium(i % NUM_PERSONAS, rng) for i in range(count)]


def burst(size: int, seed: int) -> list[Ask]:
    """Return requests that come at once; answers of a persona have similar lengths, from 4 to 200 tokens."""
    rng, asks = random.Random(seed), []
    for _ in range(size):
        persona = rng.randrange(NUM_PERSONAS)
        typical = 4 * 50 ** (persona / (NUM_PERSONAS - 1))
        prompt = rng.randint(20, 400)
        asks.append(Ask(persona, prompt, max(4, min(200, round(typical * rng.uniform(0.85, 1.15))))))
    return asks


# One hot persona.


async def hot(a: argparse.Namespace) -> None:
    per_s = a.capacity or await _capacity(a)
    each = a.load * per_s / (HOT_FACTOR + NUM_PERSONAS - 1)
    arrivals = {p: poisson(p, each * (HOT_FACTOR if p == HOT else 1), a.seconds, seed=1) for p in range(NUM_PERSONAS)}
    nine = [ask for p, asks in arrivals.items() if p != HOT for ask in asks]
    print(
        f"{a.slots} request slots serve {per_s:.1f} requests/s; offered {a.load:g} times that for {a.seconds:g} s: "
        f"the hot persona {HOT_FACTOR * each:.1f}/s, the others {each:.1f}/s each"
    )
    titles = [f"{name} {end} ms" for name in ("TTFT", "TPOT") for end in ("p50", "p99")]
    table(("policy", "requests of", "number", *titles, *(f"{t.removesuffix(' ms')} to alone" for t in titles)))
    for policy in a.policies:
        async with serving(a, policy) as server:
            await server.warm_up(2 * a.slots)
            alone = _latencies(await open_loop(server.ask, nine))
            row(policy, "nine, alone", len(nine), *alone, *(1.0 for _ in alone))
            answers = await open_loop(server.ask, [*nine, *arrivals[HOT]])
        for label, is_hot in (("nine, beside hot", False), ("hot", True)):
            chosen = [answer for answer in answers if (answer.ask.persona == HOT) == is_hot]
            ratios = [x / y for x, y in zip(_latencies(chosen), alone, strict=True)]
            row(policy, label, len(chosen), *_latencies(chosen), *ratios)


async def _capacity(a: argparse.Namespace) -> float:
    """Return the requests a second with all request slots taken."""
    async with serving(a, "fcfs") as server:
        await server.warm_up(2 * a.slots)
        begun = time.perf_counter()
        await closed_loop(server.ask, mixed(a.probes), 2 * a.slots)
        return float(a.probes / (time.perf_counter() - begun))


def _latencies(answers: list[Answer]) -> list[float]:
    kinds = ([answer.ttft_ms for answer in answers], [answer.tpot_ms for answer in answers])
    return [ms for values in kinds for ms in quantiles(values, 0.5, 0.99)]


# Slots that change hands.

NUM_COOL = 4


@dataclass
class _Round:
    """What four personas saw of their first tokens, and the tokens a second of the hot one beside them."""

    ttfts_ms: list[float] = field(default_factory=list)
    cool_per_s: list[float] = field(default_factory=list)
    hot_per_s: list[float] = field(default_factory=list)


async def sharing(a: argparse.Namespace) -> None:
    """Compare `fair` with itself, not allowed to pause anything, in turns."""
    print(
        f"{NUM_COOL} personas, one request of {a.answer} tokens at a time each, beside {3 * a.slots} of another on "
        f"{a.slots} request slots; {a.rounds} turns of {a.seconds:g} s"
    )
    rounds = {name: _Round() for name in ("alone", "with pauses", "without")}
    async with serving(a, "fair") as server:
        await server.warm_up(2 * a.slots)
        for _ in range(a.rounds):
            await _share(a, server, rounds["alone"], is_hot=False)
            await _share(a, server, rounds["with pauses"], is_hot=True)
            with patch.object(Fair, "_above_share", lambda *_: []):
                await _share(a, server, rounds["without"], is_hot=True)
    titles = ("requests", "TTFT p50 ms", "p99", "p50 to alone", "p99 to alone", "tok/s", "hot tok/s", "to without")
    table(("four personas", *titles))
    alone, before = quantiles(rounds["alone"].ttfts_ms, 0.5, 0.99), statistics.mean(rounds["without"].hot_per_s)
    for name, seen in rounds.items():
        p50, p99 = quantiles(seen.ttfts_ms, 0.5, 0.99)
        cool_per_s, hot_per_s = statistics.mean(seen.cool_per_s), statistics.mean(seen.hot_per_s)
        ratios = p50 / alone[0], p99 / alone[1]
        row(name, len(seen.ttfts_ms), p50, p99, *ratios, cool_per_s, hot_per_s, hot_per_s / before)


async def _share(a: argparse.Namespace, server: Server, seen: _Round, *, is_hot: bool) -> None:
    rng, begun = random.Random(3), time.perf_counter()
    answers: list[Answer] = []

    async def client(persona: int) -> None:
        while time.perf_counter() - begun < a.seconds:
            answers.append(await server.ask(Ask(persona, rng.randint(16, 96), a.answer)))

    async def cool(persona: int) -> None:
        await asyncio.sleep(0.1 * persona)  # once the slots are taken
        await client(persona)

    clients = [client(HOT) for _ in range(3 * a.slots * is_hot)]
    await asyncio.gather(*clients, *(cool(1 + number) for number in range(NUM_COOL)))
    times = [at for answer in answers if answer.ask.persona == HOT for at in answer.arrivals_s]
    seen.hot_per_s.append(sum(at - begun < a.seconds for at in times) / a.seconds)
    others = [answer for answer in answers if answer.ask.persona != HOT]
    seen.cool_per_s.append(sum(at - begun < a.seconds for x in others for at in x.arrivals_s) / a.seconds)
    seen.ttfts_ms += [answer.ttft_ms for answer in others]


# Bursts.


async def bursts(a: argparse.Namespace) -> None:
    print(f"{a.burst} requests at once over {NUM_PERSONAS} personas, {a.slots} request slots, {a.rounds} times")
    titles = ("TTFT mean ms", "p50", "p99", "completion mean s", "ms per token, mean", "p99", "all done s")
    table(("policy", *titles, "preemptions", "share within prediction"))
    for policy in a.policies:
        async with serving(a, policy) as server:
            for turn in range(2):
                await open_loop(server.ask, burst(2 * a.burst, seed=-1 - turn))
            before, answers, took = server.engine.metrics.stats(), [], []
            for turn in range(a.rounds):
                done = await open_loop(server.ask, burst(a.burst, seed=turn))
                answers += done
                took.append(max(x.arrivals_s[-1] for x in done) - min(x.sent_s for x in done))
            after = server.engine.metrics.stats()
        ttfts = [answer.ttft_ms for answer in answers]
        each = [1e3 * answer.took_s / answer.ask.answer for answer in answers]
        cells = [statistics.mean(ttfts), *quantiles(ttfts, 0.5, 0.99)]
        cells += [statistics.mean(answer.took_s for answer in answers), statistics.mean(each), quantile(each, 0.99)]
        within = after.answers_within_prediction_total - before.answers_within_prediction_total
        covered = within / (after.answers_predicted_total - before.answers_predicted_total)
        row(policy, *cells, statistics.mean(took), after.preemptions_total - before.preemptions_total, covered)


# Priorities.


async def priorities(a: argparse.Namespace) -> None:
    print(f"{3 * a.slots} clients of priority 1 on {a.slots} request slots, one client each of 0 and -1")
    table(("policy", "priority", "requests", "TTFT mean ms", "p50", "p99", "p50 to that of 1"))
    for policy in a.policies:
        async with serving(a, policy) as server:
            await server.warm_up(2 * a.slots)
            answers = await _by_priority(a, server)
        usual = quantile([x.ttft_ms for x in answers if x.ask.priority == 1], 0.5)
        for priority in CLASSES:
            ttfts = [answer.ttft_ms for answer in answers if answer.ask.priority == priority]
            p50, p99 = quantiles(ttfts, 0.5, 0.99)
            row(policy, priority, len(ttfts), statistics.mean(ttfts), p50, p99, p50 / usual)


async def _by_priority(a: argparse.Namespace, server: Server) -> list[Answer]:
    """Let the urgent clients ask one request after another, once all slots are taken, until the many have ended."""
    rng, answers, over = random.Random(2), [], asyncio.Event()

    async def urgent(priority: int) -> None:
        await asyncio.sleep(0.2)
        while not over.is_set():
            answers.append(await server.ask(medium(rng.randrange(NUM_PERSONAS), rng, priority=priority)))

    async def many() -> list[Answer]:
        asks = [medium(i % NUM_PERSONAS, rng, priority=1) for i in range(a.many)]
        done = await closed_loop(server.ask, asks, 3 * a.slots)
        over.set()
        return done

    few = asyncio.gather(*(urgent(priority) for priority in CLASSES if priority < 1))
    usual, _ = await asyncio.gather(many(), few)
    return [*usual, *answers]


# Long prompts among streams.

WARM_PROMPTS = 3
BUDGET = 2048
STREAM_PROMPT, STREAM_TOKENS = 16, 1500
Streams = list[list[float]]


@dataclass(frozen=True)
class _Phase:
    """Gaps of the streams without prompts beside them, and while each of the prompts was computed."""

    plain_ms: list[float]
    beside_ms: list[float]
    ttfts_ms: list[float]


async def chunking(a: argparse.Namespace) -> None:
    print(f"{a.prompts} prompts of {a.prompt_tokens} tokens, one after another, among {a.streams} streams")
    titles = ("ITL p50 ms", "p99", "max", "ITL beside prompts p50", "p99", "max", "prompt TTFT p50", "max")
    table(("policy", "`target_itl_ms`", *titles, "p99 to plain p50", "p99 to target"))
    for policy in a.policies:
        plain = await _phase(a, policy, None)
        _print(policy, None, plain)
        for times in a.targets:
            target_ms = times * statistics.median(plain.plain_ms)
            _print(policy, target_ms, await _phase(a, policy, target_ms))


def _print(policy: str, target_ms: float | None, phase: _Phase) -> None:
    times = [ms for values in (phase.plain_ms, phase.beside_ms) for ms in quantiles(values, 0.5, 0.99, 1.0)]
    times += quantiles(phase.ttfts_ms, 0.5, 1.0)
    to_target = "" if target_ms is None else times[4] / target_ms
    row(policy, "none" if target_ms is None else target_ms, *times, times[4] / times[0], to_target)


async def _phase(a: argparse.Namespace, policy: str, target_ms: float | None) -> _Phase:
    limits = {"max_num_seqs": a.streams + 8, "max_num_batched_tokens": BUDGET, "target_itl_ms": target_ms}
    async with serving(a, policy, 2 * a.pages, **limits) as server, _streaming(server, a.streams) as streams:
        for _ in range(WARM_PROMPTS):
            await server.ask(Ask(1, a.prompt_tokens, 1))
        begun = time.perf_counter()
        await asyncio.sleep(a.plain_s)
        plain = _gaps_ms(streams, begun, time.perf_counter())
        beside, ttfts = [], []
        for _ in range(a.prompts):
            answer = await server.ask(Ask(0, a.prompt_tokens, 1))
            await asyncio.sleep(0)
            beside += _gaps_ms(streams, answer.sent_s, answer.arrivals_s[-1])
            ttfts.append(answer.ttft_ms)
            await asyncio.sleep(a.plain_s / 10)
        return _Phase(plain, beside, ttfts)


@contextlib.asynccontextmanager
async def _streaming(server: Server, count: int) -> AsyncIterator[Streams]:
    """Keep long answers going, and provide the times of their tokens; a stream that ends is begun again."""
    streams: Streams = []

    async def stream(persona: int) -> None:
        sampling = SamplingParams(max_tokens=STREAM_TOKENS, temperature=0.0, ignore_eos=True)
        while True:
            streams.append([])
            await server.follow(Ask(persona, STREAM_PROMPT, STREAM_TOKENS), streams[-1], sampling)

    tasks = [asyncio.create_task(stream(number % NUM_PERSONAS)) for number in range(count)]
    try:
        while server.engine.metrics.stats().requests_running < count:
            await asyncio.sleep(0.05)
        yield streams
    finally:
        await finish_cancelled(tasks)


def _gaps_ms(streams: Streams, begin_s: float, end_s: float) -> list[float]:
    """Return the gaps between two tokens of a stream, the later of which came within these times."""
    pairs = (pair for times in streams for pair in itertools.pairwise(times))
    return [1e3 * (later - earlier) for earlier, later in pairs if begin_s <= later <= end_s]


# The bare scheduler.

SLOTS = 64
CHURN_ANSWERS, STEADY_ANSWERS = (16, 48), (4000, 4000)
WARM_STEPS = 64
KEYS = [AdapterKey(f"b{number:063x}") for number in range(200)]


def times_us(policy: str, waiting: int, answers: tuple[int, int], steps: int) -> list[list[float]]:
    """Return the times of `schedule` and of `update_from_output` while `waiting` requests wait beside those that run.

    Args:
        answers: bounds of their tokens.
    """
    rng, numbers = random.Random(0), itertools.count()
    options = {"scheduling_policy": policy, "max_wait_steps": 1 << 30}
    memory = MemoryOptions(enable_prefix_caching=False)
    bare = Bench(40_000, SLOTS, 4096, memory=memory, options=options, page_size=16, checks=False)
    manager = bare.accounts.adapter_manager
    for key in KEYS:
        manager.reserve(key, layout_of(key), float("inf"))
    while not all(manager.is_resident(key) for key in KEYS):
        bare.step()
        bare.arrive()
    times = [timed(bare.scheduler, name) for name in ("schedule", "update_from_output")]
    for _ in range(WARM_STEPS + steps):
        while len(bare.scheduler.requests()) < SLOTS + waiting:
            key, length = rng.choice(KEYS), rng.randint(*answers)
            bare.add(f"r{next(numbers)}", 32, length, key, ignore_eos=True, adapter_id=f"a{key[-3:]}")
        bare.step()
    return [us[-steps:] for us in times]


def timed(scheduler: Scheduler, name: str) -> list[float]:
    """Return a list that gets this thread's microseconds in each call of a method."""
    us, method = [], getattr(scheduler, name)

    def call(*arguments: Any) -> Any:
        begun = time.thread_time_ns()
        result = method(*arguments)
        us.append((time.thread_time_ns() - begun) / 1e3)
        return result

    setattr(scheduler, name, call)
    return us


async def overhead(a: argparse.Namespace) -> None:
    print(f"{SLOTS} running, requests for {len(KEYS)} adapters, {a.steps} steps each", flush=True)
    table(("policy", "work", "waiting", "schedule µs p50", "p99", "update µs p50", "p99", "both, mean"))
    for policy in a.policies:
        for work, answers in (("steady", STEADY_ANSWERS), ("churn", CHURN_ANSWERS)):
            for waiting in a.waiting:
                both = times_us(policy, waiting, answers, a.steps)
                times = [us for values in both for us in quantiles(values, 0.5, 0.99)]
                row(policy, work, waiting, *(f"{us:.0f}" for us in (*times, sum(map(statistics.mean, both)))))


# The command.

MEASURES: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, None]]] = {
    "hot": hot,
    "sharing": sharing,
    "bursts": bursts,
    "chunking": chunking,
    "priorities": priorities,
    "overhead": overhead,
}


def main() -> None:
    a = arguments(
        __doc__,
        (*MEASURES, "all"),
        quick={"seconds": 1.0, "probes": 40, "burst": 12, "rounds": 1, "many": 48, "prompts": 2, "steps": 30},
        model=(TINY, f"{TINY} or {BUILTIN_MODEL}"),
        policies=(tuple(POLICIES), "to compare"),
        slots=(16, "max_num_seqs"),
        threads=(int, "that compute; 1 for the tiny base, all for the built-in one"),
        pages=(int, "of the pool; 6000 of the tiny base, 2000 of the built-in one"),
        load=(1.3, "hot: offered load, as a multiple of the capacity"),
        capacity=(float, "hot: requests/s with all slots taken; measured if left out"),
        seconds=(6.0, "hot and sharing: of arrivals"),
        probes=(160, "hot: requests that measure the capacity"),
        burst=(64, "bursts: requests at once"),
        rounds=(3, "bursts and sharing: times"),
        answer=(48, "sharing: tokens of an answer"),
        many=(256, "priorities: requests of priority 1"),
        streams=(32, "chunking: long answers"),
        prompts=(8, "chunking: long prompts"),
        prompt_tokens=(1000, "chunking: of a long prompt"),
        plain_s=(1.0, "chunking: seconds without prompts"),
        targets=((2.0, 4.0), "chunking: target_itl_ms, in plain steps"),
        waiting=((0, 64, 1000, 4000), "overhead: queue lengths"),
        steps=(100, "overhead: of each row"),
    )
    a.base = base_of(a.model)
    device.ENGINE_THREADS = a.threads or (1 if a.model == TINY else device.ENGINE_THREADS)
    a.pages = a.pages or (6000 if a.model == TINY else 2000)
    print(machine_line(), flush=True)
    for name in MEASURES if a.measure == "all" else (a.measure,):
        begun = time.monotonic()
        print(f"\n## {name}, {a.model}\n", flush=True)
        asyncio.run(MEASURES[name](a))
        print(f"\n{name}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
