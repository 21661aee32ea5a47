"""Compute the pointwise ops on the CPU: the Numba kernels that run one thread's rows of `cpu_ops.pointwise`."""

from typing import Any

import numpy as np
from numba import carray

from sgmv_kernels.cpu_ops.pointwise import (
    FLOAT,
    HALF,
    HEADS,
    KEYS,
    KV_HEADS,
    NUM_ARGS,
    OUT,
    PAGE,
    PAGE_BYTES,
    PAGES,
    ROWS,
    SLOTS,
    VALUES,
    WIDTH,
    A,
    B,
    C,
)
from sgmv_kernels.cpu_runtime.launch import NUM_ROWS
from sgmv_kernels.cpu_simd.elementwise import (
    BF16,
    FP16,
    FP32,
    add_square_sum,
    capped,
    f32,
    gelu_times,
    i64,
    itemsize,
    put_f32,
    put_kind,
    rotated,
    scaled,
    silu_times,
    take_next,
    weighted,
)
from sgmv_kernels.cpu_simd.kernel_parts import kernel_part


def norm(raw: Any) -> None:
    _norm_rows(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64))


def silu(raw: Any) -> None:
    _silu_rows(carray(raw, (NUM_ARGS,), np.int64))


def take(raw: Any) -> None:
    _take_rows(carray(raw, (NUM_ARGS,), np.int64))


def gelu(raw: Any) -> None:
    _gelu_rows(carray(raw, (NUM_ARGS,), np.int64))


def heads(raw: Any) -> None:
    _head_rows(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64))


def cap(raw: Any) -> None:
    _cap_rows(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64))


def rope_bf16(raw: Any) -> None:
    _rope_rows(carray(raw, (NUM_ARGS,), np.int64), BF16)


def rope_fp16(raw: Any) -> None:
    _rope_rows(carray(raw, (NUM_ARGS,), np.int64), FP16)


def rope_fp32(raw: Any) -> None:
    _rope_rows(carray(raw, (NUM_ARGS,), np.int64), FP32)


@kernel_part
def _norm_rows(args, floats):  # type: ignore[no-untyped-def]
    width, eps = args[WIDTH], np.float32(floats[FLOAT])
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            skip = 4 * width * row
            x, delta = args[A] + skip, args[B] + skip if args[B] else np.int64(0)
            mean = add_square_sum(x, delta, width) / np.float32(width)
            weighted(x, args[C], width, np.float32(1) / np.sqrt(mean + eps), args[OUT] + skip)


@kernel_part
def _silu_rows(args):  # type: ignore[no-untyped-def]
    width = args[WIDTH]
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            gate = args[A] + 8 * width * row
            silu_times(gate, gate + 4 * width, width, args[OUT] + 4 * width * row)


@kernel_part
def _gelu_rows(args):  # type: ignore[no-untyped-def]
    width = args[WIDTH]
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            gate = args[A] + 8 * width * row
            gelu_times(gate, gate + 4 * width, width, args[OUT] + 4 * width * row)


@kernel_part
def _head_rows(args, floats):  # type: ignore[no-untyped-def]
    dim, heads, kv_heads, eps = args[WIDTH], args[HEADS], args[KV_HEADS], np.float32(floats[FLOAT])
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            for h in range(heads + kv_heads):
                x = args[A] + 4 * dim * (row * (heads + 2 * kv_heads) + h)
                mean = add_square_sum(x, np.int64(0), dim) / np.float32(dim)
                weighted(x, args[B] if h < heads else args[C], dim, np.float32(1) / np.sqrt(mean + eps), x)


@kernel_part
def _cap_rows(args, floats):  # type: ignore[no-untyped-def]
    width, limit = args[WIDTH], np.float32(floats[FLOAT])
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
def _rope_rows(args, kind):  # type: ignore[no-untyped-def]
    heads, kv_heads, dim = args[HEADS], args[KV_HEADS], args[WIDTH]
    half, page, head_bytes = args[HALF], args[PAGE], 4 * dim
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            x = args[A] + row * (heads + 2 * kv_heads) * head_bytes
            cos, sin = args[B] + row * half * 4, args[C] + row * half * 4
            for h in range(heads):
                out = args[OUT] + (row * heads + h) * head_bytes
                rotated(x + h * head_bytes, cos, sin, half, out)
                for d in range(2 * half, dim):
                    put_f32(out, d, f32(x + h * head_bytes, d))
            base, slot = i64(args[PAGES], row) * args[PAGE_BYTES], i64(args[SLOTS], row)
            for h in range(kv_heads):
                key, value = x + (heads + h) * head_bytes, x + (heads + kv_heads + h) * head_bytes
                skip = base + h * dim * page * itemsize(kind)
                rotated(key, cos, sin, half, key)
                for d in range(dim):
                    put_kind(args[KEYS] + skip, d * page + slot, f32(key, d), kind)
                    put_kind(args[VALUES] + skip, slot * dim + d, f32(value, d), kind)
