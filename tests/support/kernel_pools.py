"""Pools of random adapters for tests of SGMV, distributions of rows over them, and pages of keys and values."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.plans import AttentionPlan
from sgmv_kernels.metadata.segments import BASE, Segments, build_segments
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import DenseSlice, sgmv_reference

LAWS = ("distinct", "uniform", "zipf:1.5", "identical", "skewed", "base")
"""Distributions, named as in Punica's benchmark; "base": no adapters."""


def rows_by_law(law: str, rows: int, adapters: int) -> np.ndarray:
    """Draw the adapter of each row from a named popularity distribution, -1 for the base."""
    rng = random.Random(1)
    draw: Callable[[int], int] = {
        "base": lambda i: -1,
        "distinct": lambda i: i % adapters,
        "identical": lambda i: 0,
        "uniform": lambda i: rng.randrange(-1, adapters),
        "skewed": lambda i: 0 if rng.random() < 0.8 else rng.randrange(-1, adapters),
        "zipf:1.5": lambda i: rng.choices(range(adapters), weights=[(k + 1) ** -1.5 for k in range(adapters)])[0],
    }[law]
    return np.array([draw(i) for i in range(rows)], dtype=np.int32)


@dataclass(frozen=True)
class _StoredSlice:
    """Hold a slice as in the pool (scale [r] fp32, a [r, in], b [r, out]) and as in PEFT."""

    scale: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    dense: DenseSlice

    @classmethod
    def random(cls, rank: int, width: int, out: int, dtype: torch.dtype) -> "_StoredSlice":
        scaling = float(torch.rand(()) + 0.5)
        if dtype != torch.int8:
            a, b = (torch.randn(rank, n).to(dtype) for n in (width, out))
            return cls(torch.full((rank,), scaling), a, b, DenseSlice(a.float(), b.float().T, scaling))
        a, b = (torch.randint(-127, 128, (rank, n), dtype=dtype) for n in (width, out))
        of_a, of_b = (0.02 * torch.rand(rank, 1) + 0.01 for _ in range(2))
        dense = DenseSlice(a * of_a, (b * of_b).T, scaling)
        return cls((scaling * of_a * of_b)[:, 0], a, b, dense)


Rows = Segments | Sequence[int] | np.ndarray
"""The adapter of each row, or rows that are already grouped."""


def _segments(rows: Rows) -> Segments:
    return rows if isinstance(rows, Segments) else build_segments(rows)


class KernelPool:
    """One slab per layer with adapters written into it; every byte outside panels is 0xFF, NaN in any float type."""

    def __init__(self, sites: tuple[SiteDims, ...], dtype: torch.dtype, layers: int, page_bytes: int, pages: int):
        self.sites, self.dtype, self.layers, self.page_bytes = sites, dtype, layers, page_bytes
        self.slabs = torch.full((layers, pages * page_bytes), 0xFF, dtype=torch.uint8)
        self.placed: list[PlacedAdapter] = []
        self.dense: list[list[list[list[DenseSlice | None]]]] = []

    def add(self, ranks: Sequence[Sequence[int]], runs: Sequence[tuple[int, int]], *, codes: bool = False) -> None:
        """Write an adapter with random weights, the same ranks in every layer, on the given runs of pages; `codes`:
        as int8 codes.
        """
        dtype = torch.int8 if codes else self.dtype
        layout = AdapterLayout(self.sites, (tuple(map(tuple, ranks)),) * self.layers, dtype.itemsize)
        placed = layout.place(runs, self.page_bytes)
        assert placed is not None
        self.placed.append(placed)
        sites = range(len(self.sites))
        self.dense.append([[self._write(layer, site, placed) for site in sites] for layer in range(self.layers)])

    def _write(self, layer: int, site: int, placed: PlacedAdapter) -> list[DenseSlice | None]:
        dims, panels = self.sites[site], placed.layout.panels[layer][site]
        shapes = zip(panels.ranks, dims.out_features, strict=True)
        stored = torch.int8 if placed.layout.are_codes else self.dtype
        slices = [_StoredSlice.random(rank, dims.in_features, out, stored) for rank, out in shapes]
        if present := [s for s in slices if len(s.scale)]:
            scale = torch.cat([s.scale for s in present])
            self._put(layer, placed, [(panels.scale, len(scale))], scale)
            self._put(layer, placed, panels.a, torch.cat([s.a for s in present]))
        for held, own in zip(panels.b, slices, strict=True):
            if len(own.scale):
                self._put(layer, placed, held, own.b)
        return [s.dense if len(s.scale) else None for s in slices]

    def _put(self, layer: int, placed: PlacedAdapter, panels: Sequence[tuple[int, int]], matrix: torch.Tensor) -> None:
        for (panel, _), rows in zip(panels, torch.split(matrix, [count for _, count in panels]), strict=True):
            at = int(placed.offsets[layer][panel])
            dense = rows.clone(memory_format=torch.contiguous_format).view(-1)
            self.slabs[layer, at : at + rows.nbytes] = dense.view(torch.uint8)

    def inputs(self, rows: int, site: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random (x, y), always the same for the same number of rows."""
        torch.manual_seed(rows)
        dims = self.sites[site]
        return torch.randn(rows, dims.in_features).to(dtype), torch.randn(rows, dims.total_out).to(dtype)

    def added(self, ops: Ops, rows: Rows, site: int, x: torch.Tensor, y: torch.Tensor, layer: int = 1) -> torch.Tensor:
        """Return y with the deltas that the kernels add, on the CPU."""
        plan, out = ops.plan_sgmv(_segments(rows), self.placed, self.dtype), y.to(ops.device, copy=True)
        ops.sgmv_(out, x.to(ops.device), self.slabs[layer].to(ops.device), plan, layer, site)
        return out.cpu()

    def expected(self, rows: Rows, site: int, x: torch.Tensor, y: torch.Tensor, layer: int = 1) -> torch.Tensor:
        """Return y with the deltas of the reference."""
        adapters = [per_layer[layer][site] for per_layer in self.dense]
        return sgmv_reference(y, x, _segments(rows), adapters, self.sites[site].out_features)

    def check(
        self, ops: Ops, rows: Rows, site: int, layer: int = 1, dtype: torch.dtype = torch.float32, **close: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare the kernels with the reference, and rows of the base bit for bit; return (result, y)."""
        segments = _segments(rows)
        x, y = self.inputs(segments.num_rows, site, dtype)
        got = self.added(ops, segments, site, x, y, layer)
        want = self.expected(segments, site, x, y, layer)
        # A GPU multiplies unequal dtypes in tf32, with 11 bits of mantissa.
        is_rounded = ops.device.type == "cuda" and dtype != self.dtype
        close.setdefault("atol", 5e-3 * float(want.abs().max()) if is_rounded else 2e-2)
        torch.testing.assert_close(got.float(), want, rtol=close.get("rtol", 1e-4), atol=close["atol"])
        base = [row for s in np.flatnonzero(segments.adapters == BASE).tolist() for row in segments.rows(s).tolist()]
        assert got.dtype == dtype
        assert torch.equal(got[base], y[base])
        return got, y


def pages_on(kv: KvPages, device: torch.device) -> KvPages:
    """Return the pages on a device."""
    return KvPages(kv.slab.to(device), kv.format, kv.num_heads, kv.page_size, kv.head_dim)


def plan_at(ops: Ops, pages: torch.Tensor, slots: torch.Tensor, page: int, num_pages: int) -> AttentionPlan:
    """Plan sequences of one new token each, whose keys go to these pages and slots."""
    tables = pages.numpy().astype(np.int32)[:, None]
    return ops.plan_attention(tables, [1] * len(tables), (slots + 1).tolist(), page, num_pages)
