"""Builders of batches and pools for kernel tests."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.ops import AttentionPlan, Ops
from sgmv_kernels.reference import DenseSlice

BACKENDS = ("torch", "numba")
LAWS = ("distinct", "uniform", "zipf:1.5", "identical", "skewed", "base")


def rows_by_law(law: str, rows: int, adapters: int, rng: random.Random) -> list[int]:
    """The adapter of each row, -1 for the base, by a named popularity law (names after Punica's benchmark)."""
    if law == "base":
        return [-1] * rows
    if law == "distinct":
        return [i % adapters for i in range(rows)]
    if law == "identical":
        return [0] * rows
    if law == "uniform":
        return [rng.randrange(-1, adapters) for _ in range(rows)]
    if law == "skewed":
        return [0 if rng.random() < 0.8 else rng.randrange(-1, adapters) for _ in range(rows)]
    exponent = float(law.split(":")[1])
    return rng.choices(range(adapters), weights=[1 / (k + 1) ** exponent for k in range(adapters)], k=rows)


class KernelPool:
    """One slab a layer with adapters written into it; every byte that no panel owns is 0xFF, a NaN in any float."""

    def __init__(self, sites: tuple[SiteDims, ...], dtype: torch.dtype, layers: int, page_bytes: int, pages: int):
        self.sites, self.dtype, self.layers, self.page_bytes = sites, dtype, layers, page_bytes
        self.slabs = torch.full((layers, pages * page_bytes), 0xFF, dtype=torch.uint8)
        self.placed: list[PlacedAdapter] = []
        self.dense: list[list[list[list[DenseSlice | None]]]] = []

    def add(self, ranks: Sequence[Sequence[int]], runs: Sequence[tuple[int, int]]) -> None:
        """An adapter with random weights, the same ranks in every layer, on the given runs of pages."""
        layer_ranks = tuple(tuple(r) for r in ranks)
        layout = AdapterLayout(self.sites, (layer_ranks,) * self.layers, self.dtype.itemsize)
        placed = layout.place(runs, self.page_bytes)
        assert placed is not None
        self.placed.append(placed)
        self.dense.append([self._write(layer, placed) for layer in range(self.layers)])

    def _write(self, layer: int, placed: PlacedAdapter) -> list[list[DenseSlice | None]]:
        sites = []
        for dims, panels in zip(self.sites, placed.layout.panels[layer], strict=True):
            slices: list[DenseSlice | None] = []
            for rank, out in zip(panels.ranks, dims.out_features, strict=True):
                a = torch.randn(rank, dims.in_features).to(self.dtype).float()
                b = torch.randn(out, rank).to(self.dtype).float()
                slices.append(DenseSlice(a, b, float(torch.rand(()) + 0.5)) if rank else None)
            sites.append(slices)
            present = [s for s in slices if s is not None]
            if not present:
                continue
            scale = torch.cat([torch.full((s.lora_a.shape[0],), s.scaling) for s in present])
            self._put(layer, placed, panels.scale, scale)
            self._put_rows(layer, placed, panels.a, torch.cat([s.lora_a for s in present]).to(self.dtype))
            for slice_panels, dense in zip(panels.b, slices, strict=True):
                if dense is not None:
                    self._put_rows(layer, placed, slice_panels, dense.lora_b.T.to(self.dtype))
        return sites

    def _put_rows(self, layer: int, placed: PlacedAdapter, panels, matrix: torch.Tensor) -> None:
        start = 0
        for index, count in panels:
            self._put(layer, placed, index, matrix[start : start + count])
            start += count

    def _put(self, layer: int, placed: PlacedAdapter, panel: int, values: torch.Tensor) -> None:
        at = int(placed.offsets[layer][panel])
        dense = values.clone(memory_format=torch.contiguous_format).view(-1)
        self.slabs[layer, at : at + values.nbytes] = dense.view(torch.uint8)


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    """The ops through each set of the CPU's kernels, or through the set that a test names."""
    if request.param == "triton":
        return request.getfixturevalue("triton_ops")
    return Ops(torch.device("cpu"), request.param)


@pytest.fixture
def triton_ops(monkeypatch: pytest.MonkeyPatch) -> Ops:
    """Triton's kernels, compiled on a CUDA device, else interpreted; what they read of their intermediate results
    without having written it shows as NaN.
    """
    pytest.importorskip("triton")
    from sgmv_kernels.triton_ops import attention, linear, sgmv

    for module, name in ((attention, "new_partials"), (linear, "new_planes"), (sgmv, "new_planes")):
        monkeypatch.setattr(module, name, lambda shape, **how: torch.full(shape, float("nan"), **how))
    return Ops(torch.device("cuda" if torch.cuda.is_available() else "cpu"), "triton")


def plan_at(ops: Ops, pages: torch.Tensor, slots: torch.Tensor, page: int, num_pages: int) -> AttentionPlan:
    """Sequences of one new token each, whose keys go to these pages and slots."""
    tables = pages.numpy().astype(np.int32)[:, None]
    return ops.plan_attention(tables, [1] * len(tables), (slots + 1).tolist(), page, num_pages)


@pytest.fixture
def plan_for() -> Callable[..., AttentionPlan]:
    return plan_at


@pytest.fixture
def make_pool() -> Callable[..., KernelPool]:
    return KernelPool


@pytest.fixture
def rows_for() -> Callable[..., np.ndarray]:
    """rows_for(law, rows, adapters) -> [rows] adapter indices."""
    return lambda law, rows, adapters: np.array(rows_by_law(law, rows, adapters, random.Random(1)), dtype=np.int32)


@pytest.fixture(params=LAWS)
def law(request: pytest.FixtureRequest) -> str:
    return request.param
