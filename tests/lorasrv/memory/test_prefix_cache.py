"""Pages kept after their request: keyed by content, tenant and the whole past; dropped tail first, strangers first."""

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.prefix_cache import PrefixCache, page_hash, root_hash

MIA, ZOE = AdapterKey("a" * 64), AdapterKey("b" * 64)


def _kept(cache: PrefixCache, pool: PagePool, count: int, adapter: AdapterKey | None) -> list[tuple[bytes, int]]:
    """A chain of pages that only the cache holds any more."""
    pages = pool.allocate_singles(count)
    assert pages is not None
    digest, chain = root_hash(adapter, ""), []
    for number, page in enumerate(pages):
        digest = page_hash(digest, (number,))
        assert cache.keep(digest, page, adapter)
        chain.append((digest, page))
    for page in reversed(pages):
        pool.release((page,))
        cache.release(page)
    return chain


def _check(cache: PrefixCache, pool: PagePool) -> None:
    cache.check_integrity()
    pool.check_integrity(cache.references())


def test_a_hash_names_adapter_tenant_and_the_whole_past() -> None:
    hashes = {
        page_hash(root_hash(adapter, salt), ids)
        for adapter in (None, MIA, ZOE)
        for salt in ("", "a", "b")
        for ids in ((1, 2, 3), (3, 2, 1), (1, 2, 4))
    }
    assert len(hashes) == 27
    assert root_hash(AdapterKey("ab"), "c") != root_hash(AdapterKey("a"), "bc"), "parts do not run together"
    first = page_hash(root_hash(None, ""), (1,))
    assert page_hash(first, (2,)) != page_hash(root_hash(None, ""), (2,))


def test_the_tail_of_a_prompt_goes_before_its_head() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    chain = _kept(cache, pool, 4, None)
    for kept in (3, 2, 1, 0):
        assert cache.drop_resting()
        assert [digest in cache._pages for digest, _ in chain] == [n < kept for n in range(4)]
        _check(cache, pool)
    assert not cache.drop_resting()
    assert pool.num_free == 8


def test_a_page_in_use_is_not_dropped() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    (digest, page), _ = _kept(cache, pool, 2, None)
    assert cache.find(digest) == page
    assert cache.num_resting == 1
    assert cache.drop_resting()
    assert not cache.drop_resting()
    pool.release((page,))
    cache.release(page)
    _check(cache, pool)
    assert cache.find(b"unknown") is None


def test_a_second_page_of_the_same_content_is_not_kept() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    ((digest, _),) = _kept(cache, pool, 1, None)
    other = pool.allocate_singles(1)
    assert other is not None
    assert not cache.keep(digest, other[0], None)
    pool.release(other)
    _check(cache, pool)


def test_pages_of_an_adapter_that_left_go_first_and_come_back_with_it() -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool)
    base = _kept(cache, pool, 2, None)
    mia = _kept(cache, pool, 3, MIA)
    zoe = _kept(cache, pool, 1, ZOE)
    cache.adapter_left(MIA)
    assert (cache.num_stranded, cache.num_resting) == (3, 3)
    _check(cache, pool)
    cache.adapter_came(MIA)
    assert (cache.num_stranded, cache.num_resting) == (0, 6)
    cache.adapter_left(MIA)
    for _ in range(3):
        assert cache.drop_stranded()
    assert not cache.drop_stranded()
    assert not any(cache.find(digest) for digest, _ in mia)
    assert cache.num_pages == len(base) + len(zoe)
    cache.adapter_left(ZOE)
    assert cache.find(zoe[0][0]) == zoe[0][1], "a page may be used again before its adapter is back"
    assert cache.num_stranded == 0


def test_pages_keep_their_names_when_they_move() -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool)
    chain = _kept(cache, pool, 3, MIA)
    pool.take_page(9)
    pool.move({chain[1][1]: 9})
    cache.move({chain[1][1]: 9})
    _check(cache, pool)
    assert cache.find(chain[1][0]) == 9
    cache.adapter_left(MIA)
    assert cache.num_stranded == 2


def test_what_was_used_again_outlives_what_never_was() -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool)
    old, new = _kept(cache, pool, 2, None), _kept(cache, pool, 3, MIA)
    for digest, page in old:
        assert cache.find(digest) == page
        pool.release((page,))
        cache.release(page)
    for _ in new:
        assert cache.drop_resting()
    assert [cache.find(digest) for digest, _ in old] == [page for _, page in old]
    assert not any(cache.find(digest) for digest, _ in new)


def test_where_prompts_never_repeat_a_page_is_worth_nothing() -> None:
    pool = PagePool(2000)
    cache = PrefixCache(pool)
    once = _kept(cache, pool, 1000, None)
    assert cache.reuse_share < 0.002
    assert cache.least_worth() < 0.002
    for digest, page in once[:500]:
        cache.find(digest)
        pool.release((page,))
        cache.release(page)
    assert cache.reuse_share == pytest.approx(0.5, rel=0.01)
    for number in range(30):
        _kept(cache, pool, 100, AdapterKey(f"{number:064x}"))
        for _ in range(100):
            cache.drop_resting()
    assert cache.reuse_share < 0.3, "what is long past counts less and less"


def test_old_fame_fades() -> None:
    pool = PagePool(100)
    cache = PrefixCache(pool)
    ((digest, page),) = _kept(cache, pool, 1, None)
    for _ in range(40):
        cache.find(digest)
        pool.release((page,))
        cache.release(page)
    for number in range(300):
        chain = _kept(cache, pool, 2, AdapterKey(f"{number:064x}"))
        for new, at in chain:
            cache.find(new)
            cache.find(new)
            pool.release((at, at))
            cache.release(at)
        cache.drop_resting()
        cache.drop_resting()
        if page not in cache:
            return
    raise AssertionError("the page of old is still there")


def test_integrity_check_bites() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    _kept(cache, pool, 2, None)
    cache._resting.popitem()
    with pytest.raises(AssertionError, match="resting"):
        cache.check_integrity()
