"""Eviction: KV pages and adapters compete for the same pages, and nothing is reserved for either.

Pages are taken in this order, as far as the level allows:

1. orphaned prefix pages, whose adapter has left the pool: useless until it is back;
2. evictable adapters that nothing needs, and cached prefix pages: by score, in one unit. A reused prefix page costs far
   more to compute than a page of an adapter costs to copy, so adapters usually go first. KV leaves a minimum of adapter
   pages, so that a burst of KV does not evict every adapter, only for them to be loaded again afterwards;
3. evictable adapters that only requests further back in the queue wait for;
4. evictable adapters that an operator has pinned: only if an accepted request cannot go on otherwise.

PREFETCH takes 1 and 2, ADMIT 1 to 3, and RUNNING all of them: for running requests, and for the first request of the
queue when none runs.

If the free pages suffice but are scattered, `compact` moves pages so that an adapter finds one run: keys and values
page by page, adapters run by run (panels keep their places inside a run). The runner copies the pages between two
steps, after every read of the old places and before any read of the new ones.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from adapter_store.spec import AdapterKey
from lorasrv.memory.adapter_cache import Need
from lorasrv.memory.adapter_manager import AdapterManager, AdapterState
from lorasrv.memory.kv_cache_manager import KVCacheManager
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.prefix_cache import PrefixCache
from lorasrv.scheduler_output import CopyPages, PageCopy
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, Run

MAX_WINDOWS = 8
_IMMOVABLE = 1 << 30


@dataclass(frozen=True, slots=True)
class Moves:
    """Map old places to new ones."""

    # Single pages.
    singles: Mapping[int, int]
    # Whole runs of adapters.
    runs: Mapping[Run, Run]

    @property
    def pages(self) -> dict[int, int]:
        """Return every moved page, old id -> new id."""
        moved = dict(self.singles)
        for (old, count), (new, _) in self.runs.items():
            moved.update((old + i, new + i) for i in range(count))
        return moved


def compact(pool: PagePool, count: int, movable: Mapping[Run, object], fixed: Mapping[Run, object]) -> Moves | None:
    """Free `count` consecutive pages by moving their contents elsewhere. Only reference counts move here.

    Args:
        movable: runs of adapters that may be moved as a whole.
        fixed: runs that may not be moved. Used pages outside every run are single pages, which may be moved.
    Returns:
        The moves, which the page tables and the memory must follow; None, and nothing changed, if no run can be freed.
    """
    if pool.num_free < count:
        return None
    for first in _cheapest_windows(pool, count, movable, fixed):
        moves = _relocate(pool, (first, count), movable)
        if moves is not None:
            return moves
    return None


def _cheapest_windows(
    pool: PagePool, count: int, movable: Mapping[Run, object], fixed: Mapping[Run, object]
) -> Iterator[int]:
    """Yield the first pages of windows of `count` pages, the windows with the fewest pages to move first."""
    cost = np.ones(pool.num_pages, dtype=np.int64)
    for first, length in pool.free_runs():
        cost[first - pool.first : first - pool.first + length] = 0
    for first, length in fixed:
        cost[first - pool.first : first - pool.first + length] = _IMMOVABLE
    sums = np.concatenate([[0], np.cumsum(cost)])
    windows = sums[count:] - sums[:-count]
    # A run is moved as a whole, including the part outside the window.
    for first, length in movable:
        begin = first - pool.first
        starts = np.arange(max(0, begin - count + 1), min(len(windows), begin + length))
        windows[starts] += length - (np.minimum(begin + length, starts + count) - np.maximum(begin, starts))
    for start in np.argsort(windows, kind="stable")[:MAX_WINDOWS].tolist():
        if windows[start] < _IMMOVABLE:
            yield start + pool.first


def _relocate(pool: PagePool, window: Run, movable: Mapping[Run, object]) -> Moves | None:
    end = sum(window)
    runs = sorted((run for run in movable if run[0] < end and sum(run) > window[0]), key=lambda run: -run[1])
    in_runs = {page for first, length in runs for page in range(first, first + length)}
    free = [page for page in range(window[0], end) if not pool.refcount(page)]
    singles = [page for page in range(window[0], end) if pool.refcount(page) and page not in in_runs]
    # Take the free pages of the window, so that nothing is relocated into it.
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


class EvictionLevel(IntEnum):
    """Bound what may be evicted; the list in the module's docstring defines the levels."""

    PREFETCH = 0
    ADMIT = 1
    RUNNING = 2


class Spared(NamedTuple):
    """Name adapters that are evicted after all others, or never."""

    # Adapters that requests further ahead in the queue wait for: evicted only for running requests, and last.
    ahead: Set[AdapterKey] = frozenset()
    # Adapters that stay in the pool at any level.
    always: Set[AdapterKey] = frozenset()

    @property
    def first(self) -> Set[AdapterKey]:
        """Return the adapters that stay as long as anything else can be evicted."""
        return self.ahead | self.always


NONE_SPARED = Spared()


class Evictor:
    """Free pages by eviction and compaction. Mutated by the engine thread only.

    Args:
        pool: the pages of keys and values; also those of the adapters, unless the pool is split.
        manager: which adapters have pages, and what needs them.
        floor_pages: adapter pages that KV does not take unless a running request needs them.
    """

    def __init__(
        self,
        pool: PagePool,
        kv: KVCacheManager,
        manager: AdapterManager,
        prefixes: PrefixCache | None,
        floor_pages: int,
    ) -> None:
        self._pool = pool
        self._kv = kv
        self._manager = manager
        self._adapters = manager.cache
        self._prefixes = prefixes
        self._floor_pages = floor_pages
        self.num_moved_pages = 0
        self._moves: list[CopyPages] = []

    def make_room(self, pages: int, level: EvictionLevel, spared: Spared = NONE_SPARED) -> bool:
        """Evict until `pages` pages are free for keys and values.

        Returns:
            False, and nothing evicted, if this level cannot free so many.
        """
        return self._make_room(self._pool, pages, level, spared, self._kv_floor())

    def can_make_room(self, pages: int, level: EvictionLevel, spared: Spared) -> bool:
        """Return whether `make_room` would succeed. Evicts nothing."""
        if self._pool.num_free >= pages:
            return True
        return self._available_pages(self._pool, level, spared, self._kv_floor()) >= pages

    def place_adapter(
        self,
        key: AdapterKey,
        keep_free: int,
        level: EvictionLevel,
        spared: Spared = NONE_SPARED,
    ) -> PlacedAdapter | None:
        """Find pages for an adapter in host memory and order its copy, evicting and compacting as needed.

        Args:
            keep_free: pages to be left free for keys and values.
        Returns:
            The place; None if this level cannot free so many pages.
        """
        pool, layout = self._adapters.pool, self._manager.host_layout(key)
        if pool is not self._pool:
            keep_free = 0
        pages = self._adapters.pages_for(layout)
        if not self._make_room(pool, pages + keep_free, level, spared, 0):
            return None
        placed = self._manager.place(key, keep_free=keep_free)
        if placed is None and self._compact(pages, keep_free):
            placed = self._manager.place(key, keep_free=keep_free)
        while placed is None and self._evict_one(pool, level, spared, 0):
            placed = self._manager.place(key, keep_free=keep_free)
        return placed

    def can_place(self, layouts: Iterable[AdapterLayout], keep_free: int, level: EvictionLevel) -> bool:
        """Return whether adapters would have pages enough after evictions. Evicts nothing."""
        pool = self._adapters.pool
        pages = sum(map(self._adapters.pages_for, layouts)) + (keep_free if pool is self._pool else 0)
        return pool.num_free >= pages or self._available_pages(pool, level, NONE_SPARED, 0) >= pages

    def take_moves(self) -> list[CopyPages]:
        """Return the page copies required by compaction since the last call, in order."""
        moves, self._moves = self._moves, []
        return moves

    def _kv_floor(self) -> int:
        return self._floor_pages if self._adapters.pool is self._pool else 0

    def _make_room(
        self,
        pool: PagePool,
        pages: int,
        level: EvictionLevel,
        spared: Spared,
        floor: int,
    ) -> bool:
        if pool.num_free >= pages:
            return True
        if self._available_pages(pool, level, spared, floor) < pages:
            return False
        while pool.num_free < pages:
            if not self._evict_one(pool, level, spared, floor):
                return False
        return True

    def _available_pages(
        self,
        pool: PagePool,
        level: EvictionLevel,
        spared: Spared,
        floor: int,
    ) -> int:
        """Return the number of pages that are free or that this level may evict."""
        pages = pool.num_free
        if self._prefixes is not None and pool is self._pool:
            pages += self._prefixes.num_orphaned + self._prefixes.num_cached
        adapters = self._adapters
        if pool is not adapters.pool:
            return pages
        if level is EvictionLevel.RUNNING:
            return pages + adapters.num_evictable_pages_of(Need.PINNED, spared.always)
        most = Need.NOTHING if level is EvictionLevel.PREFETCH else Need.WANTED
        evictable = adapters.num_evictable_pages_of(most, spared.first)
        return pages + max(0, min(evictable, adapters.num_pages - floor))

    def _evict_one(
        self,
        pool: PagePool,
        level: EvictionLevel,
        spared: Spared,
        floor: int,
    ) -> bool:
        """Free at least one page; return False if this level may evict nothing more."""
        manager = self._manager
        prefixes = self._prefixes if pool is self._pool else None
        if prefixes is not None and prefixes.evict_orphaned():
            return True
        if self._evict_lowest(pool, prefixes, floor):
            return True
        if level is EvictionLevel.PREFETCH or pool is not self._adapters.pool:
            return False
        if self._adapters.num_pages > floor and manager.evict_lowest(Need.WANTED, spared.first):
            return True
        return level is EvictionLevel.RUNNING and (
            manager.evict_lowest(Need.WANTED, spared.first)
            or manager.evict_lowest(Need.WANTED, spared.always)
            or manager.evict_lowest(Need.PINNED, spared.always)
        )

    def _evict_lowest(self, pool: PagePool, prefixes: PrefixCache | None, floor: int) -> bool:
        """Evict the lowest score among the adapters that nothing needs and the cached prefix pages."""
        page = math.inf if prefixes is None else prefixes.lowest_score()
        if pool is self._adapters.pool and self._adapters.num_pages > floor:
            lowest = self._adapters.lowest(Need.NOTHING)
            if lowest is not None and lowest[0] <= page:
                return self._manager.evict_lowest(Need.NOTHING)
        return prefixes is not None and prefixes.evict_lowest()

    def _compact(self, pages: int, keep_free: int) -> bool:
        """Move pages so that an adapter of `pages` pages finds one run."""
        pool = self._adapters.pool
        if pool.num_free < pages + keep_free:
            return False
        movable, copying = (self._manager.runs_in(s) for s in (AdapterState.RESIDENT, AdapterState.COPYING))
        fixed = dict.fromkeys((page, 1) for page in self._kv.fixed() if pool is self._pool)
        moves = compact(pool, pages, movable, {**copying, **fixed})
        if moves is None or not moves.pages:
            return False
        self._follow(moves)
        return True

    def _follow(self, moves: Moves) -> None:
        """Update the page tables of all owners after a move, and note the copies it makes necessary."""
        self._kv.move(moves.singles)
        if self._prefixes is not None:
            self._prefixes.move(moves.singles)
        self._adapters.move(moves.runs)
        moved = moves.pages
        self._moves.append(CopyPages(tuple(PageCopy(old, new) for old, new in moved.items())))
        self.num_moved_pages += len(moved)
