"""Paged attention on the CPU: the loop over blocks of keys that runs one thread's tasks of `cpu_ops.attention`, built
from the steps of a KV format.
"""

from typing import Any, NamedTuple

import numpy as np

from sgmv_kernels.cpu_arguments.attention import (
    BLOCK,
    DIM,
    HEADS,
    KV_HEADS,
    LENS,
    NUM_TASKS,
    PAGE,
    PAGE_BYTES,
    POSITIONS,
    ROWS,
    SCALE,
    SCRATCH,
    SCRATCH_BYTES,
    SLOPES,
    SOFTCAP,
    STARTS,
    TABLE_WIDTH,
    TABLES,
    TASK_INTS,
    TASKS,
    THREADS,
    TREES,
    WINDOW,
    WORDS,
    Q,
)
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.elementwise import capped, exp_sum, fill, row_max, scaled, sloped
from sgmv_kernels.cpu_simd.memory_access import f32, f64, i32, i64, put_f32, take_next


class Steps(NamedTuple):
    """Hold the steps of attention that depend on the KV format; each is a part of a kernel.

    `width(args)` returns the fp32 numbers of a row of queries, `sums_width(args)` those of a row of sums, which has at
    least as many. `prepare(args, source, scale, units, room, queries)` makes a row of queries from a head at `source`;
    it may use the memory of the row's sums (`room`). `score(args, queries, units, scores, sequence, head, rows, at,
    first, stop, following)` computes the scores of keys `first` to `stop` of a block whose first key is `at`; it may
    also write scores of the other keys of their pages, which the loop masks. `collect(args, scores, units, sums,
    sequence, head, rows, at, first, stop, following)` adds the weighted values. `finish(args, sums, factor, row, head)`
    writes a query head of a row of the result.

    `following` says which pages are read one block later (`ahead_of`). Each page of a block prefetches one of them:
    computing a page takes less time than a memory access, and computing a block takes more.
    """

    width: Any
    sums_width: Any
    prepare: Any
    score: Any
    collect: Any
    finish: Any


@kernel_part
def pages_from(args, sequence, token):  # type: ignore[no-untyped-def]
    """Return the address of a sequence's page ids, starting at the page of a token, and their number."""
    first = token // args[PAGE]
    pages = (i32(args[LENS], sequence) + args[PAGE] - 1) // args[PAGE]
    return args[TABLES] + 4 * (sequence * args[TABLE_WIDTH] + first), pages - first


@kernel_part
def _first_key(args, sequence, begin):  # type: ignore[no-untyped-def]
    """Return the first key that query rows from `begin` on see."""
    if not args[WINDOW]:
        return np.int64(0)
    length = i32(args[LENS], sequence)
    slot = length - (i32(args[STARTS], sequence + 1) - i32(args[STARTS], sequence)) + begin
    tree = i32(args[TREES], sequence) if args[TREES] else length
    return max(0, min(slot, tree) - args[WINDOW] + 1)


@kernel_part
def _pages_of(args, task, head):  # type: ignore[no-untyped-def]
    """Return the address of a key head's page ids, starting at a task's first page, their number, and the head."""
    sequence, begin = i32(task, 0), i32(task, 3)
    ids, count = pages_from(args, sequence, _first_key(args, sequence, begin))
    return ids, count, head


@kernel_part
def _following(args, ids, count, head, done, behind):  # type: ignore[no-untyped-def]
    """Return the pages that are read one block after those from index `done` on, and the pages after them.

    Args:
        ids, count, head: the pages that a task reads for a key head.
        behind: the pages of the next head or task.
    """
    later = done + min(args[BLOCK] // args[PAGE], count)
    then_ids, then_count, then_head = behind
    if later < count:
        return ids + 4 * later, count - later, head, then_ids, then_count, then_head
    begun = min(later - count, then_count - 1)
    return ids, np.int64(0), head, then_ids + 4 * begun, then_count - begun, then_head


@kernel_part
def ahead_of(following, base, head_bytes):  # type: ignore[no-untyped-def]
    """Return what to prefetch (`PAGES_AHEAD`) of pages in which a head has `head_bytes`; page 0's are at `base`."""
    ids, count, head, then_ids, then_count, then_head = following
    return ids, count, base + head * head_bytes, then_ids, then_count, base + then_head * head_bytes


@kernel_part
def address_ahead(args, ahead, at):  # type: ignore[no-untyped-def]
    """Return the address to prefetch while page `at` of a block is read."""
    ids, count, base, then_ids, then_count, then_base = ahead
    if at < count:
        return base + i32(ids, at) * args[PAGE_BYTES]
    return then_base + i32(then_ids, min(at - count, then_count - 1)) * args[PAGE_BYTES]


def make_attention(steps: Steps) -> Any:
    """Return the kernel of a KV format, which takes tasks until none is left."""
    width_of, sums_width_of, prepare, score, collect, finish = steps

    @kernel_part
    def attend(args, scale, softcap, scratch, sequence, head, begin, end, behind):  # type: ignore[no-untyped-def]
        """Compute query rows `begin` to `end` of a sequence for the query heads that share one key head.

        `behind` are the pages that the thread will probably read next (`_pages_of`).
        """
        dim, heads, block = args[DIM], args[HEADS], args[BLOCK]
        width, sums_width = width_of(args), sums_width_of(args)
        group = heads // args[KV_HEADS]
        rows = (end - begin) * group
        queries, sums = scratch, scratch + 4 * width * args[ROWS]
        scores = sums + 4 * sums_width * args[ROWS]
        maxima = scores + 4 * block * args[ROWS]
        totals = maxima + 4 * args[ROWS]
        factors = totals + 4 * args[ROWS]
        units = factors + 4 * args[ROWS]
        weight_units = units + 8 * args[ROWS]
        start, length = i32(args[STARTS], sequence), i32(args[LENS], sequence)
        offset = length - (i32(args[STARTS], sequence + 1) - start)
        for i in range(rows):
            source = args[Q] + 4 * dim * ((start + begin + i // group) * heads + head * group + i % group)
            prepare(args, source, scale, units + 8 * i, sums + 4 * sums_width * i, queries + 4 * width * i)
            put_f32(maxima, i, np.float32(-np.inf))
            put_f32(totals, i, np.float32(0))
        fill(sums, rows * sums_width, np.float32(0))
        tree = i32(args[TREES], sequence) if args[TREES] else length
        first = _first_key(args, sequence, begin)
        last = offset + end
        page = args[PAGE]
        ids, count = pages_from(args, sequence, first)[0], (last + page - 1) // page - first // page
        at = first // block * block
        while at < last:
            stop = min(at + block, last)
            following = _following(args, ids, count, head, max(at, first) // page - first // page, behind)
            score(args, queries, units, scores, sequence, head, rows, at, max(at, first), stop, following)
            # Scores beyond the end of the block, and of the rest of the last page, count as masked, so that the order
            # of a sum does not depend on the end.
            padded = min(block, max((stop - at + 31) // 32 * 32, (stop - at + page - 1) // page * page))
            if at + padded > min(tree, offset + begin + 1) or args[WINDOW] or softcap != 0 or args[SLOPES]:
                for i in range(rows):
                    slope = f32(args[SLOPES], head * group + i % group) if args[SLOPES] else np.float32(0)
                    row = start + begin + i // group
                    _mask(
                        args, scores + 4 * block * i, padded, row, row - start + offset, tree, at, stop, softcap, slope
                    )
            _soften(scores, 4 * block, padded, sums, sums_width, maxima, totals, factors, rows)
            collect(args, scores, weight_units, sums, sequence, head, rows, at, max(at, first), stop, following)
            at = stop
        for i in range(rows):
            total = f32(totals, i)
            factor = np.float32(1) / total if total > 0 else np.float32(0)
            finish(args, sums + 4 * sums_width * i, factor, start + begin + i // group, head * group + i % group)

    @kernel_part
    def work(args):  # type: ignore[no-untyped-def]
        scale, softcap = np.float32(f64(args.ctypes.data, SCALE)), np.float32(f64(args.ctypes.data, SOFTCAP))
        scratch = args[SCRATCH] + take_next(args.ctypes.data + 8) * args[SCRATCH_BYTES]
        while True:
            task = take_next(args.ctypes.data)
            if task >= args[NUM_TASKS]:
                return
            at = args[TASKS] + task * (4 * TASK_INTS)
            # The other threads will take the tasks in between.
            next_at = args[TASKS] + min(task + args[THREADS], args[NUM_TASKS] - 1) * (4 * TASK_INTS)
            last_head = i32(at, 2) - 1
            for head in range(i32(at, 1), last_head + 1):
                behind = (
                    _pages_of(args, at, head + 1) if head < last_head else _pages_of(args, next_at, i32(next_at, 1))
                )
                attend(args, scale, softcap, scratch, i32(at, 0), head, i32(at, 3), i32(at, 4), behind)

    return work


@kernel_part
def _mask(args, scores, padded, row, slot, tree, at, stop, softcap, slope):  # type: ignore[no-untyped-def]
    """Apply softcap and slope to one row's scores, and replace the scores of keys that it does not see by -inf.

    The row's own key is in `slot`, the first key of its draft tree in `tree`.
    """
    position = i32(args[POSITIONS], row) if slot >= tree else slot
    low = max(0, min(position - args[WINDOW] + 1, tree) - at) if args[WINDOW] else np.int64(0)
    high = min(stop - at, slot + 1 - at)
    seen = max(0, high)
    fill(scores, min(low, padded), np.float32(-np.inf))
    fill(scores + 4 * seen, padded - seen, np.float32(-np.inf))
    if high > low and softcap != 0:
        capped(scores + 4 * low, high - low, softcap)
    if slope != 0:
        word = i64(args[WORDS], row) if slot >= tree else np.int64(0)
        _lean(scores, slope, word, tree - at, low, high, at - position)
    if slot >= tree:
        outside = position - args[WINDOW] + 1 - tree if args[WINDOW] else np.int64(0)
        _hide_others(scores, i64(args[WORDS], row), tree - at, high, outside)


@kernel_part
def _soften(scores, stride, n, sums, width, maxima, totals, factors, rows):  # type: ignore[no-untyped-def]
    """Replace n scores of each row by their weights, and rescale its sums and its total to its new maximum."""
    for i in range(rows):
        before = f32(maxima, i)
        now = max(before, row_max(scores + stride * i, n))
        put_f32(maxima, i, now)
        put_f32(factors, i, before - _reference(now))
    exp_sum(factors, rows, np.float32(0))
    for i in range(rows):
        factor = f32(factors, i)
        added = exp_sum(scores + stride * i, n, _reference(f32(maxima, i)))
        put_f32(totals, i, f32(totals, i) * factor + added)
        if factor != 1:
            scaled(sums + 4 * width * i, width, factor, sums + 4 * width * i)


@kernel_part
def _reference(maximum):  # type: ignore[no-untyped-def]
    """Return the number to subtract from scores: the maximum, or 0 if it is -inf (all scores are -inf, or NaN, which
    the maximum ignores)."""
    return maximum if maximum != np.float32(-np.inf) else np.float32(0)


@kernel_part
def _lean(scores, slope, word, tree, low, high, distance):  # type: ignore[no-untyped-def]
    """Add ALiBi's bias to the scores from `low` to `high`. The first key is `distance` positions after the row (usually
    negative).

    From `tree` on, the bias is that of ancestors, whose position is their rank among the ancestors.
    """
    if min(high, tree) > low:
        sloped(scores + 4 * low, min(high, tree) - low, slope, distance + low)
    depth = np.int64(0)
    for bit in range(high - tree):
        if tree + bit >= 0:
            put_f32(scores, tree + bit, f32(scores, tree + bit) + slope * np.float32(distance + tree + depth))
        depth += (word >> bit) & 1


@kernel_part
def _hide_others(scores, word, tree, high, outside):  # type: ignore[no-untyped-def]
    """Mask the scores from `tree`, where the draft tree begins, to `high`, except a row's ancestors in its window.

    The first `outside` ancestors are before the window.
    """
    for bit in range(high - tree):
        is_ancestor = (word >> bit) & 1
        if tree + bit >= 0 and (outside > 0 or not is_ancestor):
            put_f32(scores, tree + bit, np.float32(-np.inf))
        outside -= is_ancestor
