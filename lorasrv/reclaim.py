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
"""

import math
from collections.abc import Callable
from enum import IntEnum

from adapter_store.spec import AdapterKey
from lorasrv.adapter_cache import AdapterCache
from lorasrv.compaction import Moves, clear_run
from lorasrv.kv_cache import KVCacheManager
from lorasrv.page_pool import PagePool
from lorasrv.prefix_cache import PrefixCache
from lorasrv.step import CopyPages, PageCopy
from sgmv_kernels.layout import AdapterLayout, PlacedAdapter

Predicate = Callable[[AdapterKey], bool]


class Need(IntEnum):
    """How far others have to give way."""

    AHEAD = 0
    ADMISSION = 1
    PROGRESS = 2


class Reclaimer:
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

    def room_for_kv(self, pages: int, need: Need, is_ahead: Predicate = lambda _: False) -> bool:
        """Whether `pages` pages are free for keys and values, after others have given way; if not, nobody has.

        `is_ahead` says which adapters requests further ahead in the queue wait for.
        """
        is_shared = self._adapters.pool is self._pool
        return self._make_room(self._pool, pages, need, is_ahead, self._floor_pages if is_shared else 0)

    def may_have_room(self, pages: int, need: Need, is_ahead: Predicate = lambda _: False) -> bool:
        """Whether `room_for_kv` would find so many. Nobody has to give way yet."""
        floor = self._floor_pages if self._adapters.pool is self._pool else 0
        return self._pool.num_free >= pages or self._obtainable(self._pool, need, is_ahead, floor) >= pages

    def place_adapter(
        self, key: AdapterKey, layout: AdapterLayout, keep_free: int, need: Need, is_ahead: Predicate
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

    def may_place(self, layout: AdapterLayout, keep_free: int, need: Need) -> bool:
        """Whether there are pages enough for an adapter, if others give way. Nobody has to yet."""
        pool = self._adapters.pool
        pages = self._adapters.pages_for(layout) + (keep_free if pool is self._pool else 0)
        return pool.num_free >= pages or self._obtainable(pool, need, lambda _: False, floor=0) >= pages

    def take_moves(self) -> list[CopyPages]:
        """The copies that moves since the last call have made due, in their order."""
        moves, self._moves = self._moves, []
        return moves

    def _make_room(self, pool: PagePool, pages: int, need: Need, is_ahead: Predicate, floor: int) -> bool:
        if pool.num_free >= pages:
            return True
        if self._obtainable(pool, need, is_ahead, floor) < pages:
            return False
        while pool.num_free < pages:
            if not self._give_way(pool, need, is_ahead, floor):
                return False
        return True

    def _obtainable(self, pool: PagePool, need: Need, is_ahead: Predicate, floor: int) -> int:
        pages = pool.num_free
        if self._prefixes is not None and pool is self._pool:
            pages += self._prefixes.num_stranded + self._prefixes.num_resting
        adapters = self._adapters
        if pool is not adapters.pool:
            return pages
        if need is Need.PROGRESS:
            return pages + adapters.num_idle_pages
        idle = adapters.num_idle_pages - adapters.num_idle_pages_of(self._spared(need, is_ahead))
        return pages + max(0, min(idle, adapters.num_pages - floor))

    def _give_way(self, pool: PagePool, need: Need, is_ahead: Predicate, floor: int) -> bool:
        """Free at least one page; False if nobody gives way to this need."""
        prefixes = self._prefixes if pool is self._pool else None
        if prefixes is not None and prefixes.drop_stranded():
            return True
        if self._give_way_by_worth(pool, prefixes, floor):
            return True
        if need is Need.AHEAD or pool is not self._adapters.pool:
            return False
        if self._adapters.num_pages > floor and self._adapters.evict_idle(self._spared(need, is_ahead)):
            return True
        return need is Need.PROGRESS and (
            self._adapters.evict_idle(lambda key: is_ahead(key) or self.is_held(key))
            or self._adapters.evict_idle(self.is_held)
            or self._adapters.evict_idle()
        )

    def _give_way_by_worth(self, pool: PagePool, prefixes: PrefixCache | None, floor: int) -> bool:
        """The least worth of the adapters that nobody wants and of the pages that rest."""
        adapters_may = pool is self._adapters.pool and self._adapters.num_pages > floor
        spared = self._spared(Need.AHEAD, lambda _: True)
        page = math.inf if prefixes is None else prefixes.least_worth()
        if adapters_may and self._adapters.least_worth(spared) <= page and self._adapters.evict_idle(spared):
            return True
        return prefixes is not None and prefixes.drop_resting()

    def _spared(self, need: Need, is_ahead: Predicate) -> Predicate:
        """Adapters that do not give way to this need."""
        if need is Need.AHEAD:
            return lambda key: self.is_wanted(key) or self.is_held(key)
        return lambda key: is_ahead(key) or self.is_held(key)

    def _compact(self, pages: int, keep_free: int) -> bool:
        """Move pages so that an adapter of so many finds one run."""
        pool = self._adapters.pool
        if pool.num_free < pages + keep_free:
            return False
        moves = clear_run(pool, pages, self._adapters.movable_runs(), self._adapters.fixed_runs())
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
