"""The SGMV kernel, for Numba: what one thread does with the tasks of `sgmv_cpu`.

A panel fetches the panel after it while it is computed with, and the last one what the next task begins with: reading
and arithmetic take about as long, and would else take turns.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from sgmv_kernels.layout import ALIGNMENT_BYTES, MAX_SLICES, PANEL_RANKS, RECORD_INTS
from sgmv_kernels.sgmv_cpu import (
    EXPAND,
    NUM_ARGS,
    NUM_PANELS,
    NUM_TASKS,
    PANELS,
    PARTED,
    PERMUTATION,
    PHASES,
    RECORDS,
    SHRINK,
    SLAB,
    TASK_INTS,
    TASKS,
    V_WIDTH,
    WIDTHS,
    X_WIDTH,
    Y_WIDTH,
    V,
    X,
    Y,
)
from sgmv_kernels.simd_numba import (
    BF16,
    FP16,
    FP32,
    f32,
    i32,
    i64,
    itemsize,
    put_f32,
    take_next,
)
from sgmv_kernels.simd_products_numba import make_dot, make_mul, part

FETCH_BYTES = 2048
"""How far ahead of itself a matrix is fetched; between 1 and 6 KB no difference showed."""
_PANEL = ALIGNMENT_BYTES

_dot_1, _dot_3 = make_dot(1, fetch=True), make_dot(3)
_mul_1, _mul_3 = make_mul(1, 2, add=True, fetch=True), make_mul(3, 2, add=True)


def bf16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), BF16)


def fp16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), FP16)


def fp32(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), FP32)


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
    """y += (scale * v) B for some slices, rank rows `first` to `last`. Each panel fetches the one after it."""
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
