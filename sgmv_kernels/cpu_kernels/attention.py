"""Paged attention on the CPU: one kernel for each KV format, and the steps over pages of floats."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sgmv_kernels.cpu_arguments.attention import (
    BLOCK,
    DIM,
    HEADS,
    KEYS,
    OUT,
    PAGE,
    PAGE_BYTES,
    VALUES,
)
from sgmv_kernels.cpu_kernels.attention_codes import INT8_STEPS, K8V4_STEPS
from sgmv_kernels.cpu_kernels.attention_loop import Steps, address_ahead, ahead_of, make_attention, pages_from
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.elementwise import scaled
from sgmv_kernels.cpu_simd.matmul import Intrinsic, interleave, make_beside, make_mul, make_paged_mul
from sgmv_kernels.cpu_simd.memory_access import BF16, FP16, FP32, i32, itemsize
from sgmv_kernels.cpu_simd.vector_ir import LANES

MOST_ROWS = 12 if LANES == 16 else 6
"""Rows that are multiplied by two vectors at a time: 24 sums in 32 registers, or twelve in sixteen."""
IS_PAGE_A_VECTOR = LANES == 16
"""Whether the keys of a page of 16 tokens can be one vector; otherwise they are multiplied two vectors at a time."""


def make_by_rows(most: int, product_of: Callable[[int], Intrinsic]) -> Any:
    """Return by_rows(rows, a, as_, matrix, c, cs, ahead, again, kind), which multiplies `rows` rows of a, as many at a
    time as a product takes.

    `product_of(n)` returns the product of n rows: (a, as_, *matrix, c, cs, ahead, kind). The first product prefetches
    `ahead`; the others prefetch `again`, which is probably in the cache already.
    """
    has_most = most > 6  # Numba compiles no branch on a constant that is false.
    product_most, product_6, product_3, product_2, product_1 = (product_of(n) for n in (most, 6, 3, 2, 1))

    @kernel_part
    def by_rows(rows, a, as_, matrix, c, cs, ahead, again, kind):  # type: ignore[no-untyped-def]
        while rows > 0:
            if has_most and rows >= most:
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
    def keys_of(args, head, ids, index):  # type: ignore[no-untyped-def]
        """Return the address of the keys of one head in a page of a table."""
        return args[KEYS] + i32(ids, index) * args[PAGE_BYTES] + head * args[DIM] * args[PAGE] * itemsize(kind)

    @kernel_part
    def score(args, queries, units, scores, sequence, head, rows, at, first, stop, following):  # type: ignore[no-untyped-def]
        """Compute scores[i, j] = query i . key j for whole pages; the loop masks keys outside `first` to `stop`."""
        page, dim, stride = args[PAGE], args[DIM], 4 * args[BLOCK]
        bytes_, line = 4 * dim, page * itemsize(kind)
        token = first // page * page
        ids, count = pages_from(args, sequence, token)[0], (stop - token + page - 1) // page
        upcoming = ahead_of(following, args[KEYS], dim * line)
        j = np.int64(0)
        while j < count:
            keys, out = keys_of(args, head, ids, j), scores + 4 * (token - at + page * j)
            ahead = address_ahead(args, upcoming, j)
            # Two pages at a time, if a page is one vector.
            if IS_PAGE_A_VECTOR and page == LANES and j + 1 < count:
                other = keys_of(args, head, ids, j + 1)
                both = ahead, address_ahead(args, upcoming, j + 1)
                _keys_beside(rows, queries, bytes_, (dim, keys, other, line), out, stride, both, (keys, other), kind)
                j += 2
            else:
                _keys(rows, queries, bytes_, (dim, keys, line, page), out, stride, ahead, keys, kind)
                j += 1

    @kernel_part
    def collect(args, weights, units, sums, sequence, head, rows, at, first, stop, following):  # type: ignore[no-untyped-def]
        """Add weight[i, j] * value j to sums[i]."""
        page, dim, stride = args[PAGE], args[DIM], 4 * args[BLOCK]
        line = dim * itemsize(kind)
        ids, pages = pages_from(args, sequence, first)
        values = args[VALUES] + head * page * line
        matrix = ids, first % page, stop - first, values, page, args[PAGE_BYTES], line, dim
        ahead, again = ahead_of(following, args[VALUES], page * line), (ids, pages, values, ids, pages, values)
        _values(rows, weights + 4 * (first - at), stride, matrix, sums, 4 * dim, ahead, again, kind)

    return Steps(width, width, prepare, score, collect, finish)


STEPS = {
    "bf16": make_float_steps(BF16),
    "fp16": make_float_steps(FP16),
    "fp32": make_float_steps(FP32),
    "int8": INT8_STEPS,
    "k8v4": K8V4_STEPS,
}
"""Steps by KV format."""
KERNELS = {name: make_attention(steps) for name, steps in STEPS.items()}
