"""Who gives way when pages run out. KV cache and adapters compete for the same pages; nothing is theirs by right.

In this order, as far as the need reaches:

1. prefix pages whose adapter has left the pool: dead weight until it is back;
2. idle adapters that no request waits for, and resting prefix pages: by worth, in one currency. A page that was used
   again costs far more to compute than a page of an adapter costs to copy, so adapters usually go first. KV stops at a
   floor of adapters, so that a burst of it does not wash out all of them, to be loaded again when it is over;
3. idle adapters that only requests further back wait for;
4. idle adapters that the operator has pinned, which are given up only if nothing else lets an accepted request go on.

What comes ahead of its need (prefetch, warming) gets 1 and 2; an admission gets 1 to 3; all of it is for those that
run, and for the first in the queue when nobody runs. If the pages are enough but scattered, they are moved together
(`compaction`).

Moving pages so that scattered free ones become a run: the last resort of an adapter that finds no place.

Keys and values move page by page, adapters run by run (panels keep their places inside a run). The runner copies the
pages between two steps, after every reader of the old places and before any of the new ones.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from adapter_store.spec import AdapterKey
from lorasrv.memory.adapter_cache import AdapterCache
from lorasrv.memory.kv_cache_manager import KVCacheManager
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.prefix_cache import PrefixCache
from lorasrv.scheduler_output import CopyPages, PageCopy
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, Run

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


def compact(pool: PagePool, count: int, movable: Mapping[Run, object], fixed: Mapping[Run, object]) -> Moves | None:
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


Predicate = Callable[[AdapterKey], bool]


class Need(IntEnum):
    """How far others have to give way."""

    AHEAD = 0
    ADMISSION = 1
    PROGRESS = 2


class Evictor:
    """Makes room in the pool. Mutated by the engine thread only.

    Args:
        pool: the pages of keys and values; also those of the adapters, unless the pool is split.
        floor_pages: pages of adapters that KV does not take before a request that runs needs them.
        is_wanted: whether any live request, or a promise to warm it, wants an adapter.
        is_held: whether the operator has pinned it.
    """

    def __init__(
        self,
        pool: PagePool,
        kv: KVCacheManager,
        adapters: AdapterCache,
        prefixes: PrefixCache | None,
        floor_pages: int,
    ) -> None:
        self._pool = pool
        self._kv = kv
        self._adapters = adapters
        self._prefixes = prefixes
        self._floor_pages = floor_pages
        self.is_wanted: Predicate = lambda _: False
        self.is_held: Predicate = lambda _: False
        self.num_moved_pages = 0
        self._moves: list[CopyPages] = []

    def make_room(self, pages: int, need: EvictionLevel, is_ahead: Predicate = lambda _: False) -> bool:
        """Whether `pages` pages are free for keys and values, after others have given way; if not, nobody has.

        `is_ahead` says which adapters requests further ahead in the queue wait for.
        """
        is_shared = self._adapters.pool is self._pool
        return self._make_room(self._pool, pages, need, is_ahead, self._floor_pages if is_shared else 0)

    def can_make_room(self, pages: int, need: EvictionLevel, is_ahead: Predicate = lambda _: False) -> bool:
        """Whether `make_room` would find so many. Nobody has to give way yet."""
        floor = self._floor_pages if self._adapters.pool is self._pool else 0
        return self._pool.num_free >= pages or self._obtainable(self._pool, need, is_ahead, floor) >= pages

    def place_adapter(
        self, key: AdapterKey, layout: AdapterLayout, keep_free: int, need: EvictionLevel, is_ahead: Predicate
    ) -> PlacedAdapter | None:
        """Pages for an adapter, after others have given way, beside `keep_free` pages for keys and values."""
        pool = self._adapters.pool
        if pool is not self._pool:
            keep_free = 0
        pages = self._adapters.pages_for(layout) + keep_free
        if not self._make_room(pool, pages, need, is_ahead, floor=0):
            return None
        placed = self._adapters.place(key, layout, keep_free=keep_free)
        if placed is None and self._compact(self._adapters.pages_for(layout), keep_free):
            placed = self._adapters.place(key, layout, keep_free=keep_free)
        while placed is None and self._give_way(pool, need, is_ahead, floor=0):
            placed = self._adapters.place(key, layout, keep_free=keep_free)
        return placed

    def can_place(self, layout: AdapterLayout, keep_free: int, need: EvictionLevel) -> bool:
        """Whether there are pages enough for an adapter, if others give way. Nobody has to yet."""
        pool = self._adapters.pool
        pages = self._adapters.pages_for(layout) + (keep_free if pool is self._pool else 0)
        return pool.num_free >= pages or self._obtainable(pool, need, lambda _: False, floor=0) >= pages

    def take_moves(self) -> list[CopyPages]:
        """The copies that moves since the last call have made due, in their order."""
        moves, self._moves = self._moves, []
        return moves

    def _make_room(self, pool: PagePool, pages: int, need: EvictionLevel, is_ahead: Predicate, floor: int) -> bool:
        if pool.num_free >= pages:
            return True
        if self._obtainable(pool, need, is_ahead, floor) < pages:
            return False
        while pool.num_free < pages:
            if not self._give_way(pool, need, is_ahead, floor):
                return False
        return True

    def _obtainable(self, pool: PagePool, need: EvictionLevel, is_ahead: Predicate, floor: int) -> int:
        pages = pool.num_free
        if self._prefixes is not None and pool is self._pool:
            pages += self._prefixes.num_stranded + self._prefixes.num_resting
        adapters = self._adapters
        if pool is not adapters.pool:
            return pages
        if need is EvictionLevel.RUNNING:
            return pages + adapters.num_evictable_pages
        idle = adapters.num_evictable_pages - adapters.num_idle_pages_of(self._spared(need, is_ahead))
        return pages + max(0, min(idle, adapters.num_pages - floor))

    def _give_way(self, pool: PagePool, need: EvictionLevel, is_ahead: Predicate, floor: int) -> bool:
        """Free at least one page; False if nobody gives way to this need."""
        prefixes = self._prefixes if pool is self._pool else None
        if prefixes is not None and prefixes.drop_stranded():
            return True
        if self._give_way_by_worth(pool, prefixes, floor):
            return True
        if need is EvictionLevel.PREFETCH or pool is not self._adapters.pool:
            return False
        if self._adapters.num_pages > floor and self._adapters.evict_idle(self._spared(need, is_ahead)):
            return True
        return need is EvictionLevel.RUNNING and (
            self._adapters.evict_idle(lambda key: is_ahead(key) or self.is_held(key))
            or self._adapters.evict_idle(self.is_held)
            or self._adapters.evict_idle()
        )

    def _give_way_by_worth(self, pool: PagePool, prefixes: PrefixCache | None, floor: int) -> bool:
        """The least worth of the adapters that nobody wants and of the pages that rest."""
        adapters_may = pool is self._adapters.pool and self._adapters.num_pages > floor
        spared = self._spared(EvictionLevel.PREFETCH, lambda _: True)
        page = math.inf if prefixes is None else prefixes.least_worth()
        if adapters_may and self._adapters.least_worth(spared) <= page and self._adapters.evict_idle(spared):
            return True
        return prefixes is not None and prefixes.drop_resting()

    def _spared(self, need: EvictionLevel, is_ahead: Predicate) -> Predicate:
        """Adapters that do not give way to this need."""
        if need is EvictionLevel.PREFETCH:
            return lambda key: self.is_wanted(key) or self.is_held(key)
        return lambda key: is_ahead(key) or self.is_held(key)

    def _compact(self, pages: int, keep_free: int) -> bool:
        """Move pages so that an adapter of so many finds one run."""
        pool = self._adapters.pool
        if pool.num_free < pages + keep_free:
            return False
        moves = compact(pool, pages, self._adapters.movable_runs(), self._adapters.fixed_runs())
        if moves is None or not moves.pages:
            return False
        self._follow(moves)
        return True

    def _follow(self, moves: Moves) -> None:
        """Bring the other accounts after pages that were moved, and note the copies that are due."""
        self._kv.move(moves.singles)
        if self._prefixes is not None:
            self._prefixes.move(moves.singles)
        self._adapters.move(moves.runs)
        moved = moves.pages
        self._moves.append(CopyPages(tuple(PageCopy(old, new) for old, new in moved.items())))
        self.num_moved_pages += len(moved)
