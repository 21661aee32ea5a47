"""Measure the host's part of a GPU's step, all but the replay of its CUDA graph, with a device that does nothing.

    python tests/benchmarks/bench_gpu_host.py [--contexts 200,700] [--steps 60]

A whole engine of Llama-3-8B's shape: scheduler, tables of the step, replay, greedy sampling, book-keeping, with the
drafters of a default server or without. Its device is torch's meta device, whose copies do nothing, and a replay is one
call that does nothing; logits are few, random and on the host, so that hardly anything can be drafted. `device calls`
counts what torch would be asked to do on the device besides the replay. `eager` steps have no graph: every kernel is
launched from Python, here up to Triton's own launcher, whose time comes on top; `launches` counts them. Times are this
thread's own, in milliseconds: medians of steps and of their parts.
"""

import gc
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from harness import arguments, machine_line, row, table
from gpu_step import random_weights
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions, SchedulerOptions, SpeculationOptions
from lorasrv.engine.core import EngineCore
from lorasrv.engine.parts import EngineParts
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.models.lora_sites import site_dims
from lorasrv.models.quantization.unquantized import FloatEmbedding, FloatLinear
from lorasrv.models.spec import SHAPES
from lorasrv.outputs import RequestId
from lorasrv.request import AdapterTerm, EngineCoreRequest
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.speculation.drafters import make_drafters
from lorasrv.speculation.speculator import Speculator
from lorasrv.worker.adapter_loader import Done, LoaderReport
from lorasrv.worker.cuda_graphs import GraphedSteps, buckets
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.executor import InProcessExecutor
from lorasrv.worker.model_runner import ModelRunner
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import Ops

META, BF16 = torch.device("meta"), torch.bfloat16
SPEC, PAGE, RANK, MAX_LEN, VOCAB = SHAPES["llama-3-8b"], 16, 16, 8192, 64
LAYOUT = AdapterLayout(
    site_dims(SPEC), (tuple((RANK,) * len(site.out_features) for site in SPEC.sites()),) * SPEC.num_layers, 2
)


class AtOnce:
    """A loader whose adapters are there as soon as they are asked for."""

    def __init__(self) -> None:
        self._reports: list[LoaderReport] = []

    def load(self, key: AdapterKey) -> None:
        self._reports.append(LoaderReport(key, Done.LOADED))

    def copy(self, key: AdapterKey, placed: PlacedAdapter) -> None:
        self._reports.append(LoaderReport(key, Done.COPIED))

    def cancel(self, key: AdapterKey) -> None:
        self._reports = [report for report in self._reports if report.key != key]

    def poll(self) -> list[LoaderReport]:
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        pass


class Replay:
    """A graph that computes nothing: its logits are random."""

    def __init__(self, slots: int) -> None:
        self._outputs = itertools.cycle(torch.rand(97, slots, VOCAB))
        self.output = torch.rand(slots, VOCAB)

    def replay(self) -> None:
        self.output.copy_(next(self._outputs))


class DeviceCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count what torch does with tensors of the device, but for views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, made))
        self.count += not func.is_view and any(isinstance(t, torch.Tensor) and t.device == META for t in leaves)
        return made


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count the launches of each Triton kernel instead of running them."""
    counts = Counter[str]()

    def launch(executor: Any, *args: Any, **options: Any) -> None:
        counts[executor.fn.__name__] += 1

    with patch.object(GridExecutor, "__call__", launch):
        yield counts


def engine_of(rows: int, adapters: int, context: int, steps: int, mode: str = "graph") -> EngineCore:
    """Return an engine in which so many answers run; `mode` is one of `MODES`."""
    ops, kv_format = Ops(META, "triton"), KV_FORMATS["bfloat16"]
    page_bytes = kv_format.page_bytes(SPEC.num_kv_heads, SPEC.head_dim, PAGE)
    pages = 2 * (rows * -(-(context + steps) // PAGE) + adapters * LAYOUT.num_pages(page_bytes))
    memory = DevicePool(SPEC, pages, PAGE, kv_format, META, scratch=True)
    limits = DecoderLimits(MAX_LEN, 2048, rows, BF16, BF16)
    empty = torch.empty(0, SPEC.hidden_size, device=META)
    weights = ModelWeights(SPEC, FloatEmbedding(empty), (), empty[0:0], FloatLinear(empty, None), "none")
    if mode == "eager":
        weights = random_weights(SPEC, ops, "int4", BF16)
    runner = ModelRunner(weights, memory, limits, ops)
    replay, compute = Replay(buckets(rows)[-1]), runner._decoder.forward

    def forward(batch: Any) -> torch.Tensor:
        if mode == "eager":
            compute(batch)
            replay.replay()
        return replay.output

    runner._decoder.forward = forward  # type: ignore[method-assign]
    if mode != "eager":
        runner._graphs = GraphedSteps(runner._decoder.forward, SPEC, memory, limits, lambda compute: replay)
    geometry = PoolLayout(pages, PAGE, page_bytes, SPEC.num_layers)
    accounts = MemoryManager.make(geometry, MemoryOptions(), "recompute", lambda key: False)
    drafters = [] if mode == "graph, off" else make_drafters(SpeculationOptions())
    options, speculator = SchedulerOptions(rows, 2048, target_itl_ms=None), Speculator(drafters, VOCAB)
    scheduler = Scheduler(options, accounts, frozenset(), speculator=speculator)
    parts = EngineParts(accounts, scheduler, InProcessExecutor(runner), None, MAX_LEN, 0, 0)
    engine = EngineCore(parts, AtOnce())
    for number in range(rows):
        adapter = number % adapters if adapters else None
        key = None if adapter is None else AdapterKey(f"{adapter:064x}")
        most_tokens = steps + 100
        params = SamplingParams(max_tokens=most_tokens, temperature=0.0, ignore_eos=True)
        message = EngineCoreRequest(
            RequestId(str(number)),
            tuple(range(context)),
            most_tokens,
            params,
            () if key is None else (AdapterTerm(key, 1.0, LAYOUT),),
            adapter_key=key,
            adapter_id=key or "",
        )
        engine.add_request(message)
    return engine


def warmed(rows: int, adapters: int, context: int, steps: int, mode: str = "graph") -> EngineCore:
    """Return an engine whose answers have begun."""
    engine = engine_of(rows, adapters, context, steps, mode)
    while any(request.num_generated_tokens < 3 for request in engine._scheduler.requests()):
        engine.step()
    return engine


def measure(rows: int, adapters: int, context: int, steps: int, mode: str) -> list[object]:
    """Return the cells of one row of the table."""
    with launches() as launched:
        engine = warmed(rows, adapters, context, steps, mode)
        times = timed(engine, rows, steps)
        launched.clear()
        with DeviceCalls() as calls:  # type: ignore[no-untyped-call]
            engine.step()
        return [f"{rows}/{adapters}", mode, context, *times, calls.count, launched.total()]


def timed(engine: EngineCore, rows: int, steps: int) -> list[float]:
    """Return the medians of steps and their parts, ms."""
    spent = []
    with thread_times():
        for _ in range(steps):
            before, begun = engine.profile.seconds(), time.thread_time()
            outputs = engine.step()
            whole = time.thread_time() - begun
            assert len(outputs) == rows
            after = engine.profile.seconds()
            spent.append([whole, *(after.get(part, 0.0) - before.get(part, 0.0) for part in PARTS)])
    return [1e3 * statistics.median(seconds) for seconds in zip(*spent, strict=True)]


PARTS = ("scheduling", "pages", "batch", "sampling")
MODES = ("graph", "graph, off", "eager")
"""Replayed, or launched kernel by kernel, and `off` without drafters."""


@contextmanager
def thread_times() -> Iterator[None]:
    """Let the engine's profile count this thread's time, without collections of garbage."""
    gc.collect()
    gc.disable()
    with patch.object(time, "perf_counter", time.thread_time):
        yield
    gc.enable()


def main() -> None:
    work = ((1, 0), (1, 1), (32, 0), (32, 8), (32, 32), (64, 64))
    a = arguments(__doc__, contexts=((200, 700, 3000), "tokens of each sequence"), steps=(60, "measured"))
    torch.set_num_threads(1)
    print(machine_line(), flush=True)
    table(("rows/adapters", "steps", "context", "ms a step", *PARTS, "device calls", "launches"))
    for rows, adapters in work:
        for context, mode in itertools.product(a.contexts, MODES):
            row(*measure(rows, adapters, context, a.steps, mode))


if __name__ == "__main__":
    main()
