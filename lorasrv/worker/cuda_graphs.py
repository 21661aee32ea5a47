"""CUDA graphs: steps of single tokens as one replay instead of a thousand launches.

A graph is captured when its bucket is first needed, after that step has been computed without one. Buckets: rows, parts
of keys, rank; rank 0 is a graph without adapters, whose steps pay nothing for them. Rows that pad a bucket are base
rows of one token that write to the scratch page (`DevicePool.scratch_page`). A step that fits no bucket is computed
without a graph. NOT MEASURED: no GPU was at hand.

A replay reads the addresses of the capture, so whatever a captured pass reads outlives its graph: weights, pool and
rotary tables, the output that all graphs share, and the static tensors of its bucket.

Source: graphs by bucket of rows, vLLM; separate graphs without adapters, SGLang.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lorasrv.models.lora_sites import site_dims
from lorasrv.models.spec import ModelSpec
from lorasrv.scheduler_output import ScheduledRequest, SchedulerOutput
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import ForwardBatch, by_adapter
from sgmv_kernels.formats.adapter_panels import PlacedAdapter
from sgmv_kernels.metadata.segments import BASE
from sgmv_kernels.ops import StepTables
from sgmv_kernels.triton_ops.attention_metadata import split_of
from sgmv_kernels.triton_ops.block_sizes import attention_config, device_name
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
RETRY_STEPS = 4096
"""Steps until a bucket whose capture failed is captured again: memory is short for a while, or for good."""
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
        capture = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        # A capture that cannot be ended leaves its own stream current; the outer block takes that back.
        with torch.cuda.stream(torch.cuda.current_stream()), capture:
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
class _Bucket:
    """Hold the static tensors that a captured pass reads, as long as its graph."""

    plans: StaticPlans
    # int64 [rows]: every row has logits.
    sample_rows: Tensor
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
        self._rows = buckets(limits.max_samples)
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
        config = attention_config(device_name(memory.device), self._dims.head_dim, self._dims.itemsize)
        self._split_tokens = config.split_tokens
        self._buckets: dict[StaticCapacity, _Bucket] = {}
        self._num_steps = 0
        # Of buckets whose capture failed: the step from which it is tried again.
        self._retry_at: dict[StaticCapacity, int] = {}
        # One for all graphs: at 64 rows the logits of a large vocabulary are 33 MB, and there may be many graphs.
        shape = self._rows[-1], spec.vocab_size
        self._logits = torch.empty(shape, dtype=torch.float32, device=memory.device)

    def compute(self, step: SchedulerOutput) -> tuple[Tensor, tuple[ScheduledRequest, ...]] | None:
        """Compute a step if it has a graph.

        Returns:
            Logits [B, V] fp32, valid until the next step, and the request of each row; None if the step has no graph.
        """
        scheduled, keys = by_adapter(step)
        adapters = [step.placements[key] for key in keys]
        capacity = self._capacity_for(scheduled, adapters)
        self._num_steps += 1
        if capacity is None or self._num_steps < self._retry_at.get(capacity, 0):
            return None
        bucket = self._bucket(capacity)
        index = {key: i for i, key in enumerate(keys)}
        padding = capacity.rows - len(scheduled)
        bucket.plans.update(
            token_ids=[s.token_ids[0] for s in scheduled] + [0] * padding,
            kv_lens=[s.start + 1 for s in scheduled] + [1] * padding,
            page_tables=scratch_rows([s.page_table for s in scheduled], capacity.rows, self._scratch_page),
            row_adapters=[BASE if s.adapter_key is None else index[s.adapter_key] for s in scheduled]
            + [BASE] * padding,
            adapters=adapters,
        )
        logits = self._capture(capacity, bucket) if bucket.recorded is None else _replay(bucket.recorded)
        return logits[: len(scheduled)], tuple(scheduled)

    def _capacity_for(
        self, scheduled: Sequence[ScheduledRequest], adapters: Sequence[PlacedAdapter]
    ) -> StaticCapacity | None:
        """Return the smallest bucket that a step fits; None if there is none."""
        rows = next((rows for rows in self._rows if rows >= len(scheduled)), None)
        highest = max((adapter.layout.max_rank for adapter in adapters), default=0)
        rank = next((rank for rank in RANKS if rank >= highest), None)
        is_single = all(s.samples and len(s.token_ids) == 1 for s in scheduled)
        if not is_single or rows is None or rank is None or max(len(s.page_table) for s in scheduled) > self._max_pages:
            return None
        lens = np.array([s.start + 1 for s in scheduled], dtype=np.int32)
        # Without parts of keys, an item for each row, one that pads included.
        items = int((-(-lens // split_of(lens, self._split_tokens))).sum()) + rows - len(scheduled)
        parts = next((parts for parts in PARTS if rows * parts >= items), None)
        if parts is None or rows * parts > MAX_ITEMS:
            return None
        return StaticCapacity(rows, self._max_pages, parts, rank)

    def _bucket(self, capacity: StaticCapacity) -> _Bucket:
        """Return the tensors of a bucket; they are made if it is new, in place of the one unused for longest."""
        bucket = self._buckets.pop(capacity, None)
        if bucket is None:
            if len(self._buckets) >= MAX_GRAPHS:
                del self._buckets[next(iter(self._buckets))]
            every = torch.arange(capacity.rows, device=self._dims.device)
            bucket = _Bucket(StaticPlans(self._dims, capacity), every)
        self._buckets[capacity] = bucket
        return bucket

    def _capture(self, capacity: StaticCapacity, bucket: _Bucket) -> Tensor:
        """Compute the step that a bucket holds, and capture a graph for those that follow."""
        plans = bucket.plans
        assert plans.attention is not None
        assert plans.lora is not None
        tables = StepTables(plans.attention, plans.lora, bucket.sample_rows)
        batch = ForwardBatch(plans.inputs[0], plans.inputs[1], tables, ())
        # Compiles kernels, which a capture cannot; its result is this step's.
        logits = self._forward(batch)
        target = self._logits[: capacity.rows]
        try:
            bucket.recorded = self._record(lambda: target.copy_(self._forward(batch)))
        except RuntimeError as error:
            logger.warning("steps of %d rows have no CUDA graph for %d steps: %s", capacity.rows, RETRY_STEPS, error)
            del self._buckets[capacity]
            self._retry_at[capacity] = self._num_steps + RETRY_STEPS
        return logits


def _replay(recorded: Recorded) -> Tensor:
    recorded.replay()
    return recorded.output
