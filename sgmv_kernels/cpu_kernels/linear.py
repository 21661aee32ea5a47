"""Quantized linears on the CPU: the Numba kernels that run one thread's tasks of `cpu_ops.linear`."""

from typing import Any

import numpy as np

from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_arguments.linear import (
    AMX_FROM,
    BIAS,
    CODE_BYTES,
    CODES,
    DATA,
    EARLY,
    GROUP,
    GROUPS,
    LINES,
    MOST_ROWS,
    ORDER,
    OUT,
    PEAK_BYTES,
    PEAKS,
    ROUND_BLOCKS,
    ROW_BYTES,
    SCRATCH,
    SCRATCH_AGAIN,
    SCRATCH_BYTES,
    TABLE,
    TASK_TILES,
    TILES,
    UNIT_BYTES,
    UNITS,
    WIDTH,
    Y_WIDTH,
    X,
    Y,
)
from sgmv_kernels.cpu_kernels.likeliest import find_peak
from sgmv_kernels.cpu_kernels.linear_amx import make_amx
from sgmv_kernels.cpu_kernels.rounding import place_of, round_blocks, round_ordered_blocks
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd import quant_matmul as qm
from sgmv_kernels.cpu_simd.amx_matmul import AMX_ROWS, configure_amx, end_amx
from sgmv_kernels.cpu_simd.memory_access import f32, put_f32, put_i32, take_next
from sgmv_kernels.cpu_simd.quant_ir import VECTORS
from sgmv_kernels.cpu_simd.quant_matmul import (
    LINE,
    ROWS_BLOCK,
    TILES_AT_ONCE,
    begin_tile,
    copy_factors,
    make_product,
    unpack_entries,
    unpack_sevens,
)
from sgmv_kernels.formats.weight_codes import CHUNK, CODE_BLOCK, ROUND_ROWS, ROW_GROUP, TILE

ROWS = 4 if VECTORS == 2 else MOST_ROWS
"""Rows whose integer sums are kept in registers at a time: eight of sixteen registers, or sixteen of 32."""
_WIDTH = 4 * TILE * TILES_AT_ONCE
"""Bytes of a row's sums."""


def make_round_rows(round_blocks: Any) -> Any:
    """Return the kernel that rounds rows."""

    @kernel_part
    def round_rows(args):  # type: ignore[no-untyped-def]
        """Take tasks until none is left: `ROUND_BLOCKS` blocks of `ROUND_ROWS` rows."""
        blocks, row_bytes = args[WIDTH] // CODE_BLOCK, 4 * args[WIDTH]
        parts = (blocks + ROUND_BLOCKS - 1) // ROUND_BLOCKS
        while True:
            task = take_next(args.ctypes.data)
            before, first = task // parts * ROUND_ROWS, task % parts * ROUND_BLOCKS
            if before >= args[NUM_ROWS]:
                return
            codes = place_of(args[CODES], before, args[ROW_BYTES], CODE_BLOCK)
            units = place_of(args[UNITS], before, args[UNIT_BYTES], 4)
            x, rows, last = args[X] + before * row_bytes, args[NUM_ROWS] - before, min(first + ROUND_BLOCKS, blocks)
            round_blocks(x, row_bytes, rows, args[ORDER], codes, units, first, last)

    return round_rows


@kernel_part
def unpack_q3h(source, group, table, out):  # type: ignore[no-untyped-def]
    for i in range(group // 64):
        unpack_sevens(source + i * 7 * LINE, out + i * 16 * LINE)


@kernel_part
def unpack_table(source, group, table, out):  # type: ignore[no-untyped-def]
    unpack_entries(source, group // CODE_BLOCK, table, out)


@kernel_part
def find_peaks(args, first, end):  # type: ignore[no-untyped-def]
    """Record the largest of each row's outputs from the tiles `first` to `end`."""
    rows, start = args[NUM_ROWS], TILE * first
    width, peaks = min(TILE * end, args[OUT]) - start, args[PEAKS] + first // args[TASK_TILES] * rows * PEAK_BYTES
    for row in range(rows):
        peak, at = find_peak(args[Y] + 4 * (row * args[Y_WIDTH] + start), width)
        put_f32(peaks, 2 * row, peak)
        put_i32(peaks, 2 * row + 1, start + at if peak == peak else at)


def make_linear(kind: str, unpack: Any = None) -> Any:
    """Return the kernel of one format.

    Args:
        kind: how the codes are multiplied: see `quant_matmul.CODES`.
        unpack: (source, group, table, out) converts a group's stored codes to such codes; None: they are stored so.
    """
    product, product_2, product_1 = (make_product(n, kind) for n in (ROWS, 2, 1))
    product_4 = product if ROWS == 4 else make_product(4, kind)
    takes_more = ROWS > 4  # Numba compiles no branch on a constant that is false.
    factor_bytes = qm.CODES[kind].factors.nbytes
    multiply_by_amx = make_amx(kind, unpack)

    @kernel_part
    def begin(args, tile, start):  # type: ignore[no-untyped-def]
        """Write the initial values of every row's sums: the bias, or zeros."""
        for i in range(TILES_AT_ONCE):
            bias = args[BIAS] + 4 * TILE * (tile + i) if args[BIAS] and tile + i < args[TILES] else np.int64(0)
            begin_tile(bias, start + i * 4 * TILE)

    @kernel_part
    def copy(args, tile, sums):  # type: ignore[no-untyped-def]
        """Copy the sums of tiles that reach beyond the last output to y."""
        first = TILE * tile
        for row in range(args[NUM_ROWS]):
            y = args[Y] + 4 * (row * args[Y_WIDTH] + first)
            for i in range(args[OUT] - first):
                put_f32(y, i, f32(sums + row * _WIDTH, i))

    @kernel_part
    def multiply(  # type: ignore[no-untyped-def]
        args, row, data, following, soon, first, groups, stored, kept, start, start_bytes, out, out_bytes
    ):
        """Add the products of the rows from `row` on with the tiles' groups from `first` on to the numbers at `start`,
        and write the sums to `out`. Prefetch at least as many bytes at `soon`, whole lines for every block; if `soon`
        is `data`, this has no effect. `kept` is scratch memory, given by two addresses.
        """
        group, lines, table, rows = args[GROUP], args[LINES], args[TABLE], args[NUM_ROWS]
        blocks, before = groups * group // CODE_BLOCK, first * group // CODE_BLOCK
        passes = max(1, (rows - row) // ROWS)
        share = TILES_AT_ONCE * groups * (stored + factor_bytes) // (passes * blocks)
        share = (share + LINE - 1) // LINE * LINE if soon != data else np.int64(0)
        while row < rows:
            left = min(rows - row, ROW_GROUP - row % ROW_GROUP)
            x = place_of(args[CODES], row, args[ROW_BYTES], CODE_BLOCK) + before * ROWS_BLOCK
            u = place_of(args[UNITS], row, args[UNIT_BYTES], 4) + before * qm.UNITS
            tiles = data, following, groups, group, stored, lines, table
            sums = start + row * start_bytes, start_bytes, out + row * out_bytes, out_bytes
            if left >= ROWS:
                product(x, u, *tiles, soon, share, *sums, *kept)
                row += ROWS
            elif takes_more and left >= 4:
                product_4(x, u, *tiles, soon, share, *sums, *kept)
                row += 4
            elif left >= 2:
                product_2(x, u, *tiles, soon, share, *sums, *kept)
                row += 2
            else:
                product_1(x, u, *tiles, soon, share, *sums, *kept)
                row += 1
            passes -= 1
            soon = soon + blocks * share
            if passes == 0:
                soon, share = data, np.int64(0)

    @kernel_part
    def unpack_groups(args, data, first, last, out):  # type: ignore[no-untyped-def]
        """Unpack groups of a tile into scratch memory."""
        stored, unpacked = args[CODE_BYTES], TILE * args[GROUP]
        for g in range(first, last):
            source = data + g * (stored + factor_bytes)
            target = out + (g - first) * (unpacked + factor_bytes)
            unpack(source, args[GROUP], args[TABLE], target)
            copy_factors(source + stored, factor_bytes, target + unpacked)

    @kernel_part
    def multiply_unpacked(args, row, data, following, scratch, kept, start, start_bytes, out, out_bytes):  # type: ignore[no-untyped-def]
        step = max(1, CHUNK // args[GROUP])
        unpacked = TILE * args[GROUP]
        tile_bytes = step * (unpacked + factor_bytes)
        for first in range(0, args[GROUPS], step):
            last = min(first + step, args[GROUPS])
            for i in range(TILES_AT_ONCE):
                unpack_groups(args, data + i * following, first, last, scratch + i * tile_bytes)
            sums = start, start_bytes, out, out_bytes
            multiply(args, row, scratch, tile_bytes, scratch, first, last - first, unpacked, kept, *sums)
            start, start_bytes = out, out_bytes

    is_stored = unpack is None

    @kernel_part
    def work(args):  # type: ignore[no-untyped-def]
        """Take tasks until none is left."""
        if args[NUM_ROWS] == 0:
            return
        own = take_next(args.ctypes.data + 8) * args[SCRATCH_BYTES]
        kept = args[SCRATCH] + own, args[SCRATCH_AGAIN] + own
        start = kept[0] + ROWS * _WIDTH
        at_edge = start + _WIDTH
        scratch = at_edge + args[NUM_ROWS] * _WIDTH
        amx_sums = scratch + 2 * (TILE * CHUNK + 8 * TILE * CHUNK // CODE_BLOCK)
        uses_amx = args[AMX_FROM] and args[NUM_ROWS] >= args[AMX_FROM]
        in_amx = args[NUM_ROWS] // AMX_ROWS * AMX_ROWS if uses_amx else np.int64(0)
        if in_amx:
            configure_amx(amx_sums)
        tile_bytes = args[GROUPS] * (args[CODE_BYTES] + factor_bytes)
        tiles, task_tiles = args[TILES], args[TASK_TILES]
        task = take_next(args.ctypes.data) * task_tiles
        while task < tiles:
            # The next task is taken early, so that this thread prefetches its data and also computes it.
            upcoming = take_next(args.ctypes.data) * task_tiles if args[EARLY] else tiles
            end_of_task = min(task + task_tiles, tiles)
            for tile in range(task, end_of_task, TILES_AT_ONCE):
                # If there is no second tile, the last one is multiplied again, and its result is not copied.
                following = tile_bytes if tile + 1 < tiles else np.int64(0)
                data = args[DATA] + tile * tile_bytes
                coming = tile + TILES_AT_ONCE if tile + TILES_AT_ONCE < end_of_task else upcoming
                soon = args[DATA] + coming * tile_bytes if coming < tiles else data
                begin(args, tile, start)
                is_whole = TILE * (tile + TILES_AT_ONCE) <= args[OUT]
                out = args[Y] + 4 * TILE * tile if is_whole else at_edge
                sums = start, np.int64(0), out, 4 * args[Y_WIDTH] if is_whole else np.int64(_WIDTH)
                if in_amx < args[NUM_ROWS]:
                    # Before the rows for AMX, whose unpacked codes and sums evict the tiles from the L1 cache.
                    if is_stored:
                        multiply(args, in_amx, data, following, soon, 0, args[GROUPS], args[CODE_BYTES], kept, *sums)
                    else:
                        multiply_unpacked(args, in_amx, data, following, scratch, kept, *sums)
                    soon = data
                if in_amx:
                    begun, written = sums[:2], sums[2:]
                    multiply_by_amx(args, in_amx, data, following, soon, scratch, amx_sums, *begun, at_edge, *written)
                if not is_whole:
                    copy(args, tile, at_edge)
            if args[PEAKS]:
                find_peaks(args, task, end_of_task)
            task = upcoming if args[EARLY] else take_next(args.ctypes.data) * task_tiles
        if in_amx:
            end_amx()

    return work


KERNELS = {
    "round8": make_round_rows(round_blocks),
    "round8_ordered": make_round_rows(round_ordered_blocks),
    "int4": make_linear("int4"),
    "int4_zeros": make_linear("int4_zeros"),
    "int4_fp32": make_linear("int4_fp32"),
    "int4_minima": make_linear("int4_minima"),
    "int4_steps": make_linear("int4_steps"),
    "q3h": make_linear("small", unpack_q3h),
    "q3h_zeros": make_linear("small_zeros", unpack_q3h),
    "q3h_fp32": make_linear("small_fp32", unpack_q3h),
    "q3h_minima": make_linear("small_minima", unpack_q3h),
    "int8": make_linear("int8"),
    "int8_fp32": make_linear("int8_fp32"),
    "int8_minima": make_linear("int8_minima"),
    "int8_steps": make_linear("int8_steps"),
    "int8_signed": make_linear("signed"),
    "int8_signed_fp32": make_linear("signed_fp32"),
    "int8_signed_minima": make_linear("signed_minima"),
    "int8_signed_steps": make_linear("signed_steps"),
    "table": make_linear("table"),
    "table_fp32": make_linear("table_fp32"),
    "table_steps": make_linear("table_steps"),
    "table_signed": make_linear("signed_table", unpack_table),
    "table_signed_fp32": make_linear("signed_table_fp32", unpack_table),
    "table_signed_steps": make_linear("signed_table_steps", unpack_table),
}
