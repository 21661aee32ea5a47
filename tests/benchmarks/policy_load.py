"""Engines of `bench_policies.py`, in this process, and what is asked of them.

Weights are random, so answers end where the request's label says: `Script` puts an end-of-sequence token there, and no
other. To the scheduler they end by themselves; it learns an adapter's lengths as it would those of a persona.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from policy_assets import Base, names

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig, SchedulerOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import SchedulerOutput
from lorasrv.worker.model_runner import ModelRunnerOutput

ROOM = 64
"""Most tokens that a request asks for beyond its answer: `max_tokens` tells the scheduler little."""
NUM_PERSONAS = 10


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
    """Times on the performance counter's clock."""

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
    """Stands before the model: ends answers where their labels say, and counts what is in each step."""

    def __init__(self, engine: AsyncEngine) -> None:
        runner = engine._engine._parts.executor.runner
        self._run = runner.run
        self._eos = min(engine.spec.eos_token_ids)
        self.adapters_by_step: list[int] = []
        runner.run = self.run  # type: ignore[method-assign]

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = self._run(step)
        if step.scheduled:
            self.adapters_by_step.append(len({s.adapter_key for s in step.scheduled}))
        ends = {s.request_id: s.num_generated + 1 >= answer_of(s.request_id) for s in step.scheduled}
        return ModelRunnerOutput({r: (self._said(tokens[0], ends[r]),) for r, tokens in output.sampled.items()})

    def _said(self, token: int, is_last: bool) -> int:
        if is_last:
            return self._eos
        return token if token != self._eos else token + 1


def label(ask: Ask) -> str:
    return f"{ask.persona}.{ask.answer}"


def answer_of(request_id: RequestId) -> int:
    """How long an answer is to be, as its label says."""
    return int(request_id.partition("#")[0].partition(".")[2])


@dataclass
class Server:
    """A live engine whose adapters are all in the pool."""

    base: Base
    engine: AsyncEngine
    script: Script
    keys: Sequence[AdapterKey]
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def ask(self, ask: Ask) -> Answer:
        """One request, from now on to its last token."""
        prompt = self.rng.choices(self.base.vocabulary, k=ask.prompt)
        sampling = SamplingParams(max_tokens=ask.answer + ROOM, temperature=0.0)
        answer = Answer(ask, time.perf_counter())
        name = names(len(self.keys))[ask.persona]
        options = {"adapter": self.keys[ask.persona], "adapter_id": name, "priority": ask.priority}
        async for output in self.engine.generate(prompt, sampling, request_id=label(ask), **options):
            answer.arrivals_s += [time.perf_counter()] * len(output.token_ids)
        assert len(answer.arrivals_s) == ask.answer, f"{len(answer.arrivals_s)} tokens instead of {ask.answer}"
        return answer

    async def all(self, asks: Iterable[Ask]) -> list[Answer]:
        """Each at its time (open loop)."""
        begun = time.perf_counter()

        async def at_its_time(ask: Ask) -> Answer:
            await asyncio.sleep(max(0.0, begun + ask.at_s - time.perf_counter()))
            return await self.ask(ask)

        return await asyncio.gather(*(at_its_time(ask) for ask in asks))

    async def loop(self, asks: Sequence[Ask], clients: int) -> list[Answer]:
        """So many clients, each of which asks again when it is answered (closed loop)."""
        left, answers = iter(asks), []

        async def client() -> None:
            for ask in left:
                answers.append(await self.ask(ask))

        await asyncio.gather(*(client() for _ in range(clients)))
        return answers


@asynccontextmanager
async def serving(
    base: Base, store: AdapterStore, keys: Sequence[AdapterKey], options: SchedulerOptions, pages: int
) -> AsyncIterator[Server]:
    """An engine with all adapters in its pool; ends with its accounts checked."""
    config = EngineConfig(model=base.options, memory=base.memory(pages), scheduler=options)
    engine = await asyncio.to_thread(AsyncEngine.build, config, store)
    script = Script(engine)
    await engine.start()
    try:
        for key in keys:
            await engine.warm(key, 60.0)
        yield Server(base, engine, script, keys)
        assert engine.is_alive, engine.error
    finally:
        await engine.shutdown()
    engine._engine.check_integrity()


def poisson(persona: int, per_s: float, seconds: float, seed: int) -> list[Ask]:
    """Requests of middling size at random times."""
    rng = random.Random(f"{seed} {persona}")
    asks, at_s = [], rng.expovariate(per_s)
    while at_s < seconds:
        asks.append(middling(persona, rng, at_s))
        at_s += rng.expovariate(per_s)
    return asks


def middling(persona: int, rng: random.Random, at_s: float = 0.0, priority: int = 0) -> Ask:
    return Ask(persona, rng.randint(16, 96), rng.randint(16, 48), at_s, priority)


def burst(size: int, seed: int) -> list[Ask]:
    """Prompts of all lengths at once; each persona's answers are about as long as its others, from 4 to 200 tokens."""
    rng = random.Random(seed)
    return [
        Ask(persona, rng.randint(20, 400), max(4, min(200, round(typical(persona) * rng.uniform(0.85, 1.15)))))
        for persona in (rng.randrange(NUM_PERSONAS) for _ in range(size))
    ]


def typical(persona: int) -> float:
    return 4 * 50 ** (persona / (NUM_PERSONAS - 1))


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that is at least as large as `q` of all; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def run(measure: Coroutine[Any, Any, None]) -> None:
    asyncio.run(measure)


def table(titles: Sequence[str]) -> None:
    print(f"\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(f'{cell:.2f}' if isinstance(cell, float) else str(cell) for cell in cells)} |", flush=True)
