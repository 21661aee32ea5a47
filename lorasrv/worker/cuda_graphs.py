"""CUDA graphs: steps of single tokens as one replay instead of a thousand launches.

A graph is captured when its bucket is first needed, after that step has been computed without one. Buckets: rows, parts
of keys, rank; rank 0 is a graph without adapters, whose steps pay nothing for them. Rows that pad a bucket are base
rows of one token that write to the scratch page (`DevicePool.scratch_page`). A step that fits no bucket is computed
without a graph. NOT MEASURED: no GPU was at hand.

Source: graphs by bucket of rows, vLLM; separate graphs without adapters, SGLang.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lorasrv.models.lora_sites import site_dims
from lorasrv.models.spec import ModelSpec
from lorasrv.scheduler_output import ScheduledRequest, SchedulerOutput
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import ForwardBatch, by_adapter
from sgmv_kernels.errors import CapacityExceeded
from sgmv_kernels.metadata.segments import BASE
from sgmv_kernels.ops import StepTables
from sgmv_kernels.triton_ops.graph_plans import PlanDims, StaticCapacity, StaticPlans, scratch_rows

SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
BUCKET_STEP = 32
PARTS = (1, 4, 16, 64)
"""Parts of keys per row, on average."""
MAX_ITEMS = 2048
"""Most parts of keys in a graph: each has a partial result of some 64 KiB."""
RANKS = (0, 16, 32, 64, 128, 256)
MAX_GRAPHS = 96
MAX_CONTEXT = 16384
"""Longest context with graphs: page tables are copied at their full capacity every step."""
logger = logging.getLogger(__name__)
Forward = Callable[[ForwardBatch], Tensor]


class Recorded(Protocol):
    """Replay a captured computation. `output` holds its result until the next `replay`."""

    @property
    def output(self) -> Tensor: ...

    def replay(self) -> None: ...


class CudaGraph:
    """Capture a computation that has run before; its memory comes from a pool that all graphs share."""

    def __init__(self, compute: Callable[[], Tensor], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may allocate and copy meanwhile: the rules of a capture bind this thread's calls only.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.output = compute()

    def replay(self) -> None:
        self._graph.replay()


def cuda_recorder() -> Callable[[Callable[[], Tensor]], Recorded]:
    """Return a function that captures computations with one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda compute: CudaGraph(compute, pool)


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows that have graphs; the last one holds the largest step."""
    large = range(SMALL_BUCKETS[-1] + BUCKET_STEP, max_num_seqs + BUCKET_STEP, BUCKET_STEP)
    every = (*SMALL_BUCKETS, *large)
    return every[: next(i for i, rows in enumerate(every) if rows >= max_num_seqs) + 1]


@dataclass(slots=True)
class _Held:
    plans: StaticPlans
    recorded: Recorded | None = None


class GraphedSteps:
    """Compute the steps that have graphs. For the engine thread."""

    def __init__(
        self,
        forward: Forward,
        spec: ModelSpec,
        memory: DevicePool,
        limits: DecoderLimits,
        record: Callable[[Callable[[], Tensor]], Recorded],
    ) -> None:
        assert memory.scratch_page is not None, "padding rows need a scratch page"
        self._forward, self._record = forward, record
        self._scratch_page = memory.scratch_page
        self._buckets = buckets(limits.max_samples)
        self._max_pages = -(-min(limits.max_model_len, MAX_CONTEXT) // memory.page_size)
        self._dims = PlanDims(
            sites=site_dims(spec),
            layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            itemsize=max(limits.activation.itemsize, memory.kv_pages(0).keys.itemsize),
            page_size=memory.page_size,
            num_pages=memory.scratch_page + 1,
            adapter_dtype=limits.adapter_dtype,
            device=memory.device,
        )
        self._held: dict[StaticCapacity, _Held] = {}
        # One for all graphs: at 64 rows the logits of a large vocabulary are 33 MB, and there may be many graphs.
        shape = self._buckets[-1], spec.vocab_size
        self._logits = torch.empty(shape, dtype=torch.float32, device=memory.device)

    def compute(self, step: SchedulerOutput) -> tuple[Tensor, tuple[ScheduledRequest, ...]] | None:
        """Compute a step if it has a graph.

        Returns:
            Logits [B, V] fp32, valid until the next step, and the request of each row; None if the step has no graph.
        """
        scheduled, keys = by_adapter(step)
        rows = next((bucket for bucket in self._buckets if bucket >= len(scheduled)), None)
        ranks = [step.placements[key].layout.max_rank for key in keys]
        rank = next((most for most in RANKS if most >= max(ranks, default=0)), None)
        pages = max(len(s.page_table) for s in scheduled)
        single = all(s.samples and len(s.token_ids) == 1 for s in scheduled)
        if not single or rows is None or rank is None or pages > self._max_pages:
            return None
        for parts in PARTS:
            if rows * parts > MAX_ITEMS:
                break
            held = self._filled(StaticCapacity(rows, self._max_pages, parts, rank), step)
            if held is not None:
                return self._play(held)[: len(scheduled)], tuple(scheduled)
        return None

    def _filled(self, capacity: StaticCapacity, step: SchedulerOutput) -> _Held | None:
        """Return the plans of a bucket filled with a step; None if it does not fit."""
        scheduled, keys = by_adapter(step)
        held = self._held.pop(capacity, None) or _Held(StaticPlans(self._dims, capacity))
        index = {key: i for i, key in enumerate(keys)}
        padding = capacity.rows - len(scheduled)
        try:
            held.plans.update(
                token_ids=[s.token_ids[0] for s in scheduled] + [0] * padding,
                kv_lens=[s.start + 1 for s in scheduled] + [1] * padding,
                page_tables=scratch_rows([s.page_table for s in scheduled], capacity.rows, self._scratch_page),
                row_adapters=[BASE if s.adapter_key is None else index[s.adapter_key] for s in scheduled]
                + [BASE] * padding,
                adapters=[step.placements[key] for key in keys],
            )
        except CapacityExceeded:
            if held.recorded is not None:
                self._held[capacity] = held
            return None
        if len(self._held) >= MAX_GRAPHS:
            # The least recently used one: each moves to the end when it is used.
            del self._held[next(iter(self._held))]
        self._held[capacity] = held
        return held

    def _play(self, held: _Held) -> Tensor:
        if held.recorded is not None:
            held.recorded.replay()
            return held.recorded.output
        plans = held.plans
        assert plans.attention is not None
        assert plans.lora is not None
        inputs = plans.inputs
        every = torch.arange(inputs.shape[1], device=inputs.device)
        batch = ForwardBatch(inputs[0], inputs[1], StepTables(plans.attention, plans.lora, every), ())
        # Compiles kernels, which a capture cannot; its result is this step's.
        logits = self._forward(batch)
        target = self._logits[: inputs.shape[1]]
        try:
            held.recorded = self._record(lambda: target.copy_(self._forward(batch)))
        except RuntimeError as error:
            # This step is computed already; later ones of its bucket are computed without a graph.
            logger.warning("steps of %d rows have no CUDA graph: %s", inputs.shape[1], error)
        return logits
