"""Long prompts among streams: what each target for the time between tokens does to both.

`bench_policies.py chunking` calls this.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from policy_assets import open_store
from policy_load import NUM_PERSONAS, Answer, Ask, Server, quantile, row, run, serving, table

from lorasrv.config import SchedulerOptions
from lorasrv.sampling_params import SamplingParams

WARM_PROMPTS = 3
BUDGET = 2048
STREAM_PROMPT, STREAM_TOKENS = 16, 1500


@dataclass
class _Streams:
    """Long answers; a stream that ends is begun again. When each of their tokens came."""

    server: Server
    arrivals: list[list[float]] = field(default_factory=list)

    async def go_on(self, persona: int) -> None:
        sampling = SamplingParams(max_tokens=STREAM_TOKENS, temperature=0.0, ignore_eos=True)
        while True:
            prompt = self.server.rng.choices(self.server.base.vocabulary, k=STREAM_PROMPT)
            times: list[float] = []
            self.arrivals.append(times)
            label, options = f"{persona}.{STREAM_TOKENS}", {"adapter": self.server.keys[persona]}
            async for output in self.server.engine.generate(prompt, sampling, request_id=label, **options):
                times += [time.perf_counter()] * len(output.token_ids)

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Between two tokens of one stream, the later of which came within these times."""
        return [
            1e3 * (later - earlier)
            for times in self.arrivals
            for earlier, later in itertools.pairwise(times)
            if begin_s <= later <= end_s
        ]


@contextlib.asynccontextmanager
async def _streaming(server: Server, count: int) -> AsyncIterator[_Streams]:
    streams = _Streams(server)
    tasks = [asyncio.create_task(streams.go_on(number % NUM_PERSONAS)) for number in range(count)]
    try:
        while server.engine.metrics.snapshot().requests_running < count:
            await asyncio.sleep(0.05)
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class _Phase:
    """Gaps of the streams without prompts beside them, and while each of the prompts was computed."""

    plain_ms: list[float]
    beside_ms: list[float]
    prompts: list[Answer]

    @property
    def ttfts_ms(self) -> list[float]:
        return [answer.ttft_ms for answer in self.prompts]


def chunking(a: argparse.Namespace) -> None:
    run(_chunking(a))


async def _chunking(a: argparse.Namespace) -> None:
    print(f"{a.prompts} prompts of {a.prompt_tokens} tokens, one after another, among {a.streams} streams")
    titles = ("ITL p50 ms", "p99", "max", "ITL beside prompts p50 ms", "p99", "max", "prompt's TTFT ms p50", "max")
    table(("policy", "target_itl_ms", *titles, "p99 to plain p50", "p99 to target"))
    for policy in a.policies:
        plain = await _phase(a, policy, None)
        _print(policy, None, plain)
        for times in a.targets.split(","):
            target_ms = float(times) * statistics.median(plain.plain_ms)
            _print(policy, target_ms, await _phase(a, policy, target_ms))


def _print(policy: str, target_ms: float | None, phase: _Phase) -> None:
    times = [quantile(ms, q) for ms in (phase.plain_ms, phase.beside_ms) for q in (0.5, 0.99, 1.0)]
    times += [quantile(phase.ttfts_ms, q) for q in (0.5, 1.0)]
    to_target = "" if target_ms is None else times[4] / target_ms
    row(policy, "none" if target_ms is None else target_ms, *times, times[4] / times[0], to_target)


async def _phase(a: argparse.Namespace, policy: str, target_ms: float | None) -> _Phase:
    options = SchedulerOptions(
        max_num_seqs=a.streams + 8, max_num_batched_tokens=BUDGET, policy=policy, target_itl_ms=target_ms
    )
    store, keys = await asyncio.to_thread(open_store, a.base, NUM_PERSONAS)
    with store:
        async with (
            serving(a.base, store, keys, options, a.pages * 2) as server,
            _streaming(server, a.streams) as streams,
        ):
            for _ in range(WARM_PROMPTS):
                await server.ask(Ask(1, a.prompt_tokens, 1))
            begun = time.perf_counter()
            await asyncio.sleep(a.plain_s)
            plain = streams.gaps_ms(begun, time.perf_counter())
            beside, answers = [], []
            for _ in range(a.prompts):
                answers.append(await server.ask(Ask(0, a.prompt_tokens, 1)))
                await asyncio.sleep(0)
                beside += streams.gaps_ms(answers[-1].sent_s, answers[-1].arrivals_s[-1])
                await asyncio.sleep(a.plain_s / 10)
            return _Phase(plain, beside, answers)
