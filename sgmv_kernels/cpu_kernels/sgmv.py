"""SGMV on the CPU: the Numba kernel that runs one thread's tasks of `cpu_ops.sgmv`.

For single rows, weights are read front to back in one stream with prefetching: rows of A for dot products, rows of B to
be scaled and summed. This reaches 25 GB/s, tiles over sixteen rows at a time 19 (docs/benchmarks/kernels.md#sgmv).
"""

from typing import Any

import numpy as np

from sgmv_kernels.cpu_arguments.sgmv import (
    ARE_CODES,
    BEGIN,
    BLOCK,
    DONE,
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
from sgmv_kernels.cpu_kernels.program import add_shared, wait_for
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
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
SHARED_COLUMNS = 64
"""Columns of a share are a multiple of this, so that threads write whole cache lines."""
RANKS = LANES // 8
"""Rank rows that are multiplied by `TILE_ROWS` rows at a time: as many as there are registers for their sums."""
_dot_1, _dot_2, _dot_3 = (make_dot(rows, fetch=True) for rows in (1, 2, 3))
_dot_tile = make_dot(TILE_ROWS, RANKS)
_mul_2, _mul_3 = (make_mul(rows, 2, add=True, row_ahead=ROW_AHEAD) for rows in (2, 3))


def make_sgmv(kind: Any, has_codes: bool) -> Any:
    """Return work(args), which takes tasks until none is left: over weights of a kind and, with `has_codes`, over int8
    codes.
    """

    @kernel_part
    def work(args):  # type: ignore[no-untyped-def]
        scratch = args[SCRATCH] + take_next(args.ctypes.data + 8) * args[SCRATCH_BYTES]
        done = args.ctypes.data + 8 * DONE
        while True:
            number = take_next(args.ctypes.data)
            if number >= args[NUM_TASKS]:
                return
            task = args[TASKS] + number * (4 * TASK_INTS)
            # Other threads have taken the tasks before this one.
            wait_for(done, i32(task, WAITS))
            record = args[RECORDS] + args[PLACE] * args[PLACE_BYTES] + i32(task, BLOCK) * (4 * RECORD_INTS)
            if has_codes and i32(task, ARE_CODES):
                _run(args, INT8, task, record, scratch)
            else:
                _run(args, kind, task, record, scratch)
            if i32(task, TASK_PHASES) == SHRINK:
                add_shared(done, np.int64(1))

    return work


@kernel_part
def _run(args, kind, task, record, scratch):  # type: ignore[no-untyped-def]
    """Run one task over weights of a kind."""
    begin, end, phases = i32(task, BEGIN), i32(task, END), i32(task, TASK_PHASES)
    share, shares = i32(task, SHARE), i32(task, SHARES)
    first, last = _rank_before(record, i32(task, FIRST_SLICE)), _rank_before(record, i32(task, LAST_SLICE))
    if first == last:
        return
    if phases & SHRINK:
        first, last = first + (last - first) * share // shares, first + (last - first) * (share + 1) // shares
        if args[PHASES] & SHRINK:
            _shrink(args, kind, record, begin, end, first, last, scratch)
        if args[PHASES] & EXPAND:
            _scale(args, record, f32(task, FACTOR), begin, end, first, last)
    if phases & args[PHASES] & EXPAND:
        for s in range(i32(task, FIRST_SLICE), i32(task, LAST_SLICE)):
            column, columns = _columns(args, s, share, shares)
            if columns > 0:
                _expand_tiles(args, kind, record, begin, end, s, column, columns)
                _expand_rows(args, kind, record, begin, end, s, column, columns, scratch)


@kernel_part
def _columns(args, slice_, share, shares):  # type: ignore[no-untyped-def]
    """Return the first column of a slice that belongs to a share, and their number, 0 or less if there are none."""
    if shares == 1:
        return np.int64(0), args[WIDTHS + slice_]
    total, before = _column_of(args, np.int64(MAX_SLICES)), _column_of(args, slice_)
    step = (total + shares * SHARED_COLUMNS - 1) // (shares * SHARED_COLUMNS) * SHARED_COLUMNS
    first, last = max(share * step - before, np.int64(0)), min((share + 1) * step - before, args[WIDTHS + slice_])
    return first, last - first


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
def _shrink(args, kind, record, begin, end, first, last, scratch):  # type: ignore[no-untyped-def]
    """Compute v = x A^T for rank rows `first` to `last`, unscaled.

    The first rows read A from memory, and prefetch it; the others have it in a cache.
    """
    permutation, features = args[PERMUTATION], args[X_WIDTH]
    place = begin
    while place < end:
        rows = TILE_ROWS if place > begin and place + TILE_ROWS <= end else min(np.int64(3), end - place)
        for i in range(rows):
            x = args[X] + i32(permutation, place + i) * features * 4
            deinterleave(x, features, scratch + i * features * 4, kind)
        _dots(args, kind, record, place, rows, first, last, scratch, FETCH_BYTES if place == begin else 0)
        place += rows


@kernel_part
def _dots(args, kind, record, place, rows, first, last, x, ahead):  # type: ignore[no-untyped-def]
    """Multiply rank rows `first` to `last` by the rows of a tile, which lie at `x` one after the other."""
    features, v_bytes = args[X_WIDTH], 4 * args[V_WIDTH]
    x_bytes, row_bytes = 4 * features, features * itemsize(kind)
    rank = first
    while rank < last:
        inside = rank % PANEL_RANKS
        row = _address(args, i32(record, 0) + 1 + rank // PANEL_RANKS) + inside * row_bytes
        out = args[V] + place * v_bytes + rank * 4
        if rows == TILE_ROWS and rank + RANKS <= last and inside + RANKS <= PANEL_RANKS:
            _dot_tile(x, x_bytes, row, row_bytes, features, out, v_bytes, row, kind)
            rank += RANKS
            continue
        if rows >= 3:
            _dot_3(x, x_bytes, row, row_bytes, features, out, v_bytes, row + ahead, kind)
        if rows == TILE_ROWS:
            _dot_3(x + 3 * x_bytes, x_bytes, row, row_bytes, features, out + 3 * v_bytes, v_bytes, row, kind)
        elif rows == 2:
            _dot_2(x, x_bytes, row, row_bytes, features, out, v_bytes, row + ahead, kind)
        elif rows == 1:
            _dot_1(x, x_bytes, row, row_bytes, features, out, v_bytes, row + ahead, kind)
        rank += 1


@kernel_part
def _scale(args, record, factor, begin, end, first, last):  # type: ignore[no-untyped-def]
    """Multiply rank rows `first` to `last` of v by the scale vector and the segment's factor."""
    scale = _address(args, i32(record, 0))
    for place in range(begin, end):
        at = args[V] + place * 4 * args[V_WIDTH]
        for r in range(first, last):
            put_f32(at, r, f32(at, r) * (f32(scale, r) * factor))


@kernel_part
def _expand_tiles(args, kind, record, begin, end, slice_, column, columns):  # type: ignore[no-untyped-def]
    """Add v B to columns of one slice of y, for neighbouring rows, three or two at a time: a loaded weight is used for
    all."""
    permutation, y_bytes, v_bytes = args[PERMUTATION], 4 * args[Y_WIDTH], 4 * args[V_WIDTH]
    row_bytes, rank = args[WIDTHS + slice_] * itemsize(kind), _rank_before(record, slice_)
    panel, last = _first_b(record, slice_), rank + i32(record, 1 + slice_)
    y = args[Y] + 4 * (_column_of(args, slice_) + column)
    while rank < last and end - begin >= 2:
        count = min(PANEL_RANKS, last - rank)
        b = _address(args, panel) + column * itemsize(kind)
        place = begin
        while place < end:
            rows = _run_of(permutation, place, end)
            va, ya = args[V] + place * v_bytes + rank * 4, y + i32(permutation, place) * y_bytes
            if rows == 3:
                _mul_3(va, v_bytes, count, b, row_bytes, columns, ya, y_bytes, b, kind)
            elif rows == 2:
                _mul_2(va, v_bytes, count, b, row_bytes, columns, ya, y_bytes, b, kind)
            place += rows
        panel += 1
        rank += count


@kernel_part
def _expand_rows(args, kind, record, begin, end, slice_, column, columns, scratch):  # type: ignore[no-untyped-def]
    """Add v B to columns of one slice of y, for the other rows, one by one: B is read front to back in one stream."""
    permutation, first = args[PERMUTATION], _rank_before(record, slice_)
    row_bytes = args[WIDTHS + slice_] * itemsize(kind)
    rank, first_panel, skip = i32(record, 1 + slice_), _first_b(record, slice_), column * itemsize(kind)
    if rank == 0:
        return
    place = begin
    while place < end:
        rows = _run_of(permutation, place, end)
        if rows == 1:
            y = args[Y] + 4 * (i32(permutation, place) * args[Y_WIDTH] + _column_of(args, slice_) + column)
            v = args[V] + 4 * (place * args[V_WIDTH] + first)
            deinterleave(y, columns, scratch, kind)
            for r in range(rank):
                b = _address(args, first_panel + r // PANEL_RANKS) + r % PANEL_RANKS * row_bytes + skip
                axpy(f32(v, r), b, columns, scratch, b + FETCH_BYTES, kind)
            interleave(scratch, columns, np.float32(1), y, kind)
        place += rows


KERNELS = {
    "bf16": make_sgmv(BF16, has_codes=False),
    "bf16_codes": make_sgmv(BF16, has_codes=True),
    "fp16": make_sgmv(FP16, has_codes=False),
    "fp16_codes": make_sgmv(FP16, has_codes=True),
    "fp32": make_sgmv(FP32, has_codes=False),
    "fp32_codes": make_sgmv(FP32, has_codes=True),
}
