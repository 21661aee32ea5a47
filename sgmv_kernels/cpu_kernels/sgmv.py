"""SGMV on the CPU: the Numba kernel that runs one thread's tasks of `cpu_ops.sgmv`.

For single rows, weights are read front to back in one stream with prefetching: rows of A for dot products, rows of B to
be scaled and summed. This reaches 25 GB/s, tiles over sixteen rows at a time 19 (docs/benchmarks/kernels.md#sgmv).
"""

from typing import Any

import numpy as np
from numba import carray

from sgmv_kernels.cpu_ops.sgmv import (
    DEINTERLEAVED,
    EXPAND,
    NUM_ARGS,
    NUM_TASKS,
    PANELS,
    PERMUTATION,
    PHASES,
    PLACE,
    PLACE_BYTES,
    RECORDS,
    SCRATCH,
    SCRATCH_BYTES,
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
from sgmv_kernels.cpu_simd.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.matmul import axpy, deinterleave, interleave, make_dot, make_mul
from sgmv_kernels.cpu_simd.memory_access import BF16, FP16, FP32, INT8, f32, i32, itemsize, put_f32, take_next
from sgmv_kernels.cpu_simd.vector_ir import LANES
from sgmv_kernels.formats.adapter_panels import MAX_SLICES, PANEL_RANKS, RECORD_INTS
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES

FETCH_BYTES = 4096
"""Bytes that a matrix is prefetched ahead of the read position. 1,024 are enough for bf16; int8 takes a fifth less time
with 4,096."""
_PANEL = ALIGNMENT_BYTES
ROW_AHEAD = 256
"""Bytes that a row of B is prefetched ahead if several rows of y read all of B's rows, a piece of each at a time."""
RANKS = LANES // 8
"""Rank rows that are multiplied by three rows at a time: as many as there are registers for sums."""
_dot_1, _dot_2, _dot_3 = (make_dot(rows, fetch=True) for rows in (1, 2, 3))
_dot_tile = make_dot(3, RANKS)
_mul_2, _mul_3 = (make_mul(rows, 2, add=True, row_ahead=ROW_AHEAD) for rows in (2, 3))


def bf16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), BF16)


def fp16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), FP16)


def fp32(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), FP32)


@kernel_part
def _work(args, kind):  # type: ignore[no-untyped-def]
    """Take tasks until none is left."""
    phases, num_tasks = args[PHASES], args[NUM_TASKS]
    scratch = args[SCRATCH] + take_next(args.ctypes.data + 8) * args[SCRATCH_BYTES]
    while True:
        task = take_next(args.ctypes.data)
        if task >= num_tasks:
            return
        at = args[TASKS] + task * (4 * TASK_INTS)
        record = args[RECORDS] + args[PLACE] * args[PLACE_BYTES] + i32(at, 0) * (4 * RECORD_INTS)
        begin, end, first_slice, last_slice = i32(at, 1), i32(at, 2), i32(at, 3), i32(at, 4)
        if _rank_before(record, first_slice) == _rank_before(record, last_slice):
            continue
        factor = f32(at, 6)
        if i32(at, 5):
            _run(args, INT8, phases, record, factor, begin, end, first_slice, last_slice, scratch)
        else:
            _run(args, kind, phases, record, factor, begin, end, first_slice, last_slice, scratch)


@kernel_part
def _run(args, kind, phases, record, factor, begin, end, first_slice, last_slice, scratch):  # type: ignore[no-untyped-def]
    """Run one task over weights of a kind."""
    first, last = _rank_before(record, first_slice), _rank_before(record, last_slice)
    if phases & SHRINK:
        _shrink(args, kind, record, begin, end, first, last)
    if phases & EXPAND:
        _scale(args, record, factor, begin, end, first, last)
        for s in range(first_slice, last_slice):
            _expand_tiles(args, kind, record, begin, end, s)
            _expand_rows(args, kind, record, begin, end, s, scratch)


@kernel_part
def _rank_before(record, slice_):  # type: ignore[no-untyped-def]
    """Return the number of rank rows of the slices before this one."""
    total = np.int64(0)
    for s in range(slice_):
        total += i32(record, 1 + s)
    return total


@kernel_part
def _panels_of(rank):  # type: ignore[no-untyped-def]
    return (rank + PANEL_RANKS - 1) // PANEL_RANKS


@kernel_part
def _first_b(record, slice_):  # type: ignore[no-untyped-def]
    """Return the index of a slice's first B panel in the panel offsets."""
    panel = i32(record, 0) + 1 + _panels_of(_rank_before(record, MAX_SLICES))
    for s in range(slice_):
        panel += _panels_of(i32(record, 1 + s))
    return panel


@kernel_part
def _column_of(args, slice_):  # type: ignore[no-untyped-def]
    """Return a slice's first column in y."""
    column = np.int64(0)
    for s in range(slice_):
        column += args[WIDTHS + s]
    return column


@kernel_part
def _address(args, panel):  # type: ignore[no-untyped-def]
    """Return the address of a panel."""
    return args[SLAB] + i32(args[PANELS], panel) * _PANEL


@kernel_part
def _run_of(permutation, place, end):  # type: ignore[no-untyped-def]
    """Return the number of consecutive rows, from this place on, that form a tile: 3, 2 or 1."""
    row, rows = i32(permutation, place), np.int64(1)
    while rows < 3 and place + rows < end and i32(permutation, place + rows) == row + rows:
        rows += 1
    return rows


@kernel_part
def _shrink(args, kind, record, begin, end, first, last):  # type: ignore[no-untyped-def]
    """Compute v = x A^T for rank rows `first` to `last`, unscaled.

    The first rows read A from memory, and prefetch it; the others have it in a cache.
    """
    permutation = args[PERMUTATION]
    x, features, deinterleaved = args[X], args[X_WIDTH], args[DEINTERLEAVED]
    v, v_bytes = args[V], 4 * args[V_WIDTH]
    row_bytes, x_bytes = features * itemsize(kind), features * 4
    for place in range(begin, end):
        deinterleave(x + i32(permutation, place) * x_bytes, features, deinterleaved + place * x_bytes, kind)
    rank = first
    while rank < last:
        inside = rank % PANEL_RANKS
        count = min(PANEL_RANKS - inside, last - rank)
        a = _address(args, i32(record, 0) + 1 + rank // PANEL_RANKS) + inside * row_bytes
        place = begin
        while place < end:
            rows, ahead = min(np.int64(3), end - place), FETCH_BYTES if place == begin else 0
            xa, out = deinterleaved + place * x_bytes, v + place * v_bytes + rank * 4
            j = np.int64(0)
            while j < count:
                row = a + j * row_bytes
                if rows == 3 and place > begin and j + RANKS <= count:
                    _dot_tile(xa, x_bytes, row, row_bytes, features, out + 4 * j, v_bytes, row, kind)
                    j += RANKS
                    continue
                if rows == 3:
                    _dot_3(xa, x_bytes, row, row_bytes, features, out + 4 * j, v_bytes, row + ahead, kind)
                elif rows == 2:
                    _dot_2(xa, x_bytes, row, row_bytes, features, out + 4 * j, v_bytes, row + ahead, kind)
                else:
                    _dot_1(xa, x_bytes, row, row_bytes, features, out + 4 * j, v_bytes, row + ahead, kind)
                j += 1
            place += rows
        rank += count


@kernel_part
def _scale(args, record, factor, begin, end, first, last):  # type: ignore[no-untyped-def]
    """Multiply rank rows `first` to `last` of v by the scale vector and the segment's factor."""
    scale = _address(args, i32(record, 0))
    for place in range(begin, end):
        at = args[V] + place * 4 * args[V_WIDTH]
        for r in range(first, last):
            put_f32(at, r, f32(at, r) * (f32(scale, r) * factor))


@kernel_part
def _expand_tiles(args, kind, record, begin, end, slice_):  # type: ignore[no-untyped-def]
    """Add v B of one slice to y, for neighbouring rows, three or two at a time: a loaded weight is used for all."""
    permutation, y_bytes, v_bytes = args[PERMUTATION], 4 * args[Y_WIDTH], 4 * args[V_WIDTH]
    width, rank = args[WIDTHS + slice_], _rank_before(record, slice_)
    row_bytes, panel, last = width * itemsize(kind), _first_b(record, slice_), rank + i32(record, 1 + slice_)
    y = args[Y] + 4 * _column_of(args, slice_)
    while rank < last and end - begin >= 2:
        count = min(PANEL_RANKS, last - rank)
        b = _address(args, panel)
        place = begin
        while place < end:
            rows = _run_of(permutation, place, end)
            va, ya = args[V] + place * v_bytes + rank * 4, y + i32(permutation, place) * y_bytes
            if rows == 3:
                _mul_3(va, v_bytes, count, b, row_bytes, width, ya, y_bytes, b, kind)
            elif rows == 2:
                _mul_2(va, v_bytes, count, b, row_bytes, width, ya, y_bytes, b, kind)
            place += rows
        panel += 1
        rank += count


@kernel_part
def _expand_rows(args, kind, record, begin, end, slice_, scratch):  # type: ignore[no-untyped-def]
    """Add v B of one slice to y, for the other rows, one by one: B is read front to back in one stream."""
    permutation, width, first = args[PERMUTATION], args[WIDTHS + slice_], _rank_before(record, slice_)
    rank, row_bytes, first_panel = i32(record, 1 + slice_), width * itemsize(kind), _first_b(record, slice_)
    if rank == 0:
        return
    place = begin
    while place < end:
        rows = _run_of(permutation, place, end)
        if rows == 1:
            y = args[Y] + 4 * (i32(permutation, place) * args[Y_WIDTH] + _column_of(args, slice_))
            v = args[V] + 4 * (place * args[V_WIDTH] + first)
            deinterleave(y, width, scratch, kind)
            for r in range(rank):
                b = _address(args, first_panel + r // PANEL_RANKS) + r % PANEL_RANKS * row_bytes
                axpy(f32(v, r), b, width, scratch, b + FETCH_BYTES, kind)
            interleave(scratch, width, np.float32(1), y, kind)
        place += rows
