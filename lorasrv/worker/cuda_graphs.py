"""CUDA graphs: steps as one replay instead of a thousand launches.

A graph is captured when its bucket is first needed, after that step has been computed without one. The bucket of a step
of single tokens is given by its rows, its parts of keys and its rank. For steps with prompts or chains of drafts, the
rows of all tokens (`MIXED_ROWS`) are added. Rank 0 is a graph without adapters, so steps on the base do not pay for
them. Padding rows of a bucket belong to no request and write to the scratch page (`DevicePool.scratch_page`). A step
that fits no bucket is computed without a graph: for a large step the device takes longer than the host, which launches
ahead.

A replay reads the addresses of the capture, so everything that a captured pass reads must outlive its graph: weights,
pool and rotary tables, the output that all graphs share, and the static tensors of its bucket.

Source: graphs by bucket of rows, vLLM; separate graphs without adapters, SGLang.
"""

import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lorasrv.models.lora_sites import site_dims
from lorasrv.models.spec import ModelSpec
from lorasrv.scheduler_output import ScheduledRequest, SchedulerOutput
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device import is_out_of_memory
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import ForwardBatch
from lorasrv.worker.launched_step import LaunchedStep
from lorasrv.worker.step_rows import StepRows
from sgmv_kernels.forward_pass import StepTables
from sgmv_kernels.metadata.plans import RowPlaces
from sgmv_kernels.triton_ops.attention import config_for, shape_for
from sgmv_kernels.triton_ops.attention_metadata import Work, cut
from sgmv_kernels.triton_ops.graph_plans import PlanDims, StaticCapacity, StaticPlans

SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
BUCKET_STEP = 32
MIXED_ROWS = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Rows of steps with prompts or drafts."""
MIXED_SEQUENCES = (16, 64, 256)
"""Sequences of such steps, or rows with logits if there are more of these; `max_num_seqs` is added to the list."""
LONG_PROMPTS = 8
"""Most prompts of such a step that end with a partial tile."""
PARTS = (1, 4, 16, 64)
"""Average number of attention work items per sequence; 1 if no keys are split."""
MAX_ITEMS = 8192
"""Most parts of keys in a graph. Each has a partial result of some 64 KiB, in memory that all graphs share."""
RANKS = (0, 16, 32, 64, 128, 256)
MAX_GRAPHS = 96
MAX_CONTEXT = 16384
"""Longest context with graphs, because every step copies page tables at their full capacity."""
RETRY_STEPS = 4096
"""Steps until a bucket whose capture failed is captured again: the shortage of memory may be temporary."""
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
        # A capture that fails leaves its own stream current; the outer block restores the previous one.
        with torch.cuda.stream(torch.cuda.current_stream()), capture:
            self.output = compute()

    def replay(self) -> None:
        self._graph.replay()


def cuda_recorder() -> Callable[[Callable[[], Tensor]], Recorded]:
    """Return a function that captures computations with one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda compute: CudaGraph(compute, pool)


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows, or sequences, of single-token steps that have graphs; the last fits the largest
    step."""
    large = range(SMALL_BUCKETS[-1] + BUCKET_STEP, max_num_seqs + BUCKET_STEP, BUCKET_STEP)
    every = (*SMALL_BUCKETS, *large)
    return every[: next(i for i, rows in enumerate(every) if rows >= max_num_seqs) + 1]


@dataclass(slots=True)
class _Bucket:
    """Hold the static tensors that a captured pass reads; they live as long as its graph."""

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
        self._rows = buckets(limits.max_samples)
        self._mixed_rows = MIXED_ROWS[: bisect_left(MIXED_ROWS, limits.max_rows) + 1]
        self._sequences = (*(most for most in MIXED_SEQUENCES if most < self._rows[-1]), self._rows[-1])
        self._max_pages = -(-min(limits.max_model_len, MAX_CONTEXT) // memory.page_size)
        self.dims = PlanDims(
            sites=site_dims(spec),
            layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            shape=shape_for(
                config_for(limits.activation.itemsize, memory.kv_pages(0)), spec.num_heads // spec.num_kv_heads
            ),
            page_size=memory.page_size,
            num_pages=memory.num_pages,
            adapter_dtype=limits.adapter_dtype,
            device=memory.device,
        )
        self._shape = self.dims.shape
        self._buckets: dict[StaticCapacity, _Bucket] = {}
        self._num_steps = 0
        # For each bucket whose capture failed, the step from which it is tried again.
        self._retry_at: dict[StaticCapacity, int] = {}
        # One for all graphs: at 64 rows the logits of a large vocabulary are 33 MB, and there may be many graphs.
        shape = self._rows[-1], spec.vocab_size
        self._logits = torch.empty(shape, dtype=torch.float32, device=memory.device)

    def compute(
        self, step: SchedulerOutput, last: LaunchedStep | None = None
    ) -> tuple[Tensor, tuple[ScheduledRequest, ...]] | None:
        """Compute a step if it has a graph.

        Args:
            last: the previous step, which samples the pending tokens.
        Returns:
            Logits [B, V] fp32, valid until the next step, and the request of each row; None if the step has no graph.
        """
        rows = StepRows.of(step)
        places = RowPlaces.of(rows.page_tables, rows.query_lens, rows.kv_lens, self.dims.page_size)
        work = cut(places.query_starts, places.kv_lens, self._shape, self.dims.group)
        capacity = self._capacity_for(rows, work)
        self._num_steps += 1
        if capacity is None or self._num_steps < self._retry_at.get(capacity, 0):
            return None
        bucket = self._bucket(capacity)
        bucket.plans.update(
            rows.token_ids,
            rows.positions,
            rows.page_tables,
            places,
            work,
            rows.row_adapters,
            rows.adapters,
            rows.weights,
            rows.logit_rows,
        )
        if last is not None:
            last.fill(bucket.plans.token_ids, rows.pending)
        logits = self._capture(capacity, bucket) if bucket.recorded is None else _replay(bucket.recorded)
        if logits is None:
            return None
        return logits[: len(rows.logit_rows)], tuple(s for s in rows.requests if s.samples)

    def _capacity_for(self, rows: StepRows, work: Work) -> StaticCapacity | None:
        """Return the smallest bucket that fits a step; None if there is none."""
        if rows.parents or any(s.prompt_rows or s.num_observed for s in rows.requests):
            return None
        if len(rows.row_terms) > 1 or any(a.layout.vectors or a.layout.ends or a.layout.rows for a in rows.adapters):
            return None
        is_mixed = len(rows.token_ids) > len(rows.query_lens)
        if is_mixed:
            num_rows = _first(self._mixed_rows, len(rows.token_ids))
            sequences = _first(self._sequences, max(len(rows.query_lens), len(rows.logit_rows)))
        else:
            num_rows = sequences = _first(self._rows, len(rows.query_lens))
        rank = _first(RANKS, max((adapter.layout.max_rank for adapter in rows.adapters), default=0))
        if num_rows is None or sequences is None or rank is None or rows.page_tables.shape[1] > self._max_pages:
            return None
        small, long, reduces = len(work.decode), len(work.prefill), len(work.reduce)
        parts = next((p for p in PARTS if sequences * p >= small and (p > 1 or not reduces)), None)
        if parts is None or sequences * parts > MAX_ITEMS:
            return None
        capacity = self._capacity(num_rows, sequences, parts, rank, is_mixed=is_mixed)
        return capacity if long <= capacity.long_items else None

    def _capacity(self, rows: int, sequences: int, parts: int, rank: int, *, is_mixed: bool) -> StaticCapacity:
        long = rows // self._shape.prefill_rows + LONG_PROMPTS if is_mixed else 0
        return StaticCapacity(rows, sequences, self._max_pages, sequences * parts, long, parts > 1, rank)

    def capacities(self, max_rank: int, most_tokens: int) -> Iterator[StaticCapacity]:
        """Yield every bucket that a step may get whose adapters have at most this rank, and whose sequences have at
        most so many keys together."""
        ranks = RANKS[: bisect_left(RANKS, max_rank) + 1]
        single = [(rows, rows, False) for rows in self._rows]
        mixed = [(rows, sequences, True) for rows in self._mixed_rows for sequences in self._sequences]
        for (rows, sequences, is_mixed), rank in itertools.product(single + mixed, ranks):
            most_items = sequences + most_tokens // self._shape.split_tokens
            for fewer, parts in itertools.pairwise((0, *PARTS)):
                if sequences * fewer < most_items and sequences * parts <= MAX_ITEMS:
                    yield self._capacity(rows, sequences, parts, rank, is_mixed=is_mixed)

    @property
    def output_bytes(self) -> int:
        """Return the bytes of the output that all graphs share."""
        return self._logits.nbytes

    def _bucket(self, capacity: StaticCapacity) -> _Bucket:
        """Return the tensors of a bucket. Those of a new bucket replace the least recently used if there are too
        many."""
        bucket = self._buckets.pop(capacity, None)
        if bucket is None:
            if len(self._buckets) >= MAX_GRAPHS:
                del self._buckets[next(iter(self._buckets))]
            bucket = _Bucket(StaticPlans(self.dims, capacity))
        self._buckets[capacity] = bucket
        return bucket

    def _capture(self, capacity: StaticCapacity, bucket: _Bucket) -> Tensor | None:
        """Compute the step that a bucket holds, and capture a graph for later steps; None if there is no memory for the
        bucket's capacity, of which the step alone may need less."""
        plans = bucket.plans
        assert plans.attention is not None
        assert plans.lora is not None
        tables = StepTables(plans.attention, plans.lora, plans.logit_rows)
        batch = ForwardBatch(plans.token_ids, plans.positions, tables, ())
        target, logits = self._logits[: capacity.sequences], None
        try:
            # This pass compiles kernels, which a capture cannot do; its result is this step's.
            logits = self._forward(batch)
            bucket.recorded = self._record(lambda: target.copy_(self._forward(batch)))
        except RuntimeError as error:
            if logits is None and not is_out_of_memory(error):
                raise
            logger.warning("steps of %d rows have no CUDA graph for %d steps: %s", capacity.rows, RETRY_STEPS, error)
            del self._buckets[capacity]
            self._retry_at[capacity] = self._num_steps + RETRY_STEPS
        return logits


def _first(sizes: Sequence[int], least: int) -> int | None:
    """Return the first of ascending sizes that is large enough."""
    return next((size for size in sizes if size >= least), None)


def _replay(recorded: Recorded) -> Tensor:
    recorded.replay()
    return recorded.output
