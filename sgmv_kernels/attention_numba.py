"""Paged attention on the CPU: pages are read in place, bf16, fp16 or fp32, with an online softmax; no gather.

A task is a block of query rows of one sequence, and some of its key heads. The rows of all query heads that share a key
head go through together, so that a loaded key or value serves every one of them. Keys come in blocks that begin at
multiples of `BLOCK_TOKENS`, so that a row's sums do not depend on which rows share its task.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from sgmv_kernels.backend import AttentionPlan
from sgmv_kernels.kv_pages import KvPages
from sgmv_kernels.segments import Int32
from sgmv_kernels.simd_numba import (
    KINDS,
    exp_of,
    exp_sum,
    f32,
    i32,
    itemsize,
    make_mul,
    put_f32,
    row_max,
    scaled,
    take_next,
    unpart,
)
from sgmv_kernels.team_numba import Arguments, arguments, compiled, run, team_size

BLOCK_TOKENS = 128
"""Keys of one round of the online softmax: what rescales sums is paid once a block."""
TASK_ROWS = 24
"""Rows of a task, query rows times query heads of a key head: their sums stay in the first-level cache."""
TASK_INTS = 5
NUM_TASKS, TASKS, TABLES, TABLE_WIDTH, STARTS, LENS, PAGE, Q, HEADS, KV_HEADS = range(2, 12)
DIM, KEYS, VALUES, PAGE_BYTES, OUT, SCALE, WINDOW, SLOPES, SCRATCH, SCRATCH_BYTES, ROWS, BLOCK = range(12, 24)
"""Places in the kernel's arguments, after the counters. SCALE holds a float64."""
NUM_ARGS = BLOCK + 1

_keys_1, _keys_2, _keys_3, _keys_6 = (make_mul(n, 1, add=False, fetch=True) for n in (1, 2, 3, 6))
_values_1, _values_2, _values_3, _values_6 = (make_mul(n, 1, add=True, fetch=True, parted=True) for n in (1, 2, 3, 6))


@dataclass(frozen=True, slots=True)
class NumbaSequences:
    """A step's sequences; what depends on the heads of a model is added at the first layer."""

    query_lens: Int32
    arguments: dict[tuple[int, int, int], Arguments]
    kept: list[object]


def prepare(plan: AttentionPlan, device: torch.device) -> NumbaSequences:
    """Nothing but the lengths: tasks depend on the heads."""
    del device
    return NumbaSequences(np.diff(plan.query_starts), {}, [])


def attention_numba(
    q: Tensor, kv: KvPages, plan: AttentionPlan, scale: float, window: int | None, alibi_slopes: Tensor | None
) -> Tensor:
    """See `ops.Ops.paged_attention`."""
    sequences: NumbaSequences = plan.prepared
    heads = q.shape[1]
    shape = heads, kv.num_heads, kv.head_dim
    if shape not in sequences.arguments:
        sequences.arguments[shape] = _arguments(plan, sequences, *shape)
    args = sequences.arguments[shape]
    out = torch.empty_like(q)
    args[Q], args[OUT], args[KEYS], args[VALUES] = (
        q.data_ptr(),
        out.data_ptr(),
        kv.keys.data_ptr(),
        kv.values.data_ptr(),
    )
    args[PAGE_BYTES] = kv.keys.stride(0) * kv.keys.itemsize
    args[SCALE] = np.float64(scale).view(np.int64).item()
    args[WINDOW] = window or 0
    args[SLOPES] = 0 if alibi_slopes is None else alibi_slopes.data_ptr()
    run(_kernel(kv.dtype), min(team_size(), args[NUM_TASKS]), args)
    return out


def _arguments(plan: AttentionPlan, sequences: NumbaSequences, heads: int, kv_heads: int, dim: int) -> Arguments:
    group = heads // kv_heads
    rows = max(1, TASK_ROWS // group)
    threads = team_size()
    tasks = _tasks(sequences.query_lens, plan.kv_lens, rows, kv_heads, threads)
    block = -(-BLOCK_TOKENS // plan.page_size) * plan.page_size
    # Queries, sums, scores, then the maximum and the sum of every row.
    scratch_bytes = 4 * rows * group * (2 * dim + block + 2)
    scratch_bytes = -(-scratch_bytes // 128) * 128
    scratch = torch.empty(threads * scratch_bytes, dtype=torch.uint8)
    sequences.kept.extend((tasks, scratch))
    return arguments(
        len(tasks),
        tasks.ctypes.data,
        plan.page_tables.ctypes.data,
        plan.page_tables.shape[1],
        plan.query_starts.ctypes.data,
        plan.kv_lens.ctypes.data,
        plan.page_size,
        0,
        heads,
        kv_heads,
        dim,
        *(0,) * 7,
        scratch.data_ptr(),
        scratch_bytes,
        rows * group,
        block,
    )


def _tasks(query_lens: Int32, kv_lens: Int32, rows: int, kv_heads: int, threads: int) -> Int32:
    """[N, 5]: sequence, first and last key head, first and last query row; those with most work first."""
    blocks = -(-query_lens // rows)
    apart = int(blocks.sum()) < 4 * threads
    spans = [(h, h + 1) for h in range(kv_heads)] if apart else [(0, kv_heads)]
    work = np.minimum(query_lens, rows) * kv_lens
    tasks = [
        (s, first_head, last_head, begin, min(n, begin + rows))
        for s, n in ((s, int(query_lens[s])) for s in np.argsort(-work, kind="stable").tolist())
        for begin in range(0, n, rows)
        for first_head, last_head in spans
    ]
    return np.array(tasks, dtype=np.int32).reshape(-1, TASK_INTS)


def warm_up(dtypes: Sequence[torch.dtype]) -> None:
    """Compile what these dtypes need."""
    for dtype in dtypes:
        _kernel(dtype)


@cache
def _kernel(dtype: torch.dtype) -> int:
    return compiled(_ENTRIES[dtype])


def _bf16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64), _BF16)


def _fp16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64), _FP16)


def _fp32(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64), _FP32)


_BF16, _FP16, _FP32 = (KINDS[t] for t in (torch.bfloat16, torch.float16, torch.float32))
_ENTRIES = {torch.bfloat16: _bf16, torch.float16: _fp16, torch.float32: _fp32}


@njit
def _work(args, floats, kind):  # type: ignore[no-untyped-def]
    """Take tasks until none is left."""
    scale = np.float32(floats[SCALE])
    scratch = args[SCRATCH] + take_next(args.ctypes.data + 8) * args[SCRATCH_BYTES]
    while True:
        task = take_next(args.ctypes.data)
        if task >= args[NUM_TASKS]:
            return
        at = args[TASKS] + task * (4 * TASK_INTS)
        for head in range(i32(at, 1), i32(at, 2)):
            _attend(args, scale, scratch, i32(at, 0), head, i32(at, 3), i32(at, 4), kind)


@njit
def _attend(args, scale, scratch, sequence, head, begin, end, kind):  # type: ignore[no-untyped-def]
    """Query rows `begin` to `end` of a sequence, with the query heads that share one key head."""
    dim, heads, page, block = args[DIM], args[HEADS], args[PAGE], args[BLOCK]
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
    first = max(0, offset + begin - args[WINDOW] + 1) if args[WINDOW] else np.int64(0)
    last = offset + end
    at = first // block * block
    while at < last:
        stop = min(at + block, last)
        _score(args, kind, queries, scores, sequence, head, rows, at, stop)
        for i in range(rows):
            position = offset + begin + i // group
            slope = f32(args[SLOPES], head * group + i % group) if args[SLOPES] else np.float32(0)
            _soften(
                args,
                scores + 4 * block * i,
                sums + 4 * dim * i,
                maxima + 4 * i,
                totals + 4 * i,
                position,
                at,
                stop,
                slope,
            )
        _collect(args, kind, scores, sums, sequence, head, rows, at, stop)
        at = stop
    for r in range(begin, end):
        for g in range(group):
            i = (r - begin) * group + g
            total = f32(totals, i)
            factor = np.float32(1) / total if total > 0 else np.float32(0)
            unpart(
                sums + 4 * dim * i, dim, factor, args[OUT] + 4 * dim * ((start + r) * heads + head * group + g), kind
            )


@njit
def _soften(args, scores, sums, maximum, total, position, at, stop, slope):  # type: ignore[no-untyped-def]
    """Turn one row's scores into weights, and bring its sums to the new maximum."""
    n = stop - at
    if slope != 0:
        for j in range(n):
            put_f32(scores, j, f32(scores, j) + slope * np.float32(at + j - position))
    for j in range(max(0, position + 1 - at), n):
        put_f32(scores, j, np.float32(-np.inf))
    if args[WINDOW]:
        for j in range(min(n, position - args[WINDOW] + 1 - at)):
            put_f32(scores, j, np.float32(-np.inf))
    before = f32(maximum, 0)
    now = max(before, row_max(scores, n))
    if now == np.float32(-np.inf):
        for j in range(n):
            put_f32(scores, j, np.float32(0))
        return
    added = exp_sum(scores, n, now)
    if now > before:
        factor = exp_of(before - now)
        scaled(sums, args[DIM], factor, sums)
        put_f32(total, 0, f32(total, 0) * factor)
        put_f32(maximum, 0, now)
    put_f32(total, 0, f32(total, 0) + added)


@njit
def _page_of(args, base, sequence, head, token, kind):  # type: ignore[no-untyped-def]
    """Where the keys or values of one head in a token's page are."""
    index = i32(args[TABLES], sequence * args[TABLE_WIDTH] + min(token // args[PAGE], args[TABLE_WIDTH] - 1))
    return base + index * args[PAGE_BYTES] + head * args[DIM] * args[PAGE] * itemsize(kind)


@njit
def _score(args, kind, queries, scores, sequence, head, rows, at, stop):  # type: ignore[no-untyped-def]
    """scores[i, j] = query i . key j; each page fetches the next one, the last one the first values."""
    page, dim, stride = args[PAGE], args[DIM], 4 * args[BLOCK]
    token = at
    while token < stop:
        n = min(page, stop - token)
        keys = _page_of(args, args[KEYS], sequence, head, token, kind)
        ahead = (
            _page_of(args, args[KEYS], sequence, head, token + page, kind)
            if token + page < stop
            else _page_of(args, args[VALUES], sequence, head, at, kind)
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


@njit
def _collect(args, kind, weights, sums, sequence, head, rows, at, stop):  # type: ignore[no-untyped-def]
    """sums[i] += weight[i, j] * value j; each page fetches the next one, the last one the next block's keys."""
    page, dim, stride = args[PAGE], args[DIM], 4 * args[BLOCK]
    token = at
    while token < stop:
        n = min(page, stop - token)
        values = _page_of(args, args[VALUES], sequence, head, token, kind)
        ahead = _page_of(args, args[VALUES] if token + page < stop else args[KEYS], sequence, head, token + page, kind)
        out, width = weights + 4 * (token - at), dim * itemsize(kind)
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
