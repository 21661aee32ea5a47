"""Compute the pointwise ops on the CPU: the Numba kernels that run one thread's rows of `cpu_ops.pointwise`."""

import math
from typing import Any

import numpy as np

from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_arguments.pointwise import (
    CODES,
    COLUMNS,
    FLOAT,
    HALF,
    HEADS,
    KEY_SCALES,
    KEY_WIDTH,
    KEYS,
    KV_HEADS,
    OUT,
    PAGE,
    PAGE_BYTES,
    PAGES,
    ROW_BYTES,
    ROWS,
    SLOTS,
    UNIT_BYTES,
    UNITS,
    VALUE_MINIMA,
    VALUE_SCALES,
    VALUES,
    WIDTH,
    A,
    B,
    C,
)
from sgmv_kernels.cpu_kernels.rotation import code_dim, pair_dim, rotate
from sgmv_kernels.cpu_kernels.rounding import place_of, round_blocks
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.elementwise import (
    add_square_sum,
    capped,
    centered,
    fill,
    gelu_of,
    gelu_times,
    keep_below,
    rotated,
    row_max,
    row_sum,
    scaled,
    silu_times,
    weighted,
)
from sgmv_kernels.cpu_simd.kv_codes import (
    bf16_of,
    largest,
    put_key_codes,
    put_pair,
    put_pairs,
    put_value_codes,
    row_min,
)
from sgmv_kernels.cpu_simd.memory_access import (
    BF16,
    FP16,
    FP32,
    f32,
    f64,
    i64,
    itemsize,
    put_column,
    put_f32,
    put_kind,
    put_row,
    take_next,
)
from sgmv_kernels.formats.kv_format import LEAST, LEVELS, MOST, NIBBLE_LEVELS
from sgmv_kernels.formats.weight_codes import CODE_BLOCK, ROUND_ROWS


@kernel_part
def _round(args, first, start, end):  # type: ignore[no-untyped-def]
    """Round columns `start` to `end` of `ROUND_ROWS` rows of the result, where that is asked for."""
    if args[CODES]:
        row_bytes, rows = 4 * args[WIDTH], args[NUM_ROWS] - first
        codes = place_of(args[CODES], first, args[ROW_BYTES], CODE_BLOCK)
        units = place_of(args[UNITS], first, args[UNIT_BYTES], 4)
        x = args[OUT] + first * row_bytes
        round_blocks(x, row_bytes, rows, np.int64(0), codes, units, start // CODE_BLOCK, end // CODE_BLOCK)


@kernel_part
def _add_rows(args):  # type: ignore[no-untyped-def]
    width = args[WIDTH]
    while True:
        first = take_next(args.ctypes.data) * ROUND_ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROUND_ROWS, args[NUM_ROWS])):
            add_square_sum(args[A] + 4 * width * row, args[B] + 4 * width * row, width)
        _round(args, first, np.int64(0), width)


@kernel_part
def _norm_rows(args):  # type: ignore[no-untyped-def]
    width, eps = args[WIDTH], np.float32(f64(args.ctypes.data, FLOAT))
    while True:
        first = take_next(args.ctypes.data) * ROUND_ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROUND_ROWS, args[NUM_ROWS])):
            skip = 4 * width * row
            x, delta = args[A] + skip, args[B] + skip if args[B] else np.int64(0)
            mean = add_square_sum(x, delta, width) / np.float32(width)
            weighted(x, args[C], width, np.float32(1) / np.sqrt(mean + eps), args[OUT] + skip)
        _round(args, first, np.int64(0), width)


@kernel_part
def _layer_norm_rows(args):  # type: ignore[no-untyped-def]
    width, eps = args[WIDTH], np.float32(f64(args.ctypes.data, FLOAT))
    while True:
        first = take_next(args.ctypes.data) * ROUND_ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROUND_ROWS, args[NUM_ROWS])):
            skip = 4 * width * row
            x, out = args[A] + skip, args[OUT] + skip
            if args[B]:
                add_square_sum(x, args[B] + skip, width)
            mean = row_sum(x, width) / np.float32(width)
            square = centered(x, mean, width, out) / np.float32(width)
            weighted(out, args[C], width, np.float32(1) / np.sqrt(square + eps), out)
        _round(args, first, np.int64(0), width)


def make_gate(compute: Any) -> Any:
    """Return the kernel of an activation, of which `compute(args, row, start, n, out)` does n columns of a row."""

    @kernel_part
    def gate_rows(args):  # type: ignore[no-untyped-def]
        """Take tasks until none is left: `COLUMNS` columns of `ROUND_ROWS` rows."""
        width = args[WIDTH]
        parts = (width + COLUMNS - 1) // COLUMNS
        while True:
            task = take_next(args.ctypes.data)
            first, start = task // parts * ROUND_ROWS, task % parts * COLUMNS
            if first >= args[NUM_ROWS]:
                return
            end = min(start + COLUMNS, width)
            for row in range(first, min(first + ROUND_ROWS, args[NUM_ROWS])):
                compute(args, row, start, end - start, args[OUT] + 4 * (width * row + start))
            _round(args, first, start, end)

    return gate_rows


@kernel_part
def _silu(args, row, start, n, out):  # type: ignore[no-untyped-def]
    gate = args[A] + 4 * (2 * args[WIDTH] * row + start)
    silu_times(gate, gate + 4 * args[WIDTH], n, out)


@kernel_part
def _gelu(args, row, start, n, out):  # type: ignore[no-untyped-def]
    gate = args[A] + 4 * (2 * args[WIDTH] * row + start)
    gelu_times(gate, gate + 4 * args[WIDTH], n, out)


@kernel_part
def _gelu_exact(args, row, start, n, out):  # type: ignore[no-untyped-def]
    gelu_of(args[A] + 4 * (args[WIDTH] * row + start), n, out)


_silu_rows, _gelu_rows, _gelu_exact_rows = map(make_gate, (_silu, _gelu, _gelu_exact))


@kernel_part
def _head_rows(args):  # type: ignore[no-untyped-def]
    q_dim, k_dim, heads, eps = args[WIDTH], args[KEY_WIDTH], args[HEADS], np.float32(f64(args.ctypes.data, FLOAT))
    width = heads * q_dim + 2 * args[KV_HEADS] * k_dim
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            x = args[A] + 4 * width * row
            for h in range(heads + args[KV_HEADS]):
                dim = q_dim if h < heads else k_dim
                mean = add_square_sum(x, np.int64(0), dim) / np.float32(dim)
                weighted(x, args[B] if h < heads else args[C], dim, np.float32(1) / np.sqrt(mean + eps), x)
                x += 4 * dim


@kernel_part
def _cap_rows(args):  # type: ignore[no-untyped-def]
    width, limit = args[WIDTH], np.float32(f64(args.ctypes.data, FLOAT))
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            capped(args[A] + 4 * width * row, width, limit)


@kernel_part
def _take_rows(args):  # type: ignore[no-untyped-def]
    width = args[WIDTH]
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            scaled(args[A] + 4 * width * i64(args[B], row), width, np.float32(1), args[OUT] + 4 * width * row)


@kernel_part
def _page_start(args, row):  # type: ignore[no-untyped-def]
    """Return the first row from `row` on that is stored in another page than the one before it: two threads that wrote
    to one page would take its cache lines from each other.
    """
    while 0 < row < args[NUM_ROWS] and i64(args[PAGES], row) == i64(args[PAGES], row - 1):
        row += 1
    return min(row, args[NUM_ROWS])


def make_rope(store: Any, limit: float = math.inf) -> Any:
    """Return the kernel that rotates queries and keys and stores keys and values by `store(args, page, slot, head, key,
    value)`, which may change what lies at `key` and `value`.

    Numbers of `limit` and more would be infinite in their page: see `kv_format.held`.
    """

    @kernel_part
    def rope_rows(args):  # type: ignore[no-untyped-def]
        heads, kv_heads, dim = args[HEADS], args[KV_HEADS], args[WIDTH]
        half, head_bytes = args[HALF], 4 * dim
        while True:
            first = take_next(args.ctypes.data) * ROWS
            if first >= args[NUM_ROWS]:
                return
            for row in range(_page_start(args, first), _page_start(args, first + ROWS)):
                x = args[A] + row * (heads + 2 * kv_heads) * head_bytes
                cos, sin = args[B] + row * half * 4, args[C] + row * half * 4
                for h in range(heads):
                    out = args[OUT] + (row * heads + h) * head_bytes
                    rotated(x + h * head_bytes, cos, sin, half, out)
                    scaled(x + h * head_bytes + 8 * half, dim - 2 * half, np.float32(1), out + 8 * half)
                page, slot = i64(args[PAGES], row) * args[PAGE_BYTES], i64(args[SLOTS], row)
                for h in range(kv_heads):
                    key, value = x + (heads + h) * head_bytes, x + (heads + kv_heads + h) * head_bytes
                    rotated(key, cos, sin, half, key)
                    if keep_below(value, dim, np.float32(limit)) + keep_below(key, dim, np.float32(limit)) != 0:
                        fill(key, dim, np.float32(np.nan))
                    store(args, page, slot, h, key, value)

    return rope_rows


def make_store(kind: Any) -> Any:
    """Return how a token is stored as floats of a kind."""

    @kernel_part
    def store(args, page, slot, head, key, value):  # type: ignore[no-untyped-def]
        dim, tokens = args[WIDTH], args[PAGE]
        skip, size = page + head * dim * tokens * itemsize(kind), itemsize(kind)
        put_column(key, dim, args[KEYS] + skip + slot * size, tokens * size, kind)
        put_row(value, dim, args[VALUES] + skip + slot * dim * size, kind)

    return store


@kernel_part
def _put_scale(x, dim, scale):  # type: ignore[no-untyped-def]
    """Store the scale of a head of codes, and return the factor that makes them; see `kv_format.round_symmetric`."""
    size = largest(x, dim)
    put_f32(scale, 0, np.float32(0) if size <= np.float32(LEAST) else size * np.float32(1 / LEVELS))
    return np.float32(LEVELS) / size if size > np.float32(LEAST) else np.float32(0)


@kernel_part
def _put_key(args, page, slot, head, key):  # type: ignore[no-untyped-def]
    """Store a key as codes; see `kv_format.CodesKV`."""
    dim, tokens = args[WIDTH], args[PAGE]
    codes = args[KEYS] + page + head * code_dim(dim) * tokens + 4 * slot
    rotate(key, dim, dim)
    put_key_codes(
        key, dim, _put_scale(key, dim, args[KEY_SCALES] + page + 4 * (head * tokens + slot)), codes, 4 * tokens
    )


@kernel_part
def _store_int8(args, page, slot, head, key, value):  # type: ignore[no-untyped-def]
    """Store a token as codes; see `kv_format.Int8KV`."""
    dim, tokens, width = args[WIDTH], args[PAGE], code_dim(args[WIDTH])
    _put_key(args, page, slot, head, key)
    codes = args[VALUES] + page + head * width * tokens + slot // 4 * 4 * width + slot % 4
    factor = _put_scale(value, dim, args[VALUE_SCALES] + page + 4 * (head * tokens + slot))
    put_value_codes(value, dim, factor, codes)


@kernel_part
def _store_k8v4(args, page, slot, head, key, value):  # type: ignore[no-untyped-def]
    """Store a token as codes; see `kv_format.K8V4` and `kv_format.round_range`."""
    dim, tokens, pairs = args[WIDTH], args[PAGE], pair_dim(args[WIDTH])
    _put_key(args, page, slot, head, key)
    rotate(value, dim, dim)
    least = bf16_of(row_min(value, dim))
    unit = bf16_of((row_max(value, dim) - least) * np.float32(1 / NIBBLE_LEVELS))
    unit = unit if unit > np.float32(LEAST) else np.float32(0)
    factor, size = np.float32(1) / unit if unit > 0 else np.float32(0), largest(value, dim)
    ranges = page + 2 * (head * tokens + slot)
    put_kind(args[VALUE_SCALES] + ranges, 0, unit if size == size else size, BF16)
    put_kind(args[VALUE_MINIMA] + ranges, 0, least, BF16)
    codes = args[VALUES] + page + head * pairs * tokens + slot // 4 * 4 * pairs + slot % 4
    for d in range(put_pairs(value, dim - pairs, pairs, least, factor, codes), pairs):
        first = f32(value, d) if d < dim else least
        put_pair(first, f32(value, d + pairs) if d + pairs < dim else least, least, factor, codes + 4 * d)


KERNELS = {
    "add": _add_rows,
    "norm": _norm_rows,
    "layer_norm": _layer_norm_rows,
    "silu": _silu_rows,
    "take": _take_rows,
    "gelu": _gelu_rows,
    "gelu_exact": _gelu_exact_rows,
    "heads": _head_rows,
    "cap": _cap_rows,
    "rope_bf16": make_rope(make_store(BF16), float.fromhex("0x1.ffp127")),
    "rope_fp16": make_rope(make_store(FP16), 65520.0),
    "rope_fp32": make_rope(make_store(FP32)),
    "rope_int8": make_rope(_store_int8, MOST),
    "rope_k8v4": make_rope(_store_k8v4, MOST),
}
