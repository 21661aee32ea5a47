"""Residency: pins hold, idle ones make room, panels split when no run is left."""

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.memory.adapter_cache import AdapterCache
from lorasrv.memory.page_pool import PagePool
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

PAGE = 1024
SITES = (SiteDims(64, (64,)),)


def _layout(rank: int) -> AdapterLayout:
    return AdapterLayout(SITES, (((rank,),), ((rank,),)), 2)


A, B, C = (AdapterKey(x * 64) for x in "abc")


def _bring(cache: AdapterCache, key: AdapterKey, rank: int = 16) -> bool:
    if cache.place(key, _layout(rank)) is None:
        return False
    cache.make_evictable(key)
    return True


def _evict(cache: AdapterCache, *spared: AdapterKey) -> bool:
    """As `AdapterManager.evict_lowest`."""
    lowest = cache.lowest(spared=set(spared))
    if lowest is None:
        return False
    cache.clock.advance(lowest[0])
    cache.remove(lowest[1])
    return True


def _use(cache: AdapterCache, key: AdapterKey, times: int = 1) -> None:
    for _ in range(times):
        cache.pin(key)
        cache.unpin(key)


def _cache(pages: int) -> AdapterCache:
    return AdapterCache(PagePool(pages), PAGE)


def _check(cache: AdapterCache) -> None:
    cache.check_integrity()
    cache.pool.check_integrity(cache.references())


def test_what_is_used_least_goes_first() -> None:
    cache = _cache(60)
    for key in (A, B, C):
        assert _bring(cache, key)
    _use(cache, A, 3)
    _use(cache, B, 2)
    _use(cache, C, 3)
    assert _evict(cache)
    assert B not in cache
    _check(cache)


def test_old_fame_fades() -> None:
    """Forty uses long ago do not outlive what is used now: the clock rises with every eviction."""
    cache = _cache(200)
    assert _bring(cache, A)
    _use(cache, A, 40)
    for number in range(60):
        key = AdapterKey(f"{number:064x}")
        assert _bring(cache, key)
        _use(cache, key, 2)
        if number:
            assert _evict(cache)
        _check(cache)
        if A not in cache:
            return
    raise AssertionError("the adapter of old is still there")


def test_what_is_costly_to_bring_back_stays() -> None:
    cost = {A: 5.0, B: 1.0, C: 3.0}
    cache = AdapterCache(PagePool(60), PAGE, lambda key, _: cost[key])
    for key in (A, B, C):
        assert _bring(cache, key)
    left = []
    for _ in range(3):
        before = {key for key in cost if key in cache}
        assert _evict(cache)
        left += [key for key in before if key not in cache]
    assert left == [B, C, A]


def test_a_pinned_adapter_and_one_being_filled_are_never_evicted() -> None:
    cache = _cache(60)
    assert _bring(cache, A)
    cache.pin(A)
    assert cache.place(B, _layout(16))
    assert not cache.is_evictable(B)
    assert not _evict(cache)
    with pytest.raises(AssertionError, match="in use"):
        cache.remove(A)
    with pytest.raises(AssertionError, match="not resident"):
        cache.pin(B)
    cache.make_evictable(B)
    assert not _evict(cache, B), "spared"
    assert _evict(cache)
    assert A in cache
    assert B not in cache
    _check(cache)


def test_splits_at_panel_borders_when_no_run_is_long_enough() -> None:
    pool = PagePool(60)
    taken = pool.allocate_singles(60)
    assert taken is not None
    pool.release([p for p in taken if p % 6])
    cache = AdapterCache(pool, PAGE)
    placed = cache.place(A, _layout(48))
    assert placed is not None
    assert len(placed.runs) > 1
    pool.check_integrity([*[p for p in taken if p % 6 == 0], *cache.references()])
    assert cache.place(B, _layout(4), keep_free=pool.num_free) is None, "the pages to keep free are counted"


def test_pins_must_balance() -> None:
    cache = _cache(20)
    assert _bring(cache, A, 4)
    with pytest.raises(AssertionError, match="not pinned"):
        cache.unpin(A)
