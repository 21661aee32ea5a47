"""What attention prefetches is what it reads a block later."""

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from fetch_log import Decode, fetched_by, lines_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sgmv_kernels.cpu_arguments.attention import (
    BLOCK,
    LENS,
    NUM_ARGS,
    PAGE,
    PAGE_BYTES,
    STARTS,
    TABLE_WIDTH,
    TABLES,
    TASK_INTS,
    WINDOW,
)
from sgmv_kernels.cpu_kernels.attention_loop import _following, _pages_of, address_ahead, ahead_of
from sgmv_kernels.cpu_runtime.kernel_parts import compiled, kernel_part

PAGE_TOKENS, BLOCK_PAGES, HEADS = 16, 8, 3
HEAD_BYTES = 1 << 20
"""Apart, so that an address names a head and, as pages have one byte, the page."""


TASK, NEXT_TASK, HEAD, NEXT_HEAD, DONE, NUM_PAGES, COUNT = range(NUM_ARGS, NUM_ARGS + 7)
"""Indices behind the kernel's own arguments; the addresses follow."""
AHEAD = COUNT + 1


@kernel_part
def _ahead(args):  # type: ignore[no-untyped-def]
    """Write the addresses that are prefetched while pages from place `DONE` on are read."""
    ids, count, _ = _pages_of(args, args[TASK], args[HEAD])
    behind = _pages_of(args, args[NEXT_TASK], args[NEXT_HEAD])
    following = _following(args, ids, count, args[HEAD], args[DONE], behind)
    for at in range(args[NUM_PAGES]):
        args[AHEAD + at] = address_ahead(args, ahead_of(following, 0, HEAD_BYTES), at)
    args[COUNT] = count


_kernel = cache(lambda: compiled(_ahead).ctypes)


def _blocks(lens: list[int], window: int) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Yield the sequence, the head, the addresses read and those prefetched of the blocks of one thread."""
    counts = [-(-n // PAGE_TOKENS) for n in lens]
    tables = np.full((len(lens), max(counts)), -1, dtype=np.int32)
    for s, count in enumerate(counts):
        tables[s, :count] = 100 * s + np.arange(count)
    starts, kv_lens = np.arange(len(lens) + 1, dtype=np.int32), np.array(lens, dtype=np.int32)
    tasks = np.array([(s, 0, HEADS, 0, 1) for s in range(len(lens))], dtype=np.int32)
    assert tasks.shape[1] == TASK_INTS
    args = np.zeros(AHEAD + BLOCK_PAGES, dtype=np.int64)
    args[[PAGE, BLOCK, PAGE_BYTES, WINDOW]] = PAGE_TOKENS, BLOCK_PAGES * PAGE_TOKENS, 1, window
    args[[LENS, STARTS, TABLES, TABLE_WIDTH]] = kv_lens.ctypes.data, starts.ctypes.data, tables.ctypes.data, max(counts)
    for s in range(len(lens)):
        read = tables[s, max(0, lens[s] - window) // PAGE_TOKENS if window else 0 : counts[s]]
        place = [task.ctypes.data for task in tasks]
        for head in range(HEADS):
            following = (s, head + 1) if head + 1 < HEADS else (min(s + 1, len(lens) - 1), 0)
            for done in range(0, len(read), BLOCK_PAGES):
                now = read[done : done + BLOCK_PAGES]
                args[TASK:COUNT] = place[s], place[following[0]], head, following[1], done, len(now)
                _kernel()(args.ctypes.data)
                assert args[COUNT] == len(read)
                yield s, head, (head * HEAD_BYTES + now).tolist(), args[AHEAD : AHEAD + len(now)].tolist()


@settings(deadline=None)
@given(
    lens=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    window=st.sampled_from([0, 1, 40, 300]),
)
def test_every_page_is_prefetched_a_block_before_it_is_read(lens: list[int], window: int) -> None:
    fetched, num_read = set[int](), [set[int]() for _ in lens]
    named = [100 * s + i for s, n in enumerate(lens) for i in range(-(-n // PAGE_TOKENS))]
    for s, head, read, ahead in _blocks(lens, window):
        # The first pages come unannounced; of a sequence, so do some if fewer pages are read of the one before it.
        if head > 0 or (s > 0 and len(num_read[s - 1]) >= BLOCK_PAGES * HEADS):
            assert set(read) <= fetched
        assert not set(read) & set(ahead) or (s, head) == (len(lens) - 1, HEADS - 1)
        # Nothing else: the rest of the tables names no page.
        assert set(ahead) <= {h * HEAD_BYTES + page for h in range(HEADS) for page in named}
        fetched.update(ahead)
        num_read[s].update(read)


@pytest.mark.aside
def test_kernels_prefetch_whole_blocks_in_the_order_in_which_they_read_them() -> None:
    """Of keys, values and scales, also of the next head, of the thread's next task and behind a window's begin."""
    counts = [11, 3, 20, 1, 11, 9, 1]
    tables = np.full((len(counts), max(counts)), 1 << 20, dtype=np.int32)
    ids = np.random.default_rng(0).permutation(sum(counts)).tolist()
    for row, count in zip(tables, counts, strict=True):
        row[:count] = [ids.pop() for _ in range(count)]
    lens = [PAGE_TOKENS * count for count in counts]
    cases = itertools.product(("bfloat16", "int8", "k8v4"), ((None, 1), (None, 2), (7 * PAGE_TOKENS, 1)))
    steps = [Decode(name, tables, lens, HEADS, window, threads) for name, (window, threads) in cases]
    for step, fetched in zip(steps, fetched_by(steps), strict=True):
        lines = lines_of(step.kv_format)
        assert fetched == {block: lines[block[0]] for block in fetched}
        for part in lines:
            assert [block[1:] for block in fetched if block[0] == part] == _in_order(step)


def _in_order(step: Decode) -> list[tuple[int, int]]:
    """Return the pages, and their heads, that are read a block later than each page of each task."""
    firsts = [max(0, n - (step.window or n)) // PAGE_TOKENS for n in step.lens]
    pages = [
        row[first : n // PAGE_TOKENS].tolist() for row, first, n in zip(step.tables, firsts, step.lens, strict=True)
    ]
    tasks = [pages[i] for i in sorted(range(len(pages)), key=lambda i: -step.lens[i])]
    found: list[tuple[int, int]] = []
    for task, own in enumerate(tasks):
        read, behind = list(itertools.product(range(HEADS), own)), tasks[min(task + step.threads, len(tasks) - 1)]
        read += [(0, page) for page in behind + behind[-1:] * BLOCK_PAGES]
        later = min(BLOCK_PAGES, len(own))
        found += [(page, head) for head, page in read[later : later + HEADS * len(own)]]
    return list(dict.fromkeys(found))
