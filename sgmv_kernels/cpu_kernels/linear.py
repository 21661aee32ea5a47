"""Compute quantized linears on the CPU: the Numba kernels that run one thread's tasks of `cpu_ops.linear`."""

from typing import Any

import numpy as np
from numba import carray, njit

from sgmv_kernels.cpu_ops.linear import (
    BIAS,
    CODE_BYTES,
    CODE_STRIDE,
    CODES,
    DATA,
    GROUP,
    GROUPS,
    LINES,
    NUM_ARGS,
    OUT,
    ROUND_ROWS,
    SCRATCH,
    SCRATCH_BYTES,
    TASK_TILES,
    TILES,
    UNIT_STRIDE,
    UNITS,
    WIDTH,
    X,
    Y,
)
from sgmv_kernels.cpu_runtime.launch import NUM_ROWS
from sgmv_kernels.cpu_simd.elementwise import f32, put_f32, take_next
from sgmv_kernels.cpu_simd.quant_ir import VECTORS
from sgmv_kernels.cpu_simd.quant_matmul import (
    FACTORS,
    LINE,
    begin_tile,
    make_product,
    put_factors,
    round_block,
    unpack_nibbles,
    unpack_sevens,
    unpack_signed,
    widen_signed,
)
from sgmv_kernels.formats.adapter_panels import CHUNK, CODE_BLOCK, TILE

ROWS = 3 if VECTORS == 2 else 8
"""Rows whose sums are kept in registers at a time: sixteen registers take 3 * 2 whole sums and as many of fp32."""
_BLOCK_BYTES = CODE_BLOCK * TILE
"""Codes of a block, unpacked to bytes."""


def round8(raw: Any) -> None:
    _round_rows(carray(raw, (NUM_ARGS,), np.int64), np.int64(1))


def round16(raw: Any) -> None:
    _round_rows(carray(raw, (NUM_ARGS,), np.int64), np.int16(2))


@njit
def _round_rows(args, size):  # type: ignore[no-untyped-def]
    blocks = args[WIDTH] // CODE_BLOCK
    while True:
        first = take_next(args.ctypes.data) * ROUND_ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROUND_ROWS, args[NUM_ROWS])):
            x, codes = args[X] + row * 4 * args[WIDTH], args[CODES] + row * args[CODE_STRIDE]
            units = args[UNITS] + row * args[UNIT_STRIDE]
            for i in range(blocks):
                round_block(x + i * 4 * CODE_BLOCK, codes + i * size * CODE_BLOCK, units + 8 * i, size)


@njit
def unpack_int4(source, group, out):  # type: ignore[no-untyped-def]
    unpack_nibbles(source, group // 8, out)


@njit
def unpack_q3h(source, group, out):  # type: ignore[no-untyped-def]
    for i in range(group // 64):
        unpack_sevens(source + i * 7 * LINE, out + i * 16 * LINE)


@njit
def unpack_int8(source, group, out):  # type: ignore[no-untyped-def]
    unpack_signed(source, group // 4, out)


@njit
def widen_int8(source, group, out):  # type: ignore[no-untyped-def]
    widen_signed(source, group // 4, out)


def make_linear(unpack: Any, kind: str, signed: bool) -> Any:
    """Return the kernel of one format; `kind` as in `make_product`."""
    size = 2 if kind == "words" else 1
    product, product_2, product_1 = (make_product(n, kind) for n in (ROWS, 2, 1))

    @njit
    def unpack_chunk(args, tile, first, last, codes, factors):  # type: ignore[no-untyped-def]
        """Unpack the codes and factors of a tile's groups into scratch memory."""
        group, stored = args[GROUP], args[CODE_BYTES]
        group_bytes = stored + 2 * TILE + (0 if signed else 2 * TILE)
        blocks = group // CODE_BLOCK
        for g in range(first, last):
            source = args[DATA] + (tile * args[GROUPS] + g) * group_bytes
            minima = np.int64(0) if signed else source + stored + 2 * TILE
            at = (g - first) * blocks
            unpack(source, group, codes + at * _BLOCK_BYTES * size)
            put_factors(source + stored, minima, factors + at * FACTORS, blocks)

    @njit
    def multiply(args, first, last, codes, factors, y, y_bytes):  # type: ignore[no-untyped-def]
        """Multiply all rows with the unpacked groups and add to y."""
        blocks, begin = (last - first) * args[GROUP] // CODE_BLOCK, first * args[GROUP] // CODE_BLOCK
        x_bytes, unit_bytes = args[CODE_STRIDE], args[UNIT_STRIDE]
        x, units = args[CODES] + begin * CODE_BLOCK * size, args[UNITS] + begin * 8
        row, rows = np.int64(0), args[NUM_ROWS]
        while row + ROWS <= rows and row + ROWS + 1 != rows:
            xr, ur, yr = x + row * x_bytes, units + row * unit_bytes, y + row * y_bytes
            product(xr, x_bytes, ur, unit_bytes, codes, factors, blocks, args[LINES], yr, y_bytes)
            row += ROWS
        while row + 2 <= rows:
            xr, ur, yr = x + row * x_bytes, units + row * unit_bytes, y + row * y_bytes
            product_2(xr, x_bytes, ur, unit_bytes, codes, factors, blocks, args[LINES], yr, y_bytes)
            row += 2
        while row < rows:
            xr, ur, yr = x + row * x_bytes, units + row * unit_bytes, y + row * y_bytes
            product_1(xr, x_bytes, ur, unit_bytes, codes, factors, blocks, args[LINES], yr, y_bytes)
            row += 1

    @njit
    def work(args):  # type: ignore[no-untyped-def]
        """Take tasks until none is left."""
        if args[NUM_ROWS] == 0:
            return
        scratch = args[SCRATCH] + take_next(args.ctypes.data + 8) * args[SCRATCH_BYTES]
        factors = scratch + TILE * CHUNK * 2
        edge = factors + FACTORS * (CHUNK // CODE_BLOCK)
        step = max(1, CHUNK // args[GROUP])
        while True:
            begin = take_next(args.ctypes.data) * args[TASK_TILES]
            if begin >= args[TILES]:
                return
            for tile in range(begin, min(begin + args[TASK_TILES], args[TILES])):
                whole = TILE * (tile + 1) <= args[OUT]
                y, y_bytes = (args[Y] + 4 * TILE * tile, 4 * args[OUT]) if whole else (edge, np.int64(4 * TILE))
                for row in range(args[NUM_ROWS]):
                    begin_tile(args[BIAS] + 4 * TILE * tile if args[BIAS] else np.int64(0), y + row * y_bytes)
                for first in range(0, args[GROUPS], step):
                    last = min(first + step, args[GROUPS])
                    unpack_chunk(args, tile, first, last, scratch, factors)
                    multiply(args, first, last, scratch, factors, y, y_bytes)
                if not whole:
                    for row in range(args[NUM_ROWS]):
                        for i in range(TILE * tile, args[OUT]):
                            put_f32(args[Y] + row * 4 * args[OUT], i, f32(edge + row * y_bytes, i - TILE * tile))

    return work


_int4, _q3h = make_linear(unpack_int4, "small", False), make_linear(unpack_q3h, "small", False)
_int8, _int8_words = make_linear(unpack_int8, "bytes", True), make_linear(widen_int8, "words", True)


def int4(raw: Any) -> None:
    _int4(carray(raw, (NUM_ARGS,), np.int64))


def q3h(raw: Any) -> None:
    _q3h(carray(raw, (NUM_ARGS,), np.int64))


def int8(raw: Any) -> None:
    _int8(carray(raw, (NUM_ARGS,), np.int64))


def int8_words(raw: Any) -> None:
    _int8_words(carray(raw, (NUM_ARGS,), np.int64))
