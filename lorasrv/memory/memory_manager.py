"""Memory manager: all accounts of the pool's pages together. Ids and counts only, no memory.

There is one pool for keys, values and adapters; or, for comparison, one that is split into two fixed parts.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import Facts, SnapshotName
from lorasrv.config import MemoryOptions
from lorasrv.memory.adapter_cache import AdapterCache
from lorasrv.memory.adapter_manager import AdapterManager, AdapterState
from lorasrv.memory.cost_model import CostModel, GdsfClock
from lorasrv.memory.eviction import NONE_SPARED, EvictionLevel, Evictor, Spared
from lorasrv.memory.kv_cache_manager import KVCacheManager, SwapSpace
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.pages_ahead import PagesAhead
from lorasrv.memory.peer_pages import PeerPages
from lorasrv.memory.prefix_cache import PrefixCache
from lorasrv.memory.snapshots import SnapshotManager
from lorasrv.request import Request
from sgmv_kernels.formats.adapter_panels import AdapterLayout

NO_ROOM_RETRY_S = 5.0
"""Shortest estimate, in seconds, of when an adapter is ready if running requests leave no pages for it."""

ADAPTER_FLOOR = 0.125
"""Share of the pool's pages that adapters keep while only keys and values of new requests need pages."""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Describe the sizes of the pool."""

    num_pages: int
    # Tokens in a page.
    page_size: int
    # Bytes of a page in one slab.
    page_bytes: int
    # Layers with keys and values of their own.
    num_slabs: int
    # Bytes of a page in all slabs of the draft model, and of other ranks.
    elsewhere_bytes: int = 0

    @classmethod
    def of_bytes(
        cls, pool_bytes: int, page_bytes: int, page_size: int, num_slabs: int, elsewhere_bytes: int = 0
    ) -> "PoolLayout":
        """Return the largest pool of at most `pool_bytes`; `page_bytes` is the size of `page_size` tokens in one
        slab.
        """
        num_pages = pool_bytes // (page_bytes * num_slabs + elsewhere_bytes)
        return cls(num_pages, page_size, page_bytes, num_slabs, elsewhere_bytes)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a page in all slabs, here and elsewhere."""
        return self.page_bytes * self.num_slabs + self.elsewhere_bytes


@dataclass(frozen=True)
class MemoryManager:
    """Hold the accounts of one engine, and load adapters with them."""

    layout: PoolLayout
    # The same pool for KV and adapters, unless it is split.
    kv_pool: PagePool
    adapter_pool: PagePool
    # None if prefix caching is off.
    prefixes: PrefixCache | None
    kv: KVCacheManager
    # Pages of adapters; their state is the adapter manager's.
    adapters: AdapterCache
    adapter_manager: AdapterManager
    evictor: Evictor
    swap: SwapSpace
    snapshots: SnapshotManager
    peer_pages: PeerPages
    ahead: PagesAhead
    costs: CostModel
    clock: Callable[[], float]

    @classmethod
    def make(
        cls,
        layout: PoolLayout,
        options: MemoryOptions,
        preemption: str = "auto",
        is_on_host: Callable[[AdapterKey], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
        costs: CostModel | None = None,
        adapter_floor: float | None = None,
        facts: Facts | None = None,
        stored: Mapping[SnapshotName, int] = MappingProxyType({}),
        peer_facts: Facts | None = None,
    ) -> "MemoryManager":
        """Create empty accounts.

        Args:
            preemption: mode of the swap space.
            is_on_host: as for `AdapterManager`; eviction of such an adapter is cheaper.
            costs: rates of this machine, if they are known already.
            adapter_floor: share of the pages that adapters keep; by default `ADAPTER_FLOOR`.
            facts, stored: as for `SnapshotManager`.
            peer_facts: `facts` of `PeerPages`.
        """
        costs = costs or CostModel()
        kv_pool, adapter_pool = _pools(layout.num_pages, options.adapter_pool_fraction)
        gdsf = GdsfClock()
        prefixes = None
        if options.enable_prefix_caching:
            prefixes = PrefixCache(kv_pool, gdsf, lambda: costs.recompute_s(layout.page_size))

        def reload_s(key: AdapterKey, of: AdapterLayout) -> float:
            return costs.reload_s(of.nbytes, on_host=is_on_host(key))

        kv = KVCacheManager(kv_pool, layout.page_size, prefixes)
        adapters = AdapterCache(adapter_pool, layout.page_bytes, reload_s, gdsf)
        adapter_manager = AdapterManager(adapters, prefixes, options.host_cache_bytes, costs, clock, is_on_host)
        floor = int((ADAPTER_FLOOR if adapter_floor is None else adapter_floor) * layout.num_pages)
        evictor = Evictor(kv_pool, kv, adapter_manager, prefixes, floor)
        block, kept = layout.block_bytes, options.snapshot_bytes
        snapshots = SnapshotManager(facts, stored, kv, prefixes, adapter_manager, evictor, costs, block, kept)
        return cls(
            layout=layout,
            kv_pool=kv_pool,
            adapter_pool=adapter_pool,
            prefixes=prefixes,
            kv=kv,
            adapters=adapters,
            adapter_manager=adapter_manager,
            evictor=evictor,
            swap=SwapSpace(preemption, options.swap_bytes, block, costs),
            snapshots=snapshots,
            peer_pages=PeerPages(peer_facts, kv, prefixes, snapshots, costs, kv_pool.num_pages, clock),
            ahead=PagesAhead(kv_pool, layout.page_bytes, layout.num_slabs, block),
            costs=costs,
            clock=clock,
        )

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """Return the distinct pools."""
        return (self.kv_pool,) if self.kv_pool is self.adapter_pool else (self.kv_pool, self.adapter_pool)

    @property
    def num_free(self) -> int:
        """Return the number of free pages."""
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_unused_prefix_pages(self) -> int:
        """Return the number of cached and orphaned prefix pages."""
        return 0 if self.prefixes is None else self.prefixes.num_cached + self.prefixes.num_orphaned

    @property
    def num_kv_pages(self) -> int:
        """Return the number of pages that requests or leases hold; a shared page counts once."""
        held = self.layout.num_pages - self.num_free
        return held - self.adapters.num_pages - self.num_unused_prefix_pages

    def on_arrival(self, request: Request) -> None:
        """Begin to fetch the pages of a new request's prefix, from a peer or the disk."""
        self.peer_pages.on_arrival(request)
        self.snapshots.on_arrival(request)

    def begin_step(self, keep_free: int) -> None:
        """End expired leases, and take pages for fetched prefixes; `keep_free` pages are left free."""
        self.peer_pages.expire()
        self.snapshots.place(keep_free)

    def wake_s(self) -> float | None:
        """Return when the next step is needed: now, if the wait for a snapshot has ended; None if no time is set."""
        if self.snapshots.has_ended:
            return 0.0
        times = (self.peer_pages.wake_s(), self.adapter_manager.wake_s())
        return min((t for t in times if t is not None), default=None)

    def max_kv_pages(self, layouts: Iterable[AdapterLayout]) -> int:
        """Return the most pages that one request can have for its keys and values, besides those of its adapter."""
        if self.adapter_pool is not self.kv_pool:
            return self.kv_pool.num_pages
        return self.kv_pool.num_pages - sum(map(self.adapters.pages_for, layouts))

    def load_adapter(
        self,
        key: AdapterKey,
        layout: AdapterLayout,
        keep_free: int,
        level: EvictionLevel,
        spared: Spared = NONE_SPARED,
    ) -> bool:
        """Move an adapter one state further towards the pool, unless work on it is under way.

        Args:
            keep_free: pages to be left free for keys and values.
        Returns:
            False if it is in host memory and this level frees no pages for it.
        """
        match self.adapter_manager.state(key):
            case AdapterState.ON_DISK:
                self.adapter_manager.request_load(key, layout)
            case AdapterState.ON_HOST:
                return self.evictor.place_adapter(key, keep_free, level, spared) is not None
        return True

    def prefetch(self, keep_free: int, held_back: Iterable[AdapterKey] = ()) -> None:
        """Take pages for snapshots whose adapters have got theirs in this step. Load reserved adapters that no request
        waits for, pinned ones first, into pages that no request needs.

        While the pool has no room for a reserved adapter, it is not loaded and its host copy is released. The host
        copies of adapters whose requests limits hold back are released too: other loads may need the host memory.
        """
        manager = self.adapter_manager
        self.snapshots.place(keep_free)
        for key in held_back:
            if not self.load_adapter(key, manager.host_layout(key), keep_free, EvictionLevel.PREFETCH):
                manager.cancel(key)
        for key, layout in manager.reserved_missing():
            is_new = manager.state(key) is AdapterState.ON_DISK
            if is_new and not self.evictor.can_place([layout], keep_free, EvictionLevel.PREFETCH):
                break
            if not self.load_adapter(key, layout, keep_free, EvictionLevel.PREFETCH):
                manager.cancel(key)
                break

    def estimate_ready_s(
        self, missing: Sequence[tuple[AdapterKey, AdapterLayout]], *, on_host: bool, keep_free: int
    ) -> tuple[float, str]:
        """Estimate the seconds until all of these adapters are resident, and return why they are not: for
        `Retry-After`."""
        manager = self.adapter_manager
        seconds = max(manager.estimate_load_s(key, layout, on_host=on_host) for key, layout in missing)
        if self.evictor.can_place([layout for _, layout in missing], keep_free, EvictionLevel.PREFETCH):
            return seconds, "it is being brought in"
        return max(seconds, NO_ROOM_RETRY_S), "running requests leave no room for it now"

    def check_integrity(self) -> None:
        """Compare every page's references with its holders, and every account with the others.

        Raises:
            AssertionError: they disagree.
        """
        of_kv = [*self.kv.references(), *(self.prefixes.references() if self.prefixes is not None else ())]
        of_adapters = list(self.adapters.references())
        if self.kv_pool is self.adapter_pool:
            self.kv_pool.check_integrity(of_kv + of_adapters)
        else:
            self.kv_pool.check_integrity(of_kv)
            self.adapter_pool.check_integrity(of_adapters)
        if self.prefixes is not None:
            self.prefixes.check_integrity(self.adapter_manager.is_resident)
        self.adapter_manager.check_integrity()
        self.snapshots.check_integrity()
        self.peer_pages.check_integrity()
        assert self.num_kv_pages == self.kv.num_pages, "KV pages do not add up"


def _pools(num_pages: int, adapter_share: float | None) -> tuple[PagePool, PagePool]:
    if adapter_share is None:
        pool = PagePool(num_pages)
        return pool, pool
    of_adapters = min(num_pages - 1, max(1, round(adapter_share * num_pages)))
    return PagePool(num_pages - of_adapters), PagePool(of_adapters, num_pages - of_adapters)
