"""A step's SGMV tables on a GPU: one packed int32 buffer, one copy per step.

    chunks       [C, 5]  start in the permutation, number of rows, segment, 1 if its panels are int8 codes, bits of its
                         factor; a segment is cut into chunks of `block_m` rows
    permutation  [T]
    records      [L, sites, S, 4]   see `metadata.sgmv_tables`
    panels       [N]                see `metadata.sgmv_tables`

Chunks are cut on the host, so that a skewed batch launches no programs for missing rows. There are two forms:

- exact: sized for one step, and new in each step.
- capacity: sized once; `update` rewrites the same device memory. Sections, grid, planes and their width depend only on
  the capacity, so a CUDA graph captured with some adapters can be replayed with others, with more, fewer or none:
  chunks that a step does not use have no rows, and their programs end at the first load.

Source: chunked segments, SGLang's csgmv; the tail reset every step, its bug 28371; one packed buffer, its triton_v2.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.errors import CapacityExceeded
from sgmv_kernels.formats.adapter_panels import RECORD_INTS, SiteDims
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.metadata.sgmv_tables import SgmvTables
from sgmv_kernels.triton_ops.affine import VectorTables
from sgmv_kernels.triton_ops.block_sizes import SgmvConfig, device_name, rows_config, sgmv_config
from sgmv_kernels.triton_ops.common import host_ints, section, sections

CHUNK_INTS = 5
RANK_STEP = 16
"""The width of planes is the highest rank rounded up to this, for fewer compiled shapes and aligned rows."""

EXPAND_RANKS = (16, 64, 128)
"""Ranks of a slice that expand is compiled for; higher ranks use the last."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Hold the size of the largest step of one graph."""

    # Token rows.
    max_rows: int
    # Segments with an adapter.
    max_segments: int
    # Panel offsets.
    max_panels: int
    # The highest rank of a slice.
    max_rank: int


class TritonTables:
    """Hold the SGMV tables of one step on the device. Create them with `exact` or `for_capacity`.

    For a graph: `held = for_capacity(...)`; capture `sgmv.sgmv_` with `replace(plan, prepared=held)`; in each step
    `held.update(tables)`, then replay, on one stream. Rows that pad a batch are rows of the base.

    `chunk_grid` is the number of launched chunks. Offsets count ints from the start of `ints`.
    """

    def __init__(
        self, sites: tuple[SiteDims, ...], layers: int, capacity: Capacity, chunks: int, device: torch.device
    ) -> None:
        self.sites, self.device, self.capacity = sites, device, capacity
        self.name = device_name(device)
        self.block_m = rows_config(self.name, capacity.max_rows).block_m
        self.chunk_grid = chunks
        records = layers * len(sites) * capacity.max_segments * RECORD_INTS
        sizes = (chunks * CHUNK_INTS, capacity.max_rows, records, capacity.max_panels)
        starts, self.length = sections(sizes)
        self.chunks_at, self.permutation_at, self.records_at, self.panels_at = starts
        self.layers = layers
        self.ints: Tensor | None = None
        # [layer][site], in exact tables: the highest rank over all slices together, and of one slice.
        self._ranks: list[list[int]] | None = None
        self._slice_ranks: list[list[int]] = []
        # Only in exact tables: steps with vectors have no graph.
        self.vectors: VectorTables | None = None

    @classmethod
    def exact(cls, tables: SgmvTables, device: torch.device) -> "TritonTables":
        """Return tables of one step, no larger than the step."""
        rows, segments = len(tables.permutation), tables.num_segments
        layers = len(tables.records) if segments else 0
        capacity = Capacity(rows, segments, len(tables.panels), 0)
        block_m = rows_config(device_name(device), rows).block_m
        counts = tables.bounds[:, 1] - tables.bounds[:, 0]
        chunks = int((-(-counts // block_m)).sum()) if segments else 0
        made = cls(tables.sites, layers, capacity, chunks, device)
        made._ranks = tables.records[..., 1:].sum(-1).max(-1, initial=0).tolist()
        made.vectors = VectorTables.of(tables, device) if tables.has_vectors else None
        made._slice_ranks = tables.records[..., 1:].max((-2, -1), initial=0).tolist()
        made.update(tables)
        return made

    @classmethod
    def for_capacity(
        cls, sites: tuple[SiteDims, ...], layers: int, capacity: Capacity, device: torch.device
    ) -> "TritonTables":
        """Return empty tables that `update` fills every step, in the same device memory."""
        block_m = rows_config(device_name(device), capacity.max_rows).block_m
        chunks = min(capacity.max_rows, capacity.max_segments + capacity.max_rows // block_m)
        made = cls(sites, layers, capacity, chunks, device)
        made.ints = torch.zeros(made.length, dtype=torch.int32, device=device)
        return made

    def update(self, tables: SgmvTables) -> None:
        """Copy a step's tables to the device, in one asynchronous copy.

        Raises:
            CapacityExceeded: the step does not fit; nothing was changed.
        """
        chunks = chunks_of(tables, self.block_m)
        self._check(tables, chunks)
        ints, count = host_ints(self.length, self.device), tables.num_segments
        numbers = ints.numpy()
        section(numbers, self.chunks_at, *chunks.shape)[:] = chunks
        section(numbers, self.permutation_at, len(tables.permutation))[:] = tables.permutation
        if count:
            shape = (self.layers, len(self.sites), self.capacity.max_segments, RECORD_INTS)
            section(numbers, self.records_at, *shape)[:, :, :count] = tables.records
            section(numbers, self.panels_at, len(tables.panels))[:] = tables.panels
        if self.ints is None:
            self.ints = ints.to(self.device, non_blocking=True)
        else:
            self.ints.copy_(ints, non_blocking=True)

    def record_at(self, layer: int, site: int) -> int:
        """Return the offset of the records of a site's segments."""
        return self.records_at + (layer * len(self.sites) + site) * self.capacity.max_segments * RECORD_INTS

    def rank(self, layer: int, site: int) -> int:
        """Return the width of the planes at a site: the highest rank there, rounded up."""
        if self._ranks is None:
            return _padded(self.capacity.max_rank * len(self.sites[site].out_features), RANK_STEP)
        return _padded(self._ranks[layer][site], RANK_STEP)

    def expand_ranks(self, layer: int, site: int) -> int:
        """Return the entry of `EXPAND_RANKS` for the highest rank of a slice at a site."""
        highest = self.capacity.max_rank if self._ranks is None else self._slice_ranks[layer][site]
        return next((ranks for ranks in EXPAND_RANKS if highest <= ranks), EXPAND_RANKS[-1])

    def config(self, layer: int, site: int) -> SgmvConfig:
        """Return the block sizes at a site."""
        return sgmv_config(self.name, self.capacity.max_rows, self.rank(layer, site), self.sites[site])

    def _check(self, tables: SgmvTables, chunks: Int32) -> None:
        held = {
            "rows": (len(tables.permutation), self.capacity.max_rows),
            "segments": (tables.num_segments, self.capacity.max_segments),
            "panels": (len(tables.panels), self.capacity.max_panels),
            "chunks": (len(chunks), self.chunk_grid),
        }
        if self._ranks is None and tables.num_segments:
            if tables.sites != self.sites or len(tables.records) != self.layers:
                raise CapacityExceeded("adapters are made for other sites or layers than the capacity")
            held["ranks of a slice"] = (tables.highest_rank, self.capacity.max_rank)
        for name, (has, most) in held.items():
            if has > most:
                raise CapacityExceeded(f"a step has {has} {name}, the capacity is {most}")


def chunks_of(tables: SgmvTables, block_m: int) -> Int32:
    """Return chunks [C, 5]: the rows of each segment in pieces of at most `block_m`."""
    bounds = tables.bounds
    counts = bounds[:, 1] - bounds[:, 0]
    pieces = -(-counts // block_m)
    segment = np.repeat(np.arange(len(bounds)), pieces)
    ends = np.cumsum(pieces)
    offset = (np.arange(len(segment)) - np.repeat(ends - pieces, pieces)) * block_m
    rows = np.minimum(counts[segment] - offset, block_m)
    of_segment = tables.are_codes[segment], tables.weight_bits[segment]
    return np.stack((bounds[segment, 0] + offset, rows, segment, *of_segment), axis=-1).astype(np.int32)


def _padded(n: int, step: int) -> int:
    return -(-n // step) * step
