"""Plans of single-token steps whose device memory keeps its addresses, for CUDA graphs that are captured once.

A capacity is fixed: rows, parts of keys, ranks. `update` writes a step's numbers into the same buffers, or refuses; a
graph that was captured over `attention` and `lora` then computes that step. Needs the Triton kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sgmv_kernels.backend import AttentionPlan, SgmvPlan, plan_of
from sgmv_kernels.errors import CapacityExceeded
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.metadata.segments import BASE, Int32, build_segments
from sgmv_kernels.metadata.sgmv_tables import build_tables
from sgmv_kernels.triton_ops.attention import shape_for
from sgmv_kernels.triton_ops.attention_metadata import AttentionCapacity, AttentionTables
from sgmv_kernels.triton_ops.block_sizes import attention_config, device_name
from sgmv_kernels.triton_ops.sgmv_metadata import Capacity, TritonTables, capacity_ranks

"""Errors of `StaticPlans.update` for a step that does not fit; a tuple, for `except`."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PlanDims:
    """Hold the properties that all steps of a model share."""

    sites: tuple[SiteDims, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    # Bytes of the wider of activations and stored keys.
    itemsize: int
    page_size: int
    # Includes pages without an owner.
    num_pages: int
    adapter_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class StaticCapacity:
    """Hold the size of the largest step of a plan."""

    rows: int
    # Pages of a sequence.
    max_pages: int
    # Average number of parts that a row's keys are cut into, 1 for none.
    parts: int
    # Highest rank of a slice, 0 if no row has an adapter.
    rank: int


class StaticPlans:
    """Static inputs, and the plans over them. `inputs` [4, rows] int64: token ids, positions, pages and slots."""

    def __init__(self, dims: PlanDims, capacity: StaticCapacity) -> None:
        self._dims, self._capacity = dims, capacity
        self.inputs = torch.zeros((4, capacity.rows), dtype=torch.int64, device=dims.device)
        self._attention: AttentionTables | None = None
        self._lora = self._lora_tables() if capacity.rank else None
        self.attention: AttentionPlan | None = None
        self.lora: SgmvPlan | None = None

    def update(
        self,
        token_ids: Sequence[int],
        kv_lens: Sequence[int],
        page_tables: Int32,
        row_adapters: Sequence[int],
        adapters: Sequence[PlacedAdapter],
    ) -> None:
        """Write a step of one token a row, with as many rows as the capacity has.

        Args:
            token_ids: of each row.
            kv_lens: keys of each row, its own included: its position is one less.
            page_tables: [rows, pages].
            row_adapters: index into `adapters`, or `BASE`.
            adapters: the placed adapters of the step.
        Raises:
            CapacityExceeded: the step does not fit.
        """
        dims, rows = self._dims, self._capacity.rows
        assert len(token_ids) == len(kv_lens) == len(row_adapters) == rows
        plan = plan_of(page_tables, [1] * rows, kv_lens, dims.page_size, dims.num_pages, CPU)
        self._update_attention(plan)
        tables = build_tables(build_segments(row_adapters), adapters if max(row_adapters) > BASE else ())
        if self._lora is not None:
            self._lora.update(tables)
        elif tables.num_segments:
            raise CapacityExceeded("a step has adapters, the capacity has none")
        host = torch.empty((4, rows), dtype=torch.int64, pin_memory=dims.device.type == "cuda")
        host[0] = torch.tensor(token_ids)
        host[1] = torch.tensor(kv_lens) - 1
        host[2], host[3] = plan.write_pages, plan.write_slots
        self.inputs.copy_(host, non_blocking=True)
        self.attention = replace(plan, write_pages=self.inputs[2], write_slots=self.inputs[3], prepared=self._attention)
        self.lora = SgmvPlan(tables, dims.adapter_dtype, rows, self._lora)

    def _update_attention(self, plan: AttentionPlan) -> None:
        dims, capacity = self._dims, self._capacity
        if self._attention is not None:
            self._attention.update(plan)
            return
        items = capacity.rows * capacity.parts
        cut = (capacity.rows, items) if capacity.parts > 1 else (0, 0)
        most = AttentionCapacity(capacity.rows, capacity.max_pages, items, 0, *cut)
        made = AttentionTables(plan, dims.device, most)
        group = dims.heads // dims.kv_heads
        made.buffer(shape_for(attention_config(device_name(dims.device), dims.head_dim, dims.itemsize), group), group)
        self._attention = made

    def _lora_tables(self) -> TritonTables:
        dims, capacity = self._dims, self._capacity
        ranks = tuple(tuple(capacity.rank for _ in site.out_features) for site in dims.sites)
        layout = AdapterLayout(dims.sites, (ranks,) * dims.layers, dims.adapter_dtype.itemsize)
        panels = capacity.rows * sum(len(sizes) for sizes in layout.panel_bytes)
        held = Capacity(capacity.rows, capacity.rows, panels, capacity_ranks(dims.sites, capacity.rank))
        return TritonTables.for_capacity(dims.sites, dims.layers, held, dims.device)


def scratch_rows(page_tables: list[Sequence[int]], rows: int, scratch_page: int) -> Int32:
    """Return page tables [rows, most pages] int32, followed by rows that read and write a page that nothing owns."""
    made = np.zeros((rows, max(map(len, page_tables))), dtype=np.int32)
    made[len(page_tables) :, 0] = scratch_page
    for row, pages in zip(made, page_tables, strict=False):
        row[: len(pages)] = pages
    return made
