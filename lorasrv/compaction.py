"""Moving pages so that scattered free ones become a run: the last resort of an adapter that finds no place.

Keys and values move page by page, adapters run by run (panels keep their places inside a run). The runner copies the
pages between two steps, after every reader of the old places and before any of the new ones.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lorasrv.page_pool import PagePool
from sgmv_kernels.layout import Run

MAX_WINDOWS = 8
_IMMOVABLE = 1 << 30


@dataclass(frozen=True, slots=True)
class Moves:
    """Old place -> new place, of single pages and of whole runs of adapters. `pages` has all of them, page by page."""

    singles: Mapping[int, int]
    runs: Mapping[Run, Run]

    @property
    def pages(self) -> dict[int, int]:
        moved = dict(self.singles)
        for (old, count), (new, _) in self.runs.items():
            moved.update((old + i, new + i) for i in range(count))
        return moved


def clear_run(pool: PagePool, count: int, movable: Mapping[Run, object], fixed: Mapping[Run, object]) -> Moves | None:
    """Free `count` consecutive pages by moving what lies there; the pool's books are changed, its memory is not.

    Args:
        movable: runs of adapters that may move, as wholes.
        fixed: runs that may not. What is used and in no run is single pages, which may.
    Returns:
        What was moved: the owners' tables and the memory must follow. None, and nothing changed, if it cannot be done.
    """
    if pool.num_free < count:
        return None
    for first in _cheapest_windows(pool, count, movable, fixed):
        moves = _rehouse(pool, (first, count), movable)
        if moves is not None:
            return moves
    return None


def _cheapest_windows(
    pool: PagePool, count: int, movable: Mapping[Run, object], fixed: Mapping[Run, object]
) -> Iterator[int]:
    """First pages of windows of `count` pages, those with the fewest pages to be moved first."""
    cost = np.ones(pool.num_pages, dtype=np.int64)
    for first, length in pool.free_runs():
        cost[first - pool.first : first - pool.first + length] = 0
    for first, length in fixed:
        cost[first - pool.first : first - pool.first + length] = _IMMOVABLE
    sums = np.concatenate([[0], np.cumsum(cost)])
    windows = sums[count:] - sums[:-count]
    # A run is moved as a whole, also the part of it that lies outside the window.
    for first, length in movable:
        begin = first - pool.first
        starts = np.arange(max(0, begin - count + 1), min(len(windows), begin + length))
        windows[starts] += length - (np.minimum(begin + length, starts + count) - np.maximum(begin, starts))
    for start in np.argsort(windows, kind="stable")[:MAX_WINDOWS].tolist():
        if windows[start] < _IMMOVABLE:
            yield start + pool.first


def _rehouse(pool: PagePool, window: Run, movable: Mapping[Run, object]) -> Moves | None:
    end = sum(window)
    runs = sorted((run for run in movable if run[0] < end and sum(run) > window[0]), key=lambda run: -run[1])
    in_runs = {page for first, length in runs for page in range(first, first + length)}
    free = [page for page in range(window[0], end) if not pool.refcount(page)]
    singles = [page for page in range(window[0], end) if pool.refcount(page) and page not in in_runs]
    # Nothing may move to where it must not stay.
    for page in free:
        pool.take_page(page)
    new_runs = [pool.allocate_run(length) for _, length in runs]
    new_singles = pool.allocate_singles(len(singles)) if all(new_runs) else None
    if new_singles is None:
        for run in new_runs:
            pool.release(range(run[0], sum(run)) if run else ())
        pool.release(free)
        return None
    moves = Moves(
        dict(zip(singles, new_singles, strict=True)),
        {old: new for old, new in zip(runs, new_runs, strict=True) if new is not None},
    )
    pool.move(moves.pages)
    pool.release(free)
    return moves
