"""SGMV on the CPU: panels (bf16, fp16, fp32, int8) are read in place from the pool and summed in fp32, without a copy.

A task is a block of rows of one segment with all its slices, or with one. It does shrink and expand together, so that a
site needs one parallel region and no barrier. The largest tasks come first; a free thread takes the next one. If the
threads cannot divide a few segments evenly, and each has few rows, they share the weights of each segment instead: a
task is some rank rows of A, or, once all of v is known, some columns of B.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgmv_kernels.cpu_arguments.sgmv import (
    ARE_CODES,
    END,
    EXPAND,
    FACTOR,
    FIRST_SLICE,
    LAST_SLICE,
    NUM_TASKS,
    PANELS,
    PERMUTATION,
    PHASES,
    PLACE,
    PLACE_BYTES,
    RECORDS,
    SCRATCH,
    SCRATCH_BYTES,
    SHARE,
    SHARES,
    SHRINK,
    SLAB,
    TASK_INTS,
    TASK_PHASES,
    TASKS,
    TILE_ROWS,
    V_WIDTH,
    WAITS,
    WIDTHS,
    X_WIDTH,
    Y_WIDTH,
    V,
    X,
    Y,
)
from sgmv_kernels.cpu_ops.affine import vectors_part
from sgmv_kernels.cpu_runtime.launch import Part, Words, launch, recording_now
from sgmv_kernels.cpu_runtime.team import team_size
from sgmv_kernels.metadata.plans import SgmvPlan
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.metadata.sgmv_tables import SgmvTables

MODULE = "sgmv"
Int64 = npt.NDArray[np.int64]
BLOCK_ROWS = 32
"""Most rows of a task: its outputs stay in the L2 cache while its panels are read."""
FEW_ROWS = 8
"""Most rows of a segment whose weights are shared by threads: reading them takes longer than computing."""
ENTRIES = {
    (torch.bfloat16, False): "bf16",
    (torch.bfloat16, True): "bf16_codes",
    (torch.float16, False): "fp16",
    (torch.float16, True): "fp16_codes",
    (torch.float32, False): "fp32",
    (torch.float32, True): "fp32_codes",
}
"""Kernels by the type of the panels, and whether those of some adapters are int8 codes."""


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
    lengths = np.diff(tables.bounds).ravel()
    # Blocks that the threads can divide evenly are best left whole.
    is_shared = len(lengths) < 2 * threads and len(lengths) % threads != 0 and int(lengths.max()) <= FEW_ROWS
    most_rows = FEW_ROWS if is_shared else min(BLOCK_ROWS, max(1, -(-int(lengths.sum()) // threads)))
    blocks = _blocks(tables.bounds, lengths, ranks_of.sum(axis=(0, 1)), most_rows)
    tasks = {
        n: (_shared_tasks if is_shared else _tasks)(blocks, tables, n, threads)
        for n in {len(site.out_features) for site in tables.sites}
    }
    ranks = ranks_of.max(axis=-1, initial=0)
    permutation, records, panels = map(np.ascontiguousarray, (tables.permutation, tables.records, tables.panels))
    v = torch.empty((len(permutation), int(ranks.max(initial=0))), dtype=torch.float32)
    widest = max((max(TILE_ROWS * site.in_features, *site.out_features) for site in tables.sites), default=0)
    scratch = torch.empty(threads * widest)
    same = {
        PHASES: SHRINK | EXPAND,
        PERMUTATION: permutation.ctypes.data,
        RECORDS: records.ctypes.data,
        PLACE_BYTES: records.nbytes // max(1, len(records) * num_sites),
        PANELS: panels.ctypes.data,
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
    kept = (scratch, tasks, permutation, records, panels)
    if not tables.has_vectors:
        return CpuTables(parts, ranks.tolist(), v, kept)
    vectors, arrays = vectors_part(tables)
    return CpuTables(parts, ranks.tolist(), v, (*kept, *arrays), vectors)


def part_name(site: int, turn: int) -> str:
    """Return the name of the part that assigns rows of a site to adapters in one of the passes."""
    return f"sgmv {site}.{turn}"


def _blocks(bounds: Int32, lengths: Int32, ranks: Int64, most_rows: int) -> Int32:
    """Return blocks of rows [N, 3]: segment, first and last place; largest blocks first."""
    pieces = -(-lengths // most_rows)
    size = -(-lengths // np.maximum(1, pieces))
    order = np.argsort(-ranks * size, kind="stable")
    segment = np.repeat(order, pieces[order])
    ends = np.cumsum(pieces[order])
    within = np.arange(len(segment)) - np.repeat(ends - pieces[order], pieces[order])
    begin = bounds[segment, 0] + within * size[segment]
    end = np.minimum(begin + size[segment], bounds[segment, 1])
    return np.stack((segment, begin, end), axis=-1).astype(np.int32)


def _tasks(blocks: Int32, tables: SgmvTables, slices: int, threads: int) -> Int32:
    """Return tasks [N', `TASK_INTS`], one for each block, or with a few blocks that the threads cannot divide evenly,
    one for each slice of each block."""
    apart = slices if len(blocks) < 2 * threads and len(blocks) % threads else 1
    tasks = _copies(blocks, tables, slices, apart)
    if apart > 1:
        tasks[..., FIRST_SLICE] = np.arange(apart)
        tasks[..., LAST_SLICE] = tasks[..., FIRST_SLICE] + 1
    return tasks.reshape(-1, TASK_INTS)


def _shared_tasks(blocks: Int32, tables: SgmvTables, slices: int, threads: int) -> Int32:
    """Return tasks [N', `TASK_INTS`], two for each share of a block: those of all rank rows before those of columns."""
    shares = max(2, -(-threads // len(blocks)))
    of_ranks = _copies(blocks, tables, slices, shares)
    of_ranks[..., SHARE], of_ranks[..., SHARES] = np.arange(shares), shares
    of_columns = of_ranks.copy()
    of_ranks[..., TASK_PHASES], of_columns[..., TASK_PHASES] = SHRINK, EXPAND
    of_columns[..., WAITS] = len(blocks) * shares
    return np.concatenate((of_ranks, of_columns)).reshape(-1, TASK_INTS)


def _copies(blocks: Int32, tables: SgmvTables, slices: int, count: int) -> Int32:
    """Return tasks [N, `count`, `TASK_INTS`], each of which does everything for its block."""
    tasks = np.zeros((len(blocks), count, TASK_INTS), dtype=np.int32)
    tasks[..., : END + 1] = blocks[:, None]
    tasks[..., LAST_SLICE] = slices
    tasks[..., ARE_CODES] = tables.are_codes[blocks[:, :1]]
    tasks[..., FACTOR] = tables.weight_bits[blocks[:, :1]]
    tasks[..., TASK_PHASES], tasks[..., SHARES] = SHRINK | EXPAND, 1
    return tasks


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
    launch(MODULE, ENTRIES[plan.dtype, plan.tables.has_codes], part, own)
