"""Provide the cases that the GPU scripts time: sites and linears of Llama-3-8B's shape with random weights.

Needs torch, triton and numpy, and nothing else of this project's dependencies. With GPU_DRY_RUN set, as `gpu_run.py
--dry-run` does, everything runs in Triton's interpreter with tiny shapes, and the times mean nothing.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS
from sgmv_kernels.metadata.plans import SgmvPlan
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops import sgmv_metadata
from sgmv_kernels.triton_ops.block_sizes import LinearConfig, sgmv_config
from sgmv_kernels.triton_ops.linear import TritonLinear, through_tiles

DRY_RUN = bool(os.environ.get("GPU_DRY_RUN"))
_HIDDEN, _KV, _INNER = (128, 64, 256) if DRY_RUN else (4096, 1024, 14336)
SITES = {
    "qkv": SiteDims(_HIDDEN, (_HIDDEN, _KV, _KV)),
    "o": SiteDims(_HIDDEN, (_HIDDEN,)),
    "gate_up": SiteDims(_HIDDEN, (_INNER, _INNER)),
    "down": SiteDims(_INNER, (_HIDDEN,)),
}
HEAD = {"head": SiteDims(_HIDDEN, (256 if DRY_RUN else 128256,))}
"""Has no adapters, and is int8 unless told otherwise."""
FORMATS = {"int8": INT8_LEVELS, "int4": INT4_LEVELS} | ({} if DRY_RUN else {"q3h": Q3H_LEVELS})
GROUP = 32
"""What a server takes unless told otherwise."""
PAGE_BYTES = 65536
# More than the L2 of an H200 (50 MB): repeats must walk over this much, or they measure L2.
L2_BYTES = 1 if DRY_RUN else 128 << 20
MAX_COPIES = 64
NO_GPU = 2
MOST_COMPILERS = 14
"""Processes that compile Triton kernels ahead."""


def need_gpu() -> torch.device:
    """Return the device; without one, end the program with one line. A dry run takes the CPU."""
    if DRY_RUN:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured", file=sys.stderr)
        raise SystemExit(NO_GPU)
    return torch.device("cuda")


def emit(table: str, **cells: Any) -> None:
    """Print a row of a table as a line of JSON, numbers with three digits."""
    rounded = {name: float(f"{cell:.4g}") if isinstance(cell, float) else cell for name, cell in cells.items()}
    print(json.dumps({"table": table, **rounded}), flush=True)


def graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the median time of one call in µs: all calls in one graph, replayed, so that no host time is measured."""
    if DRY_RUN:
        return eager_us(calls)
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return 1e3 * statistics.median(event_ms(graph.replay, 6)[1:]) / len(calls)


def eager_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the median time of one call with its host time, µs."""
    if DRY_RUN:
        return 1e3 * event_ms(calls[0], 1)[0]
    for call in calls[:2]:
        call()
    return 1e3 * statistics.median(event_ms(lambda: [call() for call in calls], 3)) / len(calls)


def event_ms(work: Callable[[], Any], repeats: int) -> list[float]:
    """Return milliseconds between the events before and after each repeat."""
    times = []
    if DRY_RUN:
        started = time.perf_counter()
        work()
        return [1e3 * (time.perf_counter() - started)]
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << (10 if DRY_RUN else 32), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not in a graph, where a copy of an H200 reaches two thirds of this.
    return 2 * source.nbytes / (eager_us([lambda: target.copy_(source)] * 4) * 1e-6)


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
        """Return the bytes of one call: panels once, x once, y read and written."""
        rank_bytes = self.rank * (self.dims.in_features * len(self.dims.out_features) + self.dims.total_out)
        rows = len(self.owners) * (self.dims.in_features + 2 * self.dims.total_out)
        return 2 * (rank_bytes * len(self.placed) + rows)

    def plan(self, ops: Ops) -> SgmvPlan:
        return ops.plan_sgmv(build_segments(self.owners), self.placed, torch.bfloat16)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(len(self.owners), self.dims.in_features, device=self.slabs.device, dtype=torch.bfloat16)
        return x, torch.zeros(len(self.owners), self.dims.total_out, device=x.device, dtype=torch.bfloat16)

    def us(self, ops: Ops, timer: Callable[..., float] | None = None) -> float:
        """Return the time of one `sgmv_`, a layer after another, by default in a graph."""
        plan, (x, y) = self.plan(ops), self.tensors()

        def call(layer: int) -> Callable[[], None]:
            return lambda: ops.sgmv_(y, x, self.slabs[layer], plan, layer, 0)

        return (timer or graph_us)([call(layer) for layer in range(self.layers)])


def site_case(name: str, rows: int, adapters: int, rank: int, device: torch.device) -> SiteCase:
    """Make a site with random bf16 weights, each adapter in one run of pages."""
    dims = SITES[name]
    ranks = ((rank,) * len(dims.out_features),)
    one = AdapterLayout((dims,), (ranks,), 2)
    layers = max(2, min(128, -(-L2_BYTES // (one.slab_bytes * adapters))))
    layout = AdapterLayout((dims,), (ranks,) * layers, 2)
    pages = layout.num_pages(PAGE_BYTES)
    placed = [layout.place([(i * pages, pages)], PAGE_BYTES) for i in range(adapters)]
    slabs = torch.empty((layers, pages * adapters * PAGE_BYTES // 2), dtype=torch.bfloat16, device=device)
    for slab in slabs:
        slab.normal_(std=0.02)
    held = [one for one in placed if one is not None]
    return SiteCase(name, dims, slabs.view(torch.uint8), held, [i % adapters for i in range(rows)], rank)


@contextmanager
def with_config(**changes: Any) -> Iterator[None]:
    """Change fields of the configuration that sites use."""
    with mock.patch.object(sgmv_metadata, "sgmv_config", lambda *key: replace(sgmv_config(*key), **changes)):
        yield


def random_codes(out: int, width: int, levels: int, device: torch.device, group: int = GROUP) -> GroupQuantizedWeight:
    """Return random values, every level as often, of about the size of a model's weights."""
    scales = torch.rand(out, width // group, device=device).mul_(0.02).div_(levels).half()
    if levels == INT8_LEVELS:
        return GroupQuantizedWeight(
            torch.randint(-127, 128, (out, width), dtype=torch.int8, device=device), scales, None, levels
        )
    codes = torch.randint(0, levels, (out, width), dtype=torch.uint8, device=device)
    return GroupQuantizedWeight(codes, scales, (scales * (-levels / 2)).half(), levels)


@dataclass(frozen=True)
class LinearCase:
    """One site in one format, in as many copies as L2 cannot hold."""

    name: str
    levels: int
    codes: list[GroupQuantizedWeight]
    packed: list[TritonLinear]

    def floor_us(self, rows: int, bandwidth: float) -> float:
        """Return the time to move values, scales, x and y once at the bandwidth of a copy."""
        one = self.packed[0]
        return (one.nbytes + 2 * rows * (one.in_features + one.out_features)) / bandwidth * 1e6

    def us(self, rows: int, call: Callable[[torch.Tensor, TritonLinear], torch.Tensor]) -> float:
        x = torch.randn(rows, self.packed[0].in_features, device=self.codes[0].codes.device, dtype=torch.bfloat16)
        return graph_us([partial(call, x, packed) for packed in self.packed])

    def configured_us(self, rows: int, config: LinearConfig) -> float:
        """Return the time with these tiles instead of the table's."""
        return self.us(rows, lambda x, packed: through_tiles(x, packed, config))


def group_of(levels: int, group: int) -> int:
    """Return the group, or the least that the format takes."""
    return max(group, 64) if levels == Q3H_LEVELS else group


def linear_sites(name: str) -> dict[str, SiteDims]:
    """Return the linears that a server has in a format."""
    return SITES | (HEAD if name == "int8" else {})


def linear_case(ops: Ops, name: str, levels: int, group: int = GROUP) -> LinearCase:
    dims = (SITES | HEAD)[name]
    out, width = dims.total_out, dims.in_features
    copies = max(2, min(MAX_COPIES, -(-L2_BYTES // (out * width // 2))))
    codes = [random_codes(out, width, levels, ops.device, group_of(levels, group)) for _ in range(copies)]
    packed = [ops.pack_linear(one) for one in codes]
    return LinearCase(name, levels, codes, [one for one in packed if isinstance(one, TritonLinear)])
