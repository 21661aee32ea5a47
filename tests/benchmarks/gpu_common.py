"""What the GPU benches share: a guard, timing in graphs, a pool of random adapters of Llama-3-8B's shape."""

import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from sgmv_kernels.backend import SgmvPlan
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.ops import Ops

SITES = {
    "qkv": SiteDims(4096, (4096, 1024, 1024)),
    "o": SiteDims(4096, (4096,)),
    "gate_up": SiteDims(4096, (14336, 14336)),
    "down": SiteDims(14336, (4096,)),
}
"""Llama-3-8B."""
PAGE_BYTES = 65536
L2_BYTES = 128 << 20
"""More than the L2 of an H200 (50 MB): repeats must walk over this much, or they measure L2."""
NO_GPU = 2


def need_gpu() -> torch.device:
    """The device; ends the program with one line where there is none."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured", file=sys.stderr)
        raise SystemExit(NO_GPU)
    return torch.device("cuda")


def graph_us(calls: Sequence[Callable[[], Any]], repeats: int = 5) -> float:
    """Median time of one call, µs: all calls in one graph, replayed, so that no host time is measured."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times[1:])


def eager_us(calls: Sequence[Callable[[], Any]], repeats: int = 3) -> float:
    """Median time of one call with its host time, µs."""
    for call in calls[:2]:
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (graph_us([lambda: target.copy_(source)] * 4) * 1e-6)


@dataclass(frozen=True)
class SiteCase:
    """One site with D adapters of rank r, in as many layers as L2 cannot hold, and B rows."""

    name: str
    dims: SiteDims
    slabs: torch.Tensor
    placed: list[PlacedAdapter]
    owners: list[int]
    rank: int

    @property
    def layers(self) -> int:
        return len(self.slabs)

    @property
    def site_bytes(self) -> int:
        """What one call must move: panels once, x once, y read and written."""
        rank_bytes = self.rank * (self.dims.in_features * len(self.dims.out_features) + self.dims.total_out)
        rows = len(self.owners) * (self.dims.in_features + 2 * self.dims.total_out)
        return 2 * (rank_bytes * len(self.placed) + rows)

    def plan(self, ops: Ops) -> SgmvPlan:
        return ops.plan_sgmv(build_segments(self.owners), self.placed, torch.bfloat16)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(len(self.owners), self.dims.in_features, device=self.slabs.device, dtype=torch.bfloat16)
        return x, torch.zeros(len(self.owners), self.dims.total_out, device=x.device, dtype=torch.bfloat16)

    def us(self, ops: Ops, timer: Callable[..., float] = graph_us) -> float:
        """Time of one `sgmv_`, a layer after another."""
        plan, (x, y) = self.plan(ops), self.tensors()

        def call(layer: int) -> Callable[[], None]:
            return lambda: ops.sgmv_(y, x, self.slabs[layer], plan, layer, 0)

        return timer([call(layer) for layer in range(self.layers)])


def site_case(name: str, rows: int, adapters: int, rank: int, device: torch.device, permuted: bool = False) -> SiteCase:
    """Random bf16 weights; panels of an adapter in one run, or each in a run of its own, in random order."""
    dims = SITES[name]
    ranks = ((rank,) * len(dims.out_features),)
    one = AdapterLayout((dims,), (ranks,), 2)
    layers = max(2, min(128, -(-L2_BYTES // (one.layer_bytes * adapters))))
    layout = AdapterLayout((dims,), (ranks,) * layers, 2)
    pages = layout.num_pages(PAGE_BYTES)
    if permuted:
        sizes = [-(-int(size) // PAGE_BYTES) for size in layout.panel_bytes[0]] * adapters
        order = random.Random(1).sample(range(len(sizes)), len(sizes))
        starts = dict(zip(order, itertools.accumulate((sizes[i] for i in order), initial=0), strict=False))
        runs = [(starts[i], size) for i, size in enumerate(sizes)]
        per = len(sizes) // adapters
        placed, pages_held = [_place(layout, runs[i * per : (i + 1) * per]) for i in range(adapters)], sum(sizes)
    else:
        pages_held = pages * adapters
        placed = [_place(layout, [(i * pages, pages)]) for i in range(adapters)]
    numbers = pages_held * PAGE_BYTES // 2
    slabs = torch.empty((layers, numbers), dtype=torch.bfloat16, device=device)
    for slab in slabs:
        slab.normal_(std=0.02)
    owners = [i % adapters for i in range(rows)]
    return SiteCase(name, dims, slabs.view(torch.uint8), placed, owners, rank)


def _place(layout: AdapterLayout, runs: list[tuple[int, int]]) -> PlacedAdapter:
    placed = layout.place(runs, PAGE_BYTES)
    assert placed is not None
    return placed


@contextmanager
def with_config(**changes: Any) -> Iterator[None]:
    """Inside, sites use their configuration with these fields changed."""
    from sgmv_kernels.triton_ops import sgmv_metadata as sgmv_triton_tables

    original = sgmv_triton_tables.sgmv_config
    with mock.patch.object(sgmv_triton_tables, "sgmv_config", lambda *key: replace(original(*key), **changes)):
        yield


def markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table."""
    lines = [f"\n## {title}\n", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])
