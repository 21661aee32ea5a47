"""Measure this machine for `replay` with a short run of the real engine on generated adapters.

The engine runs as in a server: in its thread, beside an event loop that takes the outputs, with adapters read by the
loader's threads. The measurements are the engine's own, from which it also learns while serving.
"""

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.engine.factory import build
from lorasrv.memory.cost_model import StepCosts, StepShape
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes
from lorasrv.offline.planner.machine_profile import MachineProfile
from lorasrv.offline.planner.processors import ProcessorTimes
from lorasrv.offline.planner.random_adapters import write_random_adapter
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.device import compute_alone

Progress = Callable[[str, float], None]
NUM_ADAPTERS = 16
LARGE = 4
"""Rank ratio of every other adapter, which separates a load's fixed cost from its cost per byte."""
MAX_RANK = 64
NUM_STREAMS = 8
STREAM_TOKENS = 400
STREAMS_ALONE_S = 1.0
LOAD_EVERY_S = 0.6
LOADS_S, STEPS_S = 10.0, 20.0
"""Time limits of the two parts, for a slow or busy machine."""
MIN_WAVES = 4
MOST_MISFIT = 0.25
MOST_OTHERS = 0.1
PASSES = 3
POOL_BYTES = 1 << 29
_Step = tuple[float, StepShape, float]
"""End time, shape and duration of a step."""

# Requests, distinct adapters, tokens per prompt, tokens per answer, seconds between two requests.
WAVES = (
    (16, 16, 32, 10, 0.0),
    (1, 0, 64, 12, 0.0),
    (4, 0, 512, 6, 0.0),
    (24, 16, 64, 16, 0.08),
    (32, 0, 32, 10, 0.0),
    (1, 1, 64, 12, 0.0),
    (8, 2, 256, 8, 0.0),
    (32, 16, 32, 10, 0.0),
    (2, 2, 512, 8, 0.0),
    (16, 4, 64, 10, 0.0),
    (4, 4, 128, 10, 0.0),
    (16, 0, 48, 10, 0.0),
    (8, 8, 64, 10, 0.0),
)


@dataclass(slots=True)
class _Observed(StepCosts):
    """Keep each observed step."""

    steps: list[_Step] = field(default_factory=list)

    def observe(self, shape: StepShape, seconds: float) -> None:
        if shape.tokens:
            self.steps.append((time.perf_counter(), shape, seconds))
        StepCosts.observe(self, shape, seconds)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Hold the measured costs and their quality."""

    costs: MachineProfile
    # Share by which the steps together took longer than the costs predict. Large if something else ran on the machine:
    # a step waits for its slowest thread.
    misfit: float
    # Share of the processors that other programs used meanwhile. Costs may fit well and be too high because of them.
    others: float

    @property
    def problem(self) -> str:
        """Return why the costs cannot be relied on; "" if they can."""
        found = []
        if self.others > MOST_OTHERS:
            found.append(f"other programs used {100 * self.others:.0f} % of the processors meanwhile")
        if self.misfit > MOST_MISFIT:
            found.append(f"steps took {100 * self.misfit:.0f} % longer than the costs explain")
        return ", and ".join(found)


def calibrate(config: EngineConfig, rank: int, progress: Progress) -> Calibrated:
    """Measure for half a minute on an otherwise idle machine; on a busy one, stop early with the results so far.

    Raises:
        ModelError, ConfigError: the model cannot be served, or an option is wrong.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lorasrv-calibrate-") as folder,
        closing(
            open_checkpoint(config.model.model, config.model.load_format, config.model.quantized_weights)
        ) as checkpoint,
        AdapterStore(Path(folder), base_shapes(checkpoint.spec, checkpoint.name)) as store,
    ):
        compute_alone()
        for number in range(NUM_ADAPTERS):
            progress("making adapters", number / NUM_ADAPTERS)
            large = min(LARGE * rank, max(rank, MAX_RANK))
            write_random_adapter(store, f"a{number}", rank if number % 2 else large, seed=number)
        progress("making adapters", 1.0)
        memory = replace(config.memory, pool_bytes=POOL_BYTES, host_cache_bytes=POOL_BYTES, enable_prefix_caching=False)
        built = build(checkpoint, replace(config, memory=memory), store, progress)
        assert built.parts.source is not None
        observed = built.parts.memory.costs.step = _Observed()
        keys = [store.resolve(f"a{number}").key for number in range(NUM_ADAPTERS)]
        adapters = [(key, built.parts.source.layout(key).nbytes) for key in keys if key is not None]
        engine = AsyncEngine(built, checkpoint.name, config.scheduler)
        return asyncio.run(_Run(engine, adapters, observed, progress).all())


class _Run:
    """Run the measurements one after another."""

    def __init__(
        self, engine: AsyncEngine, adapters: Sequence[tuple[AdapterKey, int]], observed: _Observed, progress: Progress
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._observed = observed
        self._progress = progress
        self._rng = random.Random(0)

    async def all(self) -> Calibrated:
        await self._engine.start()
        try:
            await self._wave(4, 0, 64, 8)  # warm-up: touch pages and kernels for the first time
            begun = ProcessorTimes.now()
            edge_s = await self._edge()
            loads = await self._loads()
            await self._steps()
            others = ProcessorTimes.now().others(begun)
        finally:
            await self._engine.shutdown()
        steps = self._observed.steps
        copy_byte_s = self._engine.metrics.stats().load_costs["copy_byte"]
        step = fitted(steps)
        costs = MachineProfile(
            step=step,
            between_steps_s=_between(steps),
            edge_s=edge_s,
            load_s=loads.each_s,
            load_byte_s=loads.byte_s,
            copy_byte_s=copy_byte_s,
            swap_byte_s=copy_byte_s,
            stall_s=loads.stall_s,
            stall_byte_s=loads.stall_byte_s,
        )
        model = StepCosts.from_dict(step)
        predicted_s = sum(model.seconds(shape) for _, shape, _ in steps)
        misfit = sum(seconds for *_, seconds in steps) / max(1e-9, predicted_s) - 1
        return Calibrated(costs, misfit, others)

    async def _wave(self, requests: int, adapters: int, prompt: int, tokens: int, every_s: float = 0.0) -> None:
        async def one(number: int) -> None:
            await asyncio.sleep(number * every_s)
            await self._ask(number % adapters if adapters else None, prompt, tokens)

        await asyncio.gather(*(one(number) for number in range(requests)))

    async def _ask(self, adapter: int | None, prompt: int, tokens: int) -> float:
        """Return the seconds until the first token of a request, shortened to the model's context. Taking an output
        costs the event loop about what a server's answer would.
        """
        context = self._engine.max_model_len
        tokens = min(tokens, context // 2)
        prompt = min(prompt, context - tokens)
        ids = [self._rng.randrange(100, self._engine.spec.vocab_size) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        key = None if adapter is None else self._adapters[adapter][0]
        begun, first_s = time.perf_counter(), 0.0
        async for output in self._engine.generate(ids, sampling, RequestOptions(adapter_key=key)):
            first_s = first_s or time.perf_counter() - begun
            json.dumps(asdict(output.timing) | {"text": output.text, "finish_reason": output.finish_reason})
        return first_s

    async def _edge(self) -> float:
        """Measure the time that a first token takes in addition to its step."""
        beside = []
        for _ in range(5):
            first_s = await self._ask(None, 16, 1)
            beside.append(first_s - self._observed.steps[-1][2])
        return max(0.0, statistics.median(beside))

    async def _loads(self) -> "_Loads":
        """Measure loads of adapters while requests run."""
        self._observed.steps.clear()
        streams = asyncio.create_task(self._wave(NUM_STREAMS, 0, 32, STREAM_TOKENS))
        ends_s = time.perf_counter() + LOADS_S
        await asyncio.sleep(STREAMS_ALONE_S)
        loads = []
        for number, (key, nbytes) in enumerate(self._adapters):
            self._progress("measuring loads", number / NUM_ADAPTERS)
            before, begun = self._engine.metrics.stats().adapter_load_seconds_total, time.perf_counter()
            await self._engine.warm(key, LOADS_S)
            ended = time.perf_counter()
            seconds = self._engine.metrics.stats().adapter_load_seconds_total - before
            loads.append(_MeasuredLoad(nbytes, seconds, begun, ended))
            if ended > ends_s and number % 2:
                break
            await asyncio.sleep(max(0.0, LOAD_EVERY_S - (ended - begun)))
        self._progress("measuring loads", 1.0)
        streams.cancel()
        await asyncio.gather(streams, return_exceptions=True)
        return _Loads.of(loads, self._observed.steps)

    async def _steps(self) -> None:
        self._observed.steps.clear()
        ends_s = time.perf_counter() + STEPS_S
        for number, wave in enumerate(WAVES):
            self._progress("measuring steps", number / len(WAVES))
            if time.perf_counter() < ends_s or number < MIN_WAVES:
                await self._wave(*wave[:4], every_s=wave[4])
        self._progress("measuring steps", 1.0)


@dataclass(frozen=True, slots=True)
class _MeasuredLoad:
    """Hold an adapter's read of `seconds`, which happened between the other two times."""

    nbytes: int
    seconds: float
    begun_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class _Loads:
    each_s: float
    byte_s: float
    stall_s: float = 0.0
    stall_byte_s: float = 0.0

    @classmethod
    def of(cls, loads: Sequence[_MeasuredLoad], steps: Sequence[_Step]) -> "_Loads":
        """Fit load costs. The difference between steps during a load and other steps is the stall that it caused."""
        each_s, byte_s = _line([(load.nbytes, load.seconds) for load in loads])
        alike = [(end - s, end, s) for end, shape, s in steps if shape.tokens == shape.requests == NUM_STREAMS]
        beside = [[s for begin, end, s in alike if begin < load.ended_s and load.begun_s < end] for load in loads]
        alone = [s for begin, end, s in alike if not any(begin < x.ended_s and x.begun_s < end for x in loads)]
        if not alone:
            return cls(each_s, byte_s)
        usual_s = statistics.median(alone)
        lost = [(x.nbytes, max(0.0, sum(s - usual_s for s in met))) for x, met in zip(loads, beside, strict=True)]
        return cls(each_s, byte_s, *_line(lost))


def fitted(steps: Sequence[_Step]) -> dict[str, float]:
    """Fit the model that the engine learns, giving all steps the same weight."""
    costs = StepCosts()
    rng = random.Random(0)
    for _ in range(PASSES):
        for _, shape, seconds in rng.sample(steps, len(steps)):
            costs.observe(shape, seconds)
    return costs.as_dict()


def _between(steps: Sequence[_Step]) -> float:
    """Return the median time from the end of a step to the start of the next; mostly there was work."""
    gaps = [after[0] - after[2] - before[0] for before, after in itertools.pairwise(steps)]
    return max(0.0, statistics.median(gaps)) if gaps else 0.0


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit (seconds at zero bytes, seconds per byte), neither negative, to the medians of small and of large
    adapters.
    """
    small, large = min(nbytes for nbytes, _ in points), max(nbytes for nbytes, _ in points)
    small_s, large_s = (statistics.median(s for n, s in points if n == nbytes) for nbytes in (small, large))
    byte_s = (large_s - small_s) / (large - small) if large > small else small_s / small
    byte_s = min(max(byte_s, 0.0), small_s / small)
    return max(0.0, small_s - byte_s * small), byte_s
