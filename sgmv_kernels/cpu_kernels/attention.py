"""Compute paged attention on the CPU: the Numba kernel that runs one thread's tasks of `cpu_ops.attention`.

While a page of keys is processed, the next one is prefetched; the last one prefetches the first values.
"""

from typing import Any

import numpy as np
from numba import carray

from sgmv_kernels.cpu_ops.attention import (
    BLOCK,
    DIM,
    HEADS,
    KEYS,
    KV_HEADS,
    LENS,
    NUM_ARGS,
    NUM_TASKS,
    OUT,
    PAGE,
    PAGE_BYTES,
    POSITIONS,
    ROWS,
    SCALE,
    SCRATCH,
    SCRATCH_BYTES,
    SOFTCAP,
    STARTS,
    TABLE_WIDTH,
    TABLES,
    TASK_INTS,
    TASKS,
    TREES,
    VALUES,
    WINDOW,
    WORDS,
    Q,
)
from sgmv_kernels.cpu_simd.elementwise import (
    BF16,
    FP16,
    FP32,
    capped,
    exp_of,
    exp_sum,
    f32,
    i32,
    i64,
    itemsize,
    put_f32,
    row_max,
    scaled,
    take_next,
)
from sgmv_kernels.cpu_simd.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.matmul import interleave, make_mul

_keys_1, _keys_2, _keys_3, _keys_6 = (make_mul(n, 1, add=False, fetch=True) for n in (1, 2, 3, 6))
_values_1, _values_2, _values_3, _values_6 = (
    make_mul(n, 1, add=True, fetch=True, deinterleaved=True) for n in (1, 2, 3, 6)
)


def bf16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64), BF16)


def fp16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64), FP16)


def fp32(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64), FP32)


@kernel_part
def _work(args, floats, kind):  # type: ignore[no-untyped-def]
    """Take tasks until none is left."""
    scale, softcap = np.float32(floats[SCALE]), np.float32(floats[SOFTCAP])
    scratch = args[SCRATCH] + take_next(args.ctypes.data + 8) * args[SCRATCH_BYTES]
    while True:
        task = take_next(args.ctypes.data)
        if task >= args[NUM_TASKS]:
            return
        at = args[TASKS] + task * (4 * TASK_INTS)
        for head in range(i32(at, 1), i32(at, 2)):
            _attend(args, scale, softcap, scratch, i32(at, 0), head, i32(at, 3), i32(at, 4), kind)


@kernel_part
def _attend(args, scale, softcap, scratch, sequence, head, begin, end, kind):  # type: ignore[no-untyped-def]
    """Compute query rows `begin` to `end` of a sequence for the query heads that share one key head."""
    dim, heads, block = args[DIM], args[HEADS], args[BLOCK]
    group = heads // args[KV_HEADS]
    rows = (end - begin) * group
    queries, sums = scratch, scratch + 4 * dim * args[ROWS]
    scores = sums + 4 * dim * args[ROWS]
    maxima = scores + 4 * block * args[ROWS]
    totals = maxima + 4 * args[ROWS]
    start, length = i32(args[STARTS], sequence), i32(args[LENS], sequence)
    offset = length - (i32(args[STARTS], sequence + 1) - start)
    for r in range(begin, end):
        source = args[Q] + 4 * dim * ((start + r) * heads + head * group)
        scaled(source, group * dim, scale, queries + 4 * dim * (r - begin) * group)
    for i in range(rows):
        put_f32(maxima, i, np.float32(-np.inf))
        put_f32(totals, i, np.float32(0))
    for i in range(rows * dim):
        put_f32(sums, i, np.float32(0))
    tree = i32(args[TREES], sequence) if args[TREES] else length
    first = max(0, min(offset + begin, tree) - args[WINDOW] + 1) if args[WINDOW] else np.int64(0)
    last = offset + end
    at = first // block * block
    while at < last:
        stop = min(at + block, last)
        _score(args, kind, queries, scores, sequence, head, rows, at, max(at, first), stop)
        for i in range(rows):
            row = start + begin + i // group
            _soften(
                args,
                scores + 4 * block * i,
                sums + 4 * dim * i,
                maxima + 4 * i,
                totals + 4 * i,
                row,
                row - start + offset,
                tree,
                at,
                stop,
                softcap,
            )
        _collect(args, kind, scores, sums, sequence, head, rows, at, max(at, first), stop)
        at = stop
    for r in range(begin, end):
        for g in range(group):
            i = (r - begin) * group + g
            total = f32(totals, i)
            factor = np.float32(1) / total if total > 0 else np.float32(0)
            interleave(
                sums + 4 * dim * i, dim, factor, args[OUT] + 4 * dim * ((start + r) * heads + head * group + g), kind
            )


@kernel_part
def _soften(args, scores, sums, maximum, total, row, slot, tree, at, stop, softcap):  # type: ignore[no-untyped-def]
    """Convert one row's scores to weights, and rescale its sums to the new maximum.

    Scores beyond the end of the block count as masked, so that the order of the sum does not depend on the block's end.
    The row's own key is in `slot`, the first of its draft tree in `tree`.
    """
    padded = min(args[BLOCK], (stop - at + 31) // 32 * 32)
    position = i32(args[POSITIONS], row) if slot >= tree else slot
    low = max(0, min(position - args[WINDOW] + 1, tree) - at) if args[WINDOW] else np.int64(0)
    high = min(stop - at, slot + 1 - at)
    for j in range(min(low, padded)):
        put_f32(scores, j, np.float32(-np.inf))
    for j in range(max(0, high), padded):
        put_f32(scores, j, np.float32(-np.inf))
    if high > low and softcap != 0:
        capped(scores + 4 * low, high - low, softcap)
    hidden = np.int64(0)
    if slot >= tree:
        outside = position - args[WINDOW] + 1 - tree if args[WINDOW] else np.int64(0)
        hidden = _hide_others(scores, i64(args[WORDS], row), tree - at, high, outside)
    if high - hidden <= low:
        for j in range(padded):
            put_f32(scores, j, np.float32(0))
        return
    before = f32(maximum, 0)
    now = max(before, row_max(scores, padded))
    if now == np.float32(-np.inf):
        # Every score is -inf, or NaN, which the maximum ignores and the following code propagates.
        now = np.float32(0)
    added = exp_sum(scores, padded, now)
    if now != before:
        factor = exp_of(before - now)
        scaled(sums, args[DIM], factor, sums)
        put_f32(total, 0, f32(total, 0) * factor)
        put_f32(maximum, 0, now)
    put_f32(total, 0, f32(total, 0) + added)


@kernel_part
def _hide_others(scores, word, tree, high, outside):  # type: ignore[no-untyped-def]
    """Mask the scores from `tree`, where the draft tree begins, to `high` that are no ancestors of a row in its window.

    Returns: how many were masked. The first `outside` ancestors are before the window.
    """
    hidden = np.int64(0)
    for bit in range(high - tree):
        is_ancestor = (word >> bit) & 1
        if tree + bit >= 0 and (outside > 0 or not is_ancestor):
            put_f32(scores, tree + bit, np.float32(-np.inf))
            hidden += 1
        outside -= is_ancestor
    return hidden


@kernel_part
def _page_of(args, base, sequence, head, token, kind):  # type: ignore[no-untyped-def]
    """Return the address of the keys or values of one head in the page of a token."""
    index = i32(args[TABLES], sequence * args[TABLE_WIDTH] + min(token // args[PAGE], args[TABLE_WIDTH] - 1))
    return base + index * args[PAGE_BYTES] + head * args[DIM] * args[PAGE] * itemsize(kind)


@kernel_part
def _score(args, kind, queries, scores, sequence, head, rows, at, first, stop):  # type: ignore[no-untyped-def]
    """Compute scores[i, j] = query i . key j; each page prefetches the next one, the last one the first values."""
    page, dim, stride = args[PAGE], args[DIM], 4 * args[BLOCK]
    token = first // page * page
    while token < stop:
        n = min(page, stop - token)
        keys = _page_of(args, args[KEYS], sequence, head, token, kind)
        ahead = (
            _page_of(args, args[KEYS], sequence, head, token + page, kind)
            if token + page < stop
            else _page_of(args, args[VALUES], sequence, head, first, kind)
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
def _collect(args, kind, weights, sums, sequence, head, rows, at, first, stop):  # type: ignore[no-untyped-def]
    """Add weight[i, j] * value j to sums[i]; each page prefetches the next one, the last one the next block's keys."""
    page, dim, stride, width = args[PAGE], args[DIM], 4 * args[BLOCK], args[DIM] * itemsize(kind)
    token = first
    while token < stop:
        inside = token % page
        n = min(page - inside, stop - token)
        values = _page_of(args, args[VALUES], sequence, head, token, kind) + inside * width
        ahead = _page_of(args, args[VALUES] if token + n < stop else args[KEYS], sequence, head, token + n, kind)
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
