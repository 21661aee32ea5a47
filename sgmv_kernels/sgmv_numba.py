"""SGMV on the CPU: panels are read in place from the pool, bf16, fp16 or fp32, summed in fp32; no gather, no copy.

A task is a block of rows of one segment, and all its slices or one; it shrinks and expands in one go, so that a site
costs one parallel region and no barrier. Largest tasks first; threads take them as they come free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from sgmv_kernels.backend import SgmvPlan
from sgmv_kernels.layout import ALIGNMENT_BYTES, MAX_SLICES, PANEL_RANKS, RECORD_INTS
from sgmv_kernels.segments import Int32
from sgmv_kernels.simd_numba import KINDS, f32, i32, i64, itemsize, make_dot, make_mul, part, put_f32, take_next
from sgmv_kernels.tables import SgmvTables
from sgmv_kernels.team_numba import Arguments, arguments, compiled, run, team_size

BLOCK_ROWS = 32
"""Most rows of a task: its outputs stay in the second-level cache while its panels pass through."""
SHRINK, EXPAND = 1, 2
TASK_INTS = 5
PHASES, NUM_TASKS, TASKS, PERMUTATION, RECORDS, PANELS, NUM_PANELS, SLAB = range(2, 10)
X, X_WIDTH, PARTED, Y, Y_WIDTH, V, V_WIDTH, WIDTHS = range(10, 18)
"""Places in the kernel's arguments, after the counters."""
NUM_ARGS = WIDTHS + MAX_SLICES
FETCH_BYTES = 1024
_PANEL = ALIGNMENT_BYTES

_dot_1, _dot_3 = make_dot(1, fetch=True), make_dot(3)
_mul_1, _mul_3 = make_mul(1, 2, add=True, fetch=True), make_mul(3, 2, add=True)


@dataclass(frozen=True, slots=True)
class NumbaTables:
    """A step for the kernel: what of its arguments stays the same, `arguments[site]`, and what those point to.

    `ranks[layer][site]` is the most rank rows of a segment; `v` [T, most ranks] fp32 scratch; `record_bytes` those of a
    (layer, site).
    """

    kernel: int
    threads: list[int]
    arguments: list[Arguments]
    records: int
    record_bytes: int
    ranks: list[list[int]]
    v: Tensor
    kept: tuple[object, ...]


def prepare(tables: SgmvTables, dtype: torch.dtype, device: torch.device) -> NumbaTables:
    """Cut segments into tasks, and lay out the kernel's arguments."""
    del device
    threads, num_sites = team_size(), len(tables.sites)
    counts = {len(site.out_features) for site in tables.sites}
    tasks = {n: _tasks(tables, n, threads) for n in counts}
    permutation, records, panels = map(np.ascontiguousarray, (tables.permutation, tables.records, tables.panels))
    ranks = records[..., 1:].sum(axis=-1).max(axis=-1, initial=0)
    v = torch.empty((len(permutation), int(ranks.max(initial=0))), dtype=torch.float32)
    parted = torch.empty((len(permutation), max((site.in_features for site in tables.sites), default=0)))
    blocks = []
    for site in tables.sites:
        own = tasks[len(site.out_features)]
        widths = (*site.out_features, 0, 0)[:MAX_SLICES]
        blocks.append(
            arguments(
                SHRINK | EXPAND,
                len(own),
                own.ctypes.data,
                permutation.ctypes.data,
                0,
                panels.ctypes.data,
                len(panels),
                0,
                0,
                site.in_features,
                parted.data_ptr(),
                0,
                site.total_out,
                v.data_ptr(),
                v.shape[1],
                *widths,
            )
        )
    return NumbaTables(
        kernel=_kernel(dtype),
        threads=[min(threads, len(tasks[len(site.out_features)])) for site in tables.sites],
        arguments=blocks,
        records=records.ctypes.data,
        record_bytes=records.nbytes // max(1, len(records) * num_sites),
        ranks=ranks.tolist(),
        v=v,
        kept=(parted, tasks, permutation, records, panels),
    )


def _tasks(tables: SgmvTables, slices: int, threads: int) -> Int32:
    """Whole segments, in blocks of rows; their slices apart if there are few."""
    lengths = np.diff(tables.bounds).ravel()
    ranks = tables.records[..., 1:].sum(axis=(0, 1, 3))
    share = max(1, -(-int(lengths.sum()) // threads))
    rows = min(BLOCK_ROWS, share)
    blocks = -(-lengths // rows)
    apart = slices if int(blocks.sum()) < 2 * threads else 1
    made = []
    for s in np.argsort(-ranks * np.minimum(lengths, rows), kind="stable").tolist():
        begin, end = tables.bounds[s].tolist()
        size = -(-(end - begin) // max(1, int(blocks[s])))
        for first in range(begin, end, max(1, size)):
            last = min(end, first + size)
            made += [(s, first, last, *span) for span in (_spans(slices, apart))]
    return np.array(made, dtype=np.int32).reshape(-1, TASK_INTS)


def _spans(slices: int, apart: int) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(slices)] if apart > 1 else [(0, slices)]


def shrink_numba(x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> Tensor:
    """See `ops.Ops.shrink`: one plane."""
    v = torch.empty((1, len(x), plan.tables.max_rank(layer, site) if plan.tables.num_segments else 0))
    _launch(SHRINK, x, x, v, slab, plan, layer, site)
    return v


def expand_numba_(y: Tensor, v: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """See `ops.Ops.expand_`."""
    _launch(EXPAND, y, y, v.sum(0), slab, plan, layer, site)


def sgmv_numba_(y: Tensor, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """See `ops.Ops.sgmv_`."""
    _launch(SHRINK | EXPAND, y, x, plan.prepared.v, slab, plan, layer, site)


def _launch(phases: int, y: Tensor, x: Tensor, v: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    tables: NumbaTables = plan.prepared
    if not tables.arguments or not tables.ranks[layer][site]:
        return
    args = tables.arguments[site]
    args[PHASES], args[V], args[V_WIDTH] = phases, v.data_ptr(), v.shape[-1]
    args[RECORDS] = tables.records + (layer * len(tables.arguments) + site) * tables.record_bytes
    args[SLAB], args[X], args[Y] = slab.data_ptr(), x.data_ptr(), y.data_ptr()
    run(tables.kernel, tables.threads[site], args)


def warm_up(dtypes: Sequence[torch.dtype]) -> None:
    """Compile what these dtypes need."""
    for dtype in dtypes:
        _kernel(dtype)


@cache
def _kernel(dtype: torch.dtype) -> int:
    return compiled(_ENTRIES[dtype])


def _bf16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), KINDS_BF16)


def _fp16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), KINDS_FP16)


def _fp32(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), KINDS_FP32)


KINDS_BF16, KINDS_FP16, KINDS_FP32 = (KINDS[t] for t in (torch.bfloat16, torch.float16, torch.float32))
_ENTRIES = {torch.bfloat16: _bf16, torch.float16: _fp16, torch.float32: _fp32}


@njit
def _work(args, kind):  # type: ignore[no-untyped-def]
    """Take tasks until none is left."""
    phases, num_tasks = args[PHASES], args[NUM_TASKS]
    while True:
        task = take_next(args.ctypes.data)
        if task >= num_tasks:
            return
        at = args[TASKS] + task * (4 * TASK_INTS)
        record = args[RECORDS] + i32(at, 0) * (4 * RECORD_INTS)
        first_slice, last_slice = i32(at, 3), i32(at, 4)
        first, last = _rank_before(record, first_slice), _rank_before(record, last_slice)
        if first == last:
            continue
        if phases & SHRINK:
            _shrink(args, kind, record, i32(at, 1), i32(at, 2), first, last, first_slice)
        if phases & EXPAND:
            _expand(args, kind, record, i32(at, 1), i32(at, 2), first, last, first_slice, last_slice)


@njit
def _rank_before(record, slice_):  # type: ignore[no-untyped-def]
    """Rank rows of the slices before one."""
    total = np.int64(0)
    for s in range(slice_):
        total += i32(record, 1 + s)
    return total


@njit
def _panels_of(rank):  # type: ignore[no-untyped-def]
    return (rank + PANEL_RANKS - 1) // PANEL_RANKS


@njit
def _first_b(record, slice_):  # type: ignore[no-untyped-def]
    """Place of a slice's first B panel in the panel offsets."""
    panel = i32(record, 0) + 1 + _panels_of(_rank_before(record, MAX_SLICES))
    for s in range(slice_):
        panel += _panels_of(i32(record, 1 + s))
    return panel


@njit
def _next_panel(args):  # type: ignore[no-untyped-def]
    """Where the task that is next to be taken begins to read, if it may be this thread's."""
    task = min(i64(args.ctypes.data, 0), args[NUM_TASKS] - 1)
    at = args[TASKS] + task * (4 * TASK_INTS)
    record = args[RECORDS] + i32(at, 0) * (4 * RECORD_INTS)
    panel = i32(record, 0) + 1 + _rank_before(record, i32(at, 3)) // PANEL_RANKS
    return args[SLAB] + i32(args[PANELS], min(panel, args[NUM_PANELS] - 1)) * _PANEL


@njit
def _run_of(permutation, place, end):  # type: ignore[no-untyped-def]
    """How many rows from a place on, up to 3, are neighbours."""
    row, n = i32(permutation, place), 1
    while n < 3 and place + n < end and i32(permutation, place + n) == row + n:
        n += 1
    return n


@njit
def _shrink(args, kind, record, begin, end, first, last, first_slice):  # type: ignore[no-untyped-def]
    """v = x A^T for rank rows `first` to `last`, unscaled. Each panel fetches the one after it."""
    permutation, panels, slab = args[PERMUTATION], args[PANELS], args[SLAB]
    x, features = args[X], args[X_WIDTH]
    v, v_bytes = args[V], 4 * args[V_WIDTH]
    row_bytes, x_bytes = features * itemsize(kind), features * 4
    parted = args[PARTED]
    for place in range(begin, end):
        part(x + i32(permutation, place) * x_bytes, features, parted + place * x_bytes, kind)
    rank = first
    while rank < last:
        inside = rank % PANEL_RANKS
        count = min(PANEL_RANKS - inside, last - rank)
        panel = i32(record, 0) + 1 + rank // PANEL_RANKS
        a = slab + i32(panels, panel) * _PANEL + inside * row_bytes
        ahead = a + FETCH_BYTES if rank + count < last else slab + i32(panels, _first_b(record, first_slice)) * _PANEL
        place = begin
        while place < end:
            rows = min(3, end - place)
            xa = parted + place * x_bytes
            out = v + place * v_bytes + rank * 4
            for j in range(count):
                skip = j * row_bytes
                if rows == 3:
                    _dot_3(xa, x_bytes, a + skip, features, out + 4 * j, v_bytes, ahead, kind)
                else:
                    _dot_1(xa, x_bytes, a + skip, features, out + 4 * j, v_bytes, ahead + skip, kind)
            place += 3 if rows == 3 else 1
        rank += count


@njit
def _expand(args, kind, record, begin, end, first, last, first_slice, last_slice):  # type: ignore[no-untyped-def]
    """y += (scale * v) B for some slices, whose rank rows are `first` to `last`. Each panel fetches the one after it."""
    permutation, panels, slab = args[PERMUTATION], args[PANELS], args[SLAB]
    y, y_bytes = args[Y], 4 * args[Y_WIDTH]
    v, v_bytes = args[V], 4 * args[V_WIDTH]
    scale = slab + i32(panels, i32(record, 0)) * _PANEL
    for place in range(begin, end):
        at = v + place * v_bytes
        for r in range(first, last):
            put_f32(at, r, f32(at, r) * f32(scale, r))
    column = np.int64(0)
    for s in range(first_slice):
        column += args[WIDTHS + s]
    panel, rank = _first_b(record, first_slice), first
    for s in range(first_slice, last_slice):
        end_rank, width = rank + i32(record, 1 + s), args[WIDTHS + s]
        row_bytes = width * itemsize(kind)
        while rank < end_rank:
            count = min(PANEL_RANKS, end_rank - rank)
            b = slab + i32(panels, panel) * _PANEL
            ahead = slab + i32(panels, panel + 1) * _PANEL if rank + count < last else _next_panel(args)
            place = begin
            while place < end:
                rows = _run_of(permutation, place, end)
                va, ya = v + place * v_bytes + rank * 4, y + i32(permutation, place) * y_bytes + column * 4
                if rows == 3:
                    _mul_3(va, v_bytes, count, b, row_bytes, width, ya, y_bytes, ahead, kind)
                else:
                    _mul_1(va, v_bytes, count, b, row_bytes, width, ya, y_bytes, ahead, kind)
                place += 3 if rows == 3 else 1
            panel += 1
            rank += count
        column += width
