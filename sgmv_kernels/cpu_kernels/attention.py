"""Compute paged attention on the CPU, one kernel for each KV format; over pages of floats in this file.

While a page of keys is processed, the next one is prefetched; the last one prefetches the first values.
"""

from typing import Any

import numpy as np
from numba import carray

from sgmv_kernels.cpu_kernels.attention_codes import INT8_STEPS, K8V4_STEPS
from sgmv_kernels.cpu_kernels.attention_loop import Steps, make_attention
from sgmv_kernels.cpu_ops.attention import (
    BLOCK,
    DIM,
    HEADS,
    KEYS,
    NUM_ARGS,
    OUT,
    PAGE,
    PAGE_BYTES,
    TABLE_WIDTH,
    TABLES,
    VALUES,
)
from sgmv_kernels.cpu_simd.elementwise import BF16, FP16, FP32, i32, itemsize, scaled
from sgmv_kernels.cpu_simd.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.matmul import interleave, make_beside, make_mul
from sgmv_kernels.cpu_simd.vector_ir import LANES

MOST_BESIDE = 12 if LANES == 16 else 6
"""Rows that are multiplied with two vectors of keys at a time: 24 sums of 32 registers, or twelve of sixteen."""
_keys_1, _keys_2, _keys_3, _keys_6 = (make_mul(n, 1, add=False, fetch=True) for n in (1, 2, 3, 6))
_beside_1, _beside_3, _beside_6 = (make_beside(n) for n in (1, 3, 6))
_beside_most = _beside_6 if MOST_BESIDE == 6 else make_beside(MOST_BESIDE)
_values_1, _values_2, _values_3, _values_6 = (
    make_mul(n, 1, add=True, fetch=True, deinterleaved=True) for n in (1, 2, 3, 6)
)


def make_float_steps(kind: Any) -> Steps:
    """Return the steps over pages of floats of a kind."""

    @kernel_part
    def width(args):  # type: ignore[no-untyped-def]
        return args[DIM]

    @kernel_part
    def prepare(args, source, scale, units, room, queries):  # type: ignore[no-untyped-def]
        scaled(source, args[DIM], scale, queries)

    @kernel_part
    def finish(args, sums, factor, row, head):  # type: ignore[no-untyped-def]
        interleave(sums, args[DIM], factor, args[OUT] + 4 * args[DIM] * (row * args[HEADS] + head), kind)

    @kernel_part
    def page_of(args, base, sequence, head, token):  # type: ignore[no-untyped-def]
        """Return the address of the keys or values of one head in the page of a token."""
        index = i32(args[TABLES], sequence * args[TABLE_WIDTH] + min(token // args[PAGE], args[TABLE_WIDTH] - 1))
        return base + index * args[PAGE_BYTES] + head * args[DIM] * args[PAGE] * itemsize(kind)

    @kernel_part
    def score(args, queries, units, scores, sequence, head, rows, at, first, stop):  # type: ignore[no-untyped-def]
        """Compute scores[i, j] = query i . key j; a page prefetches the next one, the last one the first values."""
        page, dim, stride = args[PAGE], args[DIM], 4 * args[BLOCK]
        token = first // page * page
        # Two pages at a time, where one is a vector.
        while page == LANES and token + 2 * page <= stop:
            keys = page_of(args, args[KEYS], sequence, head, token)
            other = page_of(args, args[KEYS], sequence, head, token + page)
            ahead = (
                page_of(args, args[KEYS], sequence, head, token + 2 * page)
                if token + 2 * page < stop
                else page_of(args, args[VALUES], sequence, head, first)
            )
            out, width, i = scores + 4 * (token - at), page * itemsize(kind), np.int64(0)
            while i < rows:
                a, c, left = queries + 4 * dim * i, out + stride * i, rows - i
                if left >= MOST_BESIDE:
                    _beside_most(a, 4 * dim, dim, keys, other, width, c, stride, ahead, kind)
                    i += MOST_BESIDE
                elif left >= 6:
                    _beside_6(a, 4 * dim, dim, keys, other, width, c, stride, ahead, kind)
                    i += 6
                elif left >= 3:
                    _beside_3(a, 4 * dim, dim, keys, other, width, c, stride, ahead, kind)
                    i += 3
                else:
                    _beside_1(a, 4 * dim, dim, keys, other, width, c, stride, ahead, kind)
                    i += 1
                ahead = keys
            token += 2 * page
        while token < stop:
            n = min(page, stop - token)
            keys = page_of(args, args[KEYS], sequence, head, token)
            ahead = (
                page_of(args, args[KEYS], sequence, head, token + page)
                if token + page < stop
                else page_of(args, args[VALUES], sequence, head, first)
            )
            out, width = scores + 4 * (token - at), page * itemsize(kind)
            i = np.int64(0)
            while i < rows:
                a, c, left = queries + 4 * dim * i, out + stride * i, rows - i
                if left >= 6:
                    _keys_6(a, 4 * dim, dim, keys, width, n, c, stride, ahead, kind)
                    i += 6
                elif left >= 3:
                    _keys_3(a, 4 * dim, dim, keys, width, n, c, stride, ahead, kind)
                    i += 3
                elif left == 2:
                    _keys_2(a, 4 * dim, dim, keys, width, n, c, stride, ahead, kind)
                    i += 2
                else:
                    _keys_1(a, 4 * dim, dim, keys, width, n, c, stride, ahead, kind)
                    i += 1
                ahead = keys
            token += n

    @kernel_part
    def collect(args, weights, units, sums, sequence, head, rows, at, first, stop):  # type: ignore[no-untyped-def]
        """Add weight[i, j] * value j to sums[i]; a page prefetches the next one, the last one the next keys."""
        page, dim, stride, width = args[PAGE], args[DIM], 4 * args[BLOCK], args[DIM] * itemsize(kind)
        token = first
        while token < stop:
            inside = token % page
            n = min(page - inside, stop - token)
            values = page_of(args, args[VALUES], sequence, head, token) + inside * width
            ahead = page_of(args, args[VALUES] if token + n < stop else args[KEYS], sequence, head, token + n)
            out = weights + 4 * (token - at)
            i = np.int64(0)
            while i < rows:
                a, c, left = out + stride * i, sums + 4 * dim * i, rows - i
                if left >= 6:
                    _values_6(a, stride, n, values, width, dim, c, 4 * dim, ahead, kind)
                    i += 6
                elif left >= 3:
                    _values_3(a, stride, n, values, width, dim, c, 4 * dim, ahead, kind)
                    i += 3
                elif left == 2:
                    _values_2(a, stride, n, values, width, dim, c, 4 * dim, ahead, kind)
                    i += 2
                else:
                    _values_1(a, stride, n, values, width, dim, c, 4 * dim, ahead, kind)
                    i += 1
                ahead = values
            token += n

    return Steps(width, width, prepare, score, collect, finish)


STEPS = (*(make_float_steps(kind) for kind in (BF16, FP16, FP32)), INT8_STEPS, K8V4_STEPS)
"""Of the formats of the entries below, in their order."""
_bf16, _fp16, _fp32, _int8, _k8v4 = map(make_attention, STEPS)


def bf16(raw: Any) -> None:
    _bf16(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64))


def fp16(raw: Any) -> None:
    _fp16(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64))


def fp32(raw: Any) -> None:
    _fp32(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64))


def int8(raw: Any) -> None:
    _int8(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64))


def k8v4(raw: Any) -> None:
    _k8v4(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64))
