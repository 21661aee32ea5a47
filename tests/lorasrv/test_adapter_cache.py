"""Residency: pins hold, idle ones make room, panels split when no run is left."""

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.adapter_cache import AdapterCache
from lorasrv.page_pool import PagePool
from sgmv_kernels.layout import AdapterLayout, SiteDims

PAGE = 1024
SITES = (SiteDims(64, (64,)),)


def _layout(rank: int) -> AdapterLayout:
    return AdapterLayout(SITES, (((rank,),), ((rank,),)), 2)


A, B, C = (AdapterKey(x * 64) for x in "abc")


def test_least_recently_used_idle_adapter_goes_first() -> None:
    pages = _layout(16).num_pages(PAGE)
    pool = PagePool(2 * pages)
    cache = AdapterCache(pool, PAGE)
    assert cache.place(A, _layout(16))
    assert cache.place(B, _layout(16))
    cache.pin(A)
    cache.unpin(A)
    assert cache.place(C, _layout(16))
    assert A in cache
    assert B not in cache
    assert cache.num_evictions == 1
    pool.check_integrity(cache.references())


def test_a_pinned_adapter_is_never_evicted() -> None:
    pages = _layout(16).num_pages(PAGE)
    pool = PagePool(2 * pages)
    cache = AdapterCache(pool, PAGE)
    for key in (A, B):
        assert cache.place(key, _layout(16))
        cache.pin(key)
    assert cache.place(C, _layout(16)) is None
    assert not cache.evict_idle()
    cache.unpin(A)
    assert cache.place(C, _layout(16), keep_free=1) is None, "the pages to keep free are counted"
    assert A in cache, "nothing is evicted when that would not be enough"
    assert cache.place(C, _layout(16))
    assert A not in cache
    assert B in cache


def test_splits_at_panel_borders_when_no_run_is_long_enough() -> None:
    layout = _layout(48)
    pool = PagePool(60)
    taken = pool.allocate_low(60)
    assert taken is not None
    pool.release([p for p in taken if p % 6])
    cache = AdapterCache(pool, PAGE)
    placed = cache.place(A, layout)
    assert placed is not None
    assert len(placed.runs) > 1
    pool.check_integrity([*[p for p in taken if p % 6 == 0], *cache.references()])


def test_pins_must_balance() -> None:
    cache = AdapterCache(PagePool(20), PAGE)
    assert cache.place(A, _layout(4))
    with pytest.raises(AssertionError, match="not pinned"):
        cache.unpin(A)
