"""Compute paged attention on the CPU, one kernel for each KV format; over pages of floats in this file.

While a page of keys is processed, the next one is prefetched; the last one prefetches the first values.
"""

from collections.abc import Callable
from functools import partial
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
from sgmv_kernels.cpu_simd.elementwise import scaled
from sgmv_kernels.cpu_simd.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.matmul import Intrinsic, interleave, make_beside, make_mul, make_paged_mul
from sgmv_kernels.cpu_simd.memory_access import BF16, FP16, FP32, i32, itemsize
from sgmv_kernels.cpu_simd.vector_ir import LANES

MOST_ROWS = 12 if LANES == 16 else 6
"""Rows that are multiplied with two vectors at a time: 24 sums of 32 registers, or twelve of sixteen."""


def make_by_rows(most: int, product_of: Callable[[int], Intrinsic]) -> Any:
    """Return by_rows(rows, a, as_, matrix, c, cs, ahead, again, kind), which multiplies `rows` rows of a, as many at a
    time as a product takes.

    `product_of(n)` returns the product of n rows: (a, as_, *matrix, c, cs, ahead, kind). The first prefetches what is
    `ahead`, the others what is likely there already, from `again` on.
    """
    product_most, product_6, product_3, product_2, product_1 = (product_of(n) for n in (most, 6, 3, 2, 1))

    @kernel_part
    def by_rows(rows, a, as_, matrix, c, cs, ahead, again, kind):  # type: ignore[no-untyped-def]
        while rows > 0:
            if rows >= most:
                product_most(a, as_, *matrix, c, cs, ahead, kind)
                done = np.int64(most)
            elif rows >= 6:
                product_6(a, as_, *matrix, c, cs, ahead, kind)
                done = np.int64(6)
            elif rows >= 3:
                product_3(a, as_, *matrix, c, cs, ahead, kind)
                done = np.int64(3)
            elif rows == 2:
                product_2(a, as_, *matrix, c, cs, ahead, kind)
                done = np.int64(2)
            else:
                product_1(a, as_, *matrix, c, cs, ahead, kind)
                done = np.int64(1)
            a, c, ahead, rows = a + as_ * done, c + cs * done, again, rows - done

    return by_rows


_keys = make_by_rows(6, partial(make_mul, pairs=1, add=False, fetch=True))
_keys_beside = make_by_rows(MOST_ROWS, make_beside)
_values = make_by_rows(MOST_ROWS, make_paged_mul)


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
        """Compute scores[i, j] = query i . key j for whole pages; other keys than `first` to `stop` are masked later.

        A page prefetches the next one, the last one the first values.
        """
        page, dim, stride = args[PAGE], args[DIM], 4 * args[BLOCK]
        bytes_, line = 4 * dim, page * itemsize(kind)
        token = first // page * page
        while token < stop:
            # Two pages at a time, where one is a vector.
            beside = page == LANES and token + page < stop
            end = token + 2 * page if beside else token + page
            keys, out = page_of(args, args[KEYS], sequence, head, token), scores + 4 * (token - at)
            ahead = page_of(
                args, args[KEYS] if end < stop else args[VALUES], sequence, head, end if end < stop else first
            )
            if beside:
                matrix = dim, keys, page_of(args, args[KEYS], sequence, head, token + page), line
                _keys_beside(rows, queries, bytes_, matrix, out, stride, ahead, keys, kind)
            else:
                _keys(rows, queries, bytes_, (dim, keys, line, page), out, stride, ahead, keys, kind)
            token = end

    @kernel_part
    def collect(args, weights, units, sums, sequence, head, rows, at, first, stop):  # type: ignore[no-untyped-def]
        """Add weight[i, j] * value j to sums[i]; a page prefetches the next one, the last one the next keys."""
        page, dim = args[PAGE], args[DIM]
        line = dim * itemsize(kind)
        ids = args[TABLES] + 4 * (sequence * args[TABLE_WIDTH] + first // page)
        values = args[VALUES] + head * page * line
        ahead = page_of(args, args[KEYS], sequence, head, stop)
        matrix = ids, first % page, stop - first, values, page, args[PAGE_BYTES], line, dim
        _values(rows, weights + 4 * (first - at), 4 * args[BLOCK], matrix, sums, 4 * dim, ahead, values, kind)

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
