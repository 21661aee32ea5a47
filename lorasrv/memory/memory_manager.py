"""Everything that keeps account of the pool, put together: who holds which page, who comes, who gives way. No memory.

One pool for keys, values and adapters; or, for comparison, one split in two for good.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions
from lorasrv.memory.adapter_cache import AdapterCache
from lorasrv.memory.adapter_manager import AdapterManager
from lorasrv.memory.cost_model import CostModel, GdsfClock
from lorasrv.memory.eviction import Evictor
from lorasrv.memory.kv_cache_manager import KVCacheManager, SwapSpace
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.prefix_cache import PrefixCache
from sgmv_kernels.formats.adapter_panels import AdapterLayout

ADAPTER_FLOOR = 0.125
"""Share of the pool's pages that stay with adapters while only new requests' keys and values want them."""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Sizes of the pool: `page_bytes` are of one layer."""

    num_pages: int
    page_size: int
    page_bytes: int
    num_layers: int

    @property
    def block_bytes(self) -> int:
        """A page in all layers."""
        return self.page_bytes * self.num_layers


@dataclass(frozen=True)
class MemoryManager:
    """The accounts of one engine. `kv_pool` and `adapter_pool` are the same unless the pool is split."""

    geometry: PoolLayout
    kv_pool: PagePool
    adapter_pool: PagePool
    prefixes: PrefixCache | None
    kv: KVCacheManager
    adapters: AdapterCache
    reclaimer: Evictor
    tiers: AdapterManager
    swap: SwapSpace
    costs: CostModel
    clock: Callable[[], float]

    @classmethod
    def make(
        cls,
        geometry: PoolLayout,
        options: MemoryOptions,
        preemption: str = "auto",
        is_on_host: Callable[[AdapterKey], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
        costs: CostModel | None = None,
        adapter_floor: float = ADAPTER_FLOOR,
    ) -> "MemoryManager":
        """Empty accounts. `is_on_host` tells whether an adapter that leaves would be found in host memory; `costs` are
        what is known of the machine already.
        """
        costs = costs or CostModel()
        kv_pool, adapter_pool = _pools(geometry.num_pages, options.adapter_pool_fraction)
        aging = GdsfClock()
        prefixes = None
        if options.prefix_caching:
            prefixes = PrefixCache(kv_pool, aging, lambda: costs.recompute_s(geometry.page_size))

        def reload_s(key: AdapterKey, layout: AdapterLayout) -> float:
            return costs.reload_s(layout.nbytes, on_host=is_on_host(key))

        kv = KVCacheManager(kv_pool, geometry.page_size, prefixes)
        adapters = AdapterCache(
            adapter_pool,
            geometry.page_bytes,
            reload_s,
            prefixes.adapter_came if prefixes is not None else lambda _: None,
            prefixes.adapter_left if prefixes is not None else lambda _: None,
            aging,
        )
        floor = int(adapter_floor * geometry.num_pages)
        reclaimer = Evictor(kv_pool, kv, adapters, prefixes, floor)
        tiers = AdapterManager(adapters, reclaimer, options.host_cache_bytes, costs, clock)
        swap = SwapSpace(preemption, options.swap_bytes, geometry.block_bytes, costs)
        return cls(geometry, kv_pool, adapter_pool, prefixes, kv, adapters, reclaimer, tiers, swap, costs, clock)

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return (self.kv_pool,) if self.kv_pool is self.adapter_pool else (self.kv_pool, self.adapter_pool)

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_unused_prefix_pages(self) -> int:
        """Cached pages that no request uses now."""
        return 0 if self.prefixes is None else self.prefixes.num_resting + self.prefixes.num_stranded

    @property
    def num_kv_pages(self) -> int:
        """Pages that requests hold, those that several share once."""
        held = self.geometry.num_pages - self.num_free
        return held - self.adapters.num_pages - self.num_unused_prefix_pages

    def max_kv_pages(self, layout: AdapterLayout | None) -> int:
        """Pages that a request has at most for its keys and values, beside its adapter."""
        if layout is None or self.adapter_pool is not self.kv_pool:
            return self.kv_pool.num_pages
        return self.kv_pool.num_pages - self.adapters.pages_for(layout)

    def check_integrity(self) -> None:
        """Every page has its holders, and every account agrees with the others.

        Raises:
            AssertionError: they do not.
        """
        of_kv = [*self.kv.references(), *(self.prefixes.references() if self.prefixes is not None else ())]
        of_adapters = list(self.adapters.references())
        if self.kv_pool is self.adapter_pool:
            self.kv_pool.check_integrity(of_kv + of_adapters)
        else:
            self.kv_pool.check_integrity(of_kv)
            self.adapter_pool.check_integrity(of_adapters)
        if self.prefixes is not None:
            self.prefixes.check_integrity(self.adapters.is_ready)
        self.adapters.check_integrity()
        self.tiers.check_integrity()
        assert self.num_kv_pages == self.kv.num_pages, "KV pages do not add up"


def _pools(num_pages: int, adapter_share: float | None) -> tuple[PagePool, PagePool]:
    if adapter_share is None:
        pool = PagePool(num_pages)
        return pool, pool
    of_adapters = min(num_pages - 1, max(1, round(adapter_share * num_pages)))
    return PagePool(num_pages - of_adapters), PagePool(of_adapters, num_pages - of_adapters)
