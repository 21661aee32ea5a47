"""Residency: pins hold, idle ones make room, panels split when no run is left."""

from collections.abc import Callable

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.memory.adapter_cache import AdapterCache
from lorasrv.memory.page_pool import PagePool
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

PAGE = 1024
SITES = (SiteDims(64, (64,)),)


A, B, C = (AdapterKey(x * 64) for x in "abc")


def _layout(rank: int) -> AdapterLayout:
    return AdapterLayout(SITES, (((rank,),), ((rank,),)), 2)


class Cache(AdapterCache):
    """A cache over a pool of its own."""

    def __init__(self, pages: int = 60, *costs: Callable[..., float]) -> None:
        super().__init__(PagePool(pages), PAGE, *costs)

    def bring(self, *keys: AdapterKey, rank: int = 16) -> None:
        for key in keys:
            assert self.place(key, _layout(rank)) is not None
            self.make_evictable(key)

    def use(self, key: AdapterKey, times: int) -> None:
        for _ in range(times):
            self.pin(key)
            self.count_use(key)
            self.unpin(AdapterKey("".join(key)))  # equal, but another object

    def evicted(self, *spared: AdapterKey) -> AdapterKey | None:
        """Evict as `AdapterManager.evict_lowest` does, and return what."""
        lowest = self.lowest(spared=set(spared))
        if lowest is None:
            return None
        self.clock.advance(lowest[0])
        self.remove(lowest[1])
        self.check_integrity()
        self.pool.check_integrity(self.references())
        return lowest[1]


def test_the_least_used_goes_first() -> None:
    cache = Cache()
    cache.bring(A, B, C)
    for key, times in ((A, 3), (B, 2), (C, 3)):
        cache.use(key, times)
    assert cache.evicted() == B


def test_uses_of_long_ago_are_forgotten() -> None:
    """Forty uses long ago do not outlive what is used now: the clock rises with every eviction."""
    cache = Cache(200)
    cache.bring(A)
    cache.use(A, 40)
    for number in range(60):
        key = AdapterKey(f"{number:064x}")
        cache.bring(key)
        cache.use(key, 2)
        if number and cache.evicted() == A:
            return
    raise AssertionError("the adapter of old is still there")


def test_an_adapter_that_is_costly_to_bring_back_stays() -> None:
    cost = {A: 5.0, B: 1.0, C: 3.0}
    cache = Cache(60, lambda key, _: cost[key])
    cache.bring(A, B, C)
    assert [cache.evicted() for _ in range(4)] == [B, C, A, None]


def test_a_pinned_adapter_and_one_being_filled_are_never_evicted() -> None:
    cache = Cache()
    cache.bring(A)
    with pytest.raises(AssertionError, match="not pinned"):
        cache.unpin(A)
    cache.pin(A)
    assert cache.place(B, _layout(16))
    assert not cache.is_evictable(B)
    assert cache.evicted() is None
    with pytest.raises(AssertionError, match="in use"):
        cache.remove(A)
    with pytest.raises(AssertionError, match="not resident"):
        cache.pin(B)
    cache.make_evictable(B)
    assert cache.evicted(B) is None, "spared"
    assert cache.evicted() == B
    assert A in cache


def test_splits_at_panel_borders_when_no_run_is_long_enough() -> None:
    cache = Cache()
    taken = cache.pool.allocate_singles(60)
    assert taken is not None
    cache.pool.release([p for p in taken if p % 6])
    placed = cache.place(A, _layout(48))
    assert placed is not None
    assert len(placed.runs) > 1
    cache.pool.check_integrity([*[p for p in taken if p % 6 == 0], *cache.references()])
    assert cache.place(B, _layout(4), keep_free=cache.pool.num_free) is None, "the pages to keep free are counted"
