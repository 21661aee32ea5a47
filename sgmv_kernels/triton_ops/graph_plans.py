"""Plans of steps whose device memory keeps its addresses, for CUDA graphs that are captured once.

The capacity is fixed: rows, sequences, items of attention, ranks. `update` writes a step's numbers into the same
buffers, or raises; a graph that was captured with these plans then computes that step. The padding rows after the
step's own belong to no sequence and no adapter: their keys and values are written to the scratch page, they have no
attention, and their results are undefined. Needs the Triton kernels.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from sgmv_kernels.errors import CapacityExceeded
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.metadata.h2d import Ints
from sgmv_kernels.metadata.plans import AttentionPlan, RowPlaces, SgmvPlan
from sgmv_kernels.metadata.segments import BASE, Int32, build_segments
from sgmv_kernels.metadata.sgmv_tables import build_tables
from sgmv_kernels.triton_ops.attention_metadata import (
    AttentionBuffer,
    AttentionCapacity,
    AttentionTables,
    Shape,
    Work,
)
from sgmv_kernels.triton_ops.sgmv_metadata import Capacity, TritonTables

INT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PlanDims:
    """Hold the properties that all steps of a model share."""

    sites: tuple[SiteDims, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    # Sizes by which attention is cut.
    shape: Shape
    page_size: int
    # Pages of the pool; the scratch page is the next one after them.
    num_pages: int
    adapter_dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """Return the query heads that share a key head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class StaticCapacity:
    """Hold the size of the largest step of a plan."""

    rows: int
    # Sequences, and rows with logits.
    sequences: int
    # Pages of a sequence.
    max_pages: int
    # Items of attention: parts of keys of small tiles, and long tiles.
    small_items: int
    long_items: int
    # Whether keys are cut into parts, whose results a second kernel adds up.
    is_cut: bool
    # Highest rank of a slice, 0 if no row has an adapter.
    rank: int


class StaticPlans:
    """Hold static inputs, and the plans that use them.

    `token_ids` and `positions` are int64 [rows], `logit_rows` is int64 [sequences]; all are 0 after the step's own.
    """

    def __init__(self, dims: PlanDims, capacity: StaticCapacity) -> None:
        self._dims, self._capacity = dims, capacity
        sizes = [capacity.rows] * 4 + [capacity.sequences]
        self._inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=dims.device)
        self.token_ids, self.positions, self._pages, self._slots, self.logit_rows = torch.split(self._inputs, sizes)
        # How a step's sequences are cut.
        self._cut = dims.shape, dims.group
        self._attention: AttentionTables | None = None
        self._lora = self._lora_tables() if capacity.rank else None
        self.attention: AttentionPlan | None = None
        self.lora: SgmvPlan | None = None
        # The arguments that `lora` was made from: the adapter of each row, the adapters, and their weights.
        self._made_of: tuple[Int32, tuple[PlacedAdapter, ...], tuple[float, ...]] = np.zeros(0, np.int32), (), ()

    def update(
        self,
        token_ids: Ints,
        positions: Ints,
        page_tables: Int32,
        places: RowPlaces,
        work: Work,
        row_adapters: Int32,
        adapters: Sequence[PlacedAdapter],
        weights: Sequence[float],
        logit_rows: Ints,
    ) -> None:
        """Write a step of T rows of B sequences.

        Args:
            token_ids, positions: [T].
            page_tables: [B, max pages], as in `Ops.plan_attention`.
            places: places of the rows, according to these tables.
            work: the sequences, cut by the dimensions' `shape` and `group`.
            row_adapters: [T], index into `adapters`, or `BASE`.
            adapters: the placed adapters of the step.
            weights: factor of each adapter's delta.
            logit_rows: [S], rows whose logits are wanted.
        Raises:
            CapacityExceeded: the step does not fit.
        """
        dims, rows, count, sampled = self._dims, self._capacity.rows, len(token_ids), len(logit_rows)
        if count > rows or sampled > self._capacity.sequences:
            raise CapacityExceeded(f"a step has {count} rows and logits of {sampled}: {self._capacity}")
        pages = dims.page_size, dims.num_pages + 1, self._pages, self._slots
        plan = AttentionPlan(page_tables, places.query_starts, places.kv_lens, *pages, self._attention)
        if self._attention is None:
            self._attention = self._attention_tables(plan)
            plan = replace(plan, prepared=self._attention)
        else:
            self._attention.update(plan, {self._cut: work})
        self._update_lora(row_adapters, tuple(adapters), tuple(weights))
        host = torch.zeros(len(self._inputs), dtype=torch.int64, pin_memory=dims.device.type == "cuda")
        numbers = host.numpy()
        of_rows = numbers[: 4 * rows].reshape(4, rows)
        of_rows[0, :count], of_rows[1, :count] = token_ids, positions
        of_rows[2, :count], of_rows[3, :count] = places.pages, places.slots
        of_rows[2, count:] = dims.num_pages
        numbers[4 * rows : 4 * rows + sampled] = logit_rows
        self._inputs.copy_(host, non_blocking=True)
        self.attention = plan

    def _update_lora(
        self, row_adapters: Int32, adapters: tuple[PlacedAdapter, ...], weights: tuple[float, ...]
    ) -> None:
        """Write the adapters of a step, unless they are already written. Placed adapters never change; moved ones are
        new objects.
        """
        known, placed, known_weights = self._made_of
        is_same = self.lora is not None and np.array_equal(row_adapters, known) and weights == known_weights
        if is_same and all(map(operator.is_, adapters, placed)):
            return
        rows = self._capacity.rows
        padded = np.full(rows, BASE, dtype=np.int32)
        padded[: len(row_adapters)] = row_adapters
        tables = build_tables(build_segments(padded), adapters, weights)
        if self._lora is not None:
            self._lora.update(tables)
        elif tables.num_segments:
            raise CapacityExceeded("a step has adapters, the capacity has none")
        self.lora = SgmvPlan(tables, self._dims.adapter_dtype, rows, self._lora)
        self._made_of = row_adapters, adapters, weights

    @property
    def nbytes(self) -> int:
        """Return the bytes that the inputs have on the device."""
        attention = AttentionBuffer(self._attention_capacity(), self._dims.device)
        lora = 0 if self._lora is None else self._lora.length
        return self._inputs.nbytes + INT_BYTES * (attention.length + lora)

    def _attention_capacity(self) -> AttentionCapacity:
        capacity = self._capacity
        small = capacity.small_items
        # A tile whose keys are cut has at least two parts.
        cut = (small // 2, small) if capacity.is_cut else (0, 0)
        return AttentionCapacity(capacity.sequences, capacity.max_pages, small, capacity.long_items, *cut)

    def _attention_tables(self, plan: AttentionPlan) -> AttentionTables:
        made = AttentionTables(plan, self._dims.device, self._attention_capacity())
        made.buffer(*self._cut)
        return made

    def _lora_tables(self) -> TritonTables:
        dims, capacity = self._dims, self._capacity
        panels = capacity.sequences * _num_panels(dims, capacity.rank)
        held = Capacity(capacity.rows, capacity.sequences, panels, capacity.rank)
        return TritonTables.for_capacity(dims.sites, dims.layers, held, dims.device)


@cache
def _num_panels(dims: PlanDims, rank: int) -> int:
    """Return the panels of an adapter whose slices all have this rank."""
    ranks = tuple(tuple(rank for _ in site.out_features) for site in dims.sites)
    layout = AdapterLayout(dims.sites, (ranks,) * dims.layers, dims.adapter_dtype.itemsize)
    return sum(len(sizes) for sizes in layout.panel_bytes)
