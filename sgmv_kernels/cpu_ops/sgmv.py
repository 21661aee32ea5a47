"""SGMV on the CPU: panels (bf16, fp16, fp32, int8) are read in place from the pool and summed in fp32, without a copy.

A task is a block of rows of one segment with all its slices, or with one. It does shrink and expand together, so that a
site needs one parallel region and no barrier. The largest tasks come first; a free thread takes the next one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgmv_kernels.cpu_ops.affine import vectors_part
from sgmv_kernels.cpu_runtime.launch import Part, Words, launch, recording_now
from sgmv_kernels.cpu_runtime.team import team_size
from sgmv_kernels.formats.adapter_panels import MAX_SLICES
from sgmv_kernels.metadata.plans import SgmvPlan
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.metadata.sgmv_tables import SgmvTables

MODULE = "sgmv"
Int64 = npt.NDArray[np.int64]
BLOCK_ROWS = 32
"""Most rows of a task: its outputs stay in the L2 cache while its panels are read."""
SHRINK, EXPAND = 1, 2
TASK_INTS = 7
PHASES, NUM_TASKS, TASKS, PERMUTATION, RECORDS, PANELS, SLAB = range(2, 9)
X, X_WIDTH, DEINTERLEAVED, Y, Y_WIDTH, V, V_WIDTH, SCRATCH, SCRATCH_BYTES, PLACE, PLACE_BYTES, WIDTHS = range(9, 21)
"""Indices in the kernel's arguments, after the counters. PLACE is the number of (layer, site) pairs before this one."""
NUM_ARGS = WIDTHS + MAX_SLICES
ENTRIES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class CpuTables:
    """Hold a step in the kernel's form."""

    # [site].
    parts: list[Part]
    # [layer][site], the highest number of rank rows of a segment.
    ranks: list[list[int]]
    # [T, highest rank of all] fp32 scratch.
    v: Tensor
    # Arrays that the parts point to.
    kept: tuple[object, ...]
    # Rows of adapters with vectors; None if there are none.
    vectors: Part | None = None


def prepare(tables: SgmvTables, dtype: torch.dtype, device: torch.device) -> CpuTables:
    """Cut segments into tasks, and lay out the kernel's arguments."""
    del dtype, device
    threads, num_sites = team_size(), len(tables.sites)
    ranks_of = tables.records[..., 1:].sum(axis=-1)
    blocks = _blocks(tables.bounds, ranks_of.sum(axis=(0, 1)), threads)
    tasks = {n: _tasks(blocks, tables, n, threads) for n in {len(site.out_features) for site in tables.sites}}
    ranks = ranks_of.max(axis=-1, initial=0)
    permutation, records, panels = map(np.ascontiguousarray, (tables.permutation, tables.records, tables.panels))
    v = torch.empty((len(permutation), int(ranks.max(initial=0))), dtype=torch.float32)
    deinterleaved = torch.empty((len(permutation), max((site.in_features for site in tables.sites), default=0)))
    widest = max((width for site in tables.sites for width in site.out_features), default=0)
    scratch = torch.empty(threads * widest)
    same = {
        PHASES: SHRINK | EXPAND,
        PERMUTATION: permutation.ctypes.data,
        RECORDS: records.ctypes.data,
        PLACE_BYTES: records.nbytes // max(1, len(records) * num_sites),
        PANELS: panels.ctypes.data,
        DEINTERLEAVED: deinterleaved.data_ptr(),
        V: v.data_ptr(),
        V_WIDTH: v.shape[1],
        SCRATCH: scratch.data_ptr(),
        SCRATCH_BYTES: 4 * widest,
    }
    parts = []
    for i, site in enumerate(tables.sites):
        own = tasks[len(site.out_features)]
        shape = {X_WIDTH: site.in_features, Y_WIDTH: site.total_out}
        widths = {WIDTHS + s: width for s, width in enumerate(site.out_features)}
        words = same | shape | widths | {NUM_TASKS: len(own), TASKS: own.ctypes.data}
        parts.append(Part(part_name(i, tables.turn), words, len(own), threads))
    kept = (deinterleaved, scratch, tasks, permutation, records, panels)
    if not tables.has_vectors:
        return CpuTables(parts, ranks.tolist(), v, kept)
    vectors, arrays = vectors_part(tables)
    return CpuTables(parts, ranks.tolist(), v, (*kept, *arrays), vectors)


def part_name(site: int, turn: int) -> str:
    """Return the name of the part that assigns rows of a site to adapters in one of the passes."""
    return f"sgmv {site}.{turn}"


def _blocks(bounds: Int32, ranks: Int64, threads: int) -> Int32:
    """Return blocks of rows [N, 3]: segment, first and last place; largest blocks first."""
    lengths = np.diff(bounds).ravel()
    rows = min(BLOCK_ROWS, max(1, -(-int(lengths.sum()) // threads)))
    pieces = -(-lengths // rows)
    size = -(-lengths // np.maximum(1, pieces))
    order = np.argsort(-ranks * size, kind="stable")
    segment = np.repeat(order, pieces[order])
    ends = np.cumsum(pieces[order])
    within = np.arange(len(segment)) - np.repeat(ends - pieces[order], pieces[order])
    begin = bounds[segment, 0] + within * size[segment]
    end = np.minimum(begin + size[segment], bounds[segment, 1])
    return np.stack((segment, begin, end), axis=-1).astype(np.int32)


def _tasks(blocks: Int32, tables: SgmvTables, slices: int, threads: int) -> Int32:
    """Return tasks [N', 7]: a block with its first and last slice (all slices together or, with few blocks, each slice
    separately); then whether the weights are int8 codes, and the bits of the segment's factor.
    """
    apart = slices if len(blocks) < 2 * threads else 1
    tasks = np.empty((len(blocks), apart, TASK_INTS), dtype=np.int32)
    tasks[:, :, :3] = blocks[:, None]
    tasks[:, :, 3] = np.arange(apart)
    tasks[:, :, 4] = tasks[:, :, 3] + 1 if apart > 1 else slices
    tasks[:, :, 5] = tables.are_codes[blocks[:, :1]]
    tasks[:, :, 6] = tables.weight_bits[blocks[:, :1]]
    return tasks.reshape(-1, TASK_INTS)


def shrink_cpu(x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> Tensor:
    """See `ops.Ops.shrink`; makes one plane."""
    v = torch.empty((1, len(x), plan.tables.max_rank(layer, site) if plan.tables.num_segments else 0))
    _launch({PHASES: SHRINK, V: v.data_ptr(), V_WIDTH: v.shape[-1]}, x, x, slab, plan, layer, site)
    return v


def expand_cpu_(y: Tensor, v: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """See `ops.Ops.expand_`."""
    whole = v.sum(0)
    own = {PHASES: EXPAND, V: whole.data_ptr(), V_WIDTH: whole.shape[-1], Y_WIDTH: y.stride(0)}
    _launch(own, y, y, slab, plan, layer, site)


def sgmv_cpu_(y: Tensor, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """See `ops.Ops.sgmv_`."""
    _launch({}, y, x, slab, plan, layer, site)


def _launch(instead: Words, y: Tensor, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """Launch with some of the step's words replaced; sites without rank are skipped unless the launch is recorded."""
    tables: CpuTables = plan.prepared
    if not recording_now() and not (tables.parts and tables.ranks[layer][site]):
        return
    part = tables.parts[site]
    if instead:
        part = Part(part.name, {**part.words, **instead}, part.tasks, part.threads)
    place = layer * len(tables.parts) + site
    own = {SLAB: slab.data_ptr(), X: x.data_ptr(), Y: y.data_ptr(), PLACE: place}
    launch(MODULE, ENTRIES[plan.dtype], part, own)
