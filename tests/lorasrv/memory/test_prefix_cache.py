"""Pages kept after their request: keyed by content, tenant and the whole past; dropped tail first, strangers first."""

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.prefix_cache import PrefixCache, page_hash, root_hash

MIA, ZOE = AdapterKey("a" * 64), AdapterKey("b" * 64)
Chain = list[tuple[bytes, int]]


class Cache(PrefixCache):
    """A cache over a pool of its own."""

    def __init__(self, pages: int = 16) -> None:
        self.pool = PagePool(pages)
        super().__init__(self.pool)

    def kept(self, count: int, adapter: AdapterKey | None) -> Chain:
        """Return a chain of pages that only the cache holds any more."""
        pages = self.pool.allocate_singles(count)
        assert pages is not None
        digest, chain = root_hash(adapter, ""), []
        for number, page in enumerate(pages):
            digest = page_hash(digest, (number,))
            assert self.insert(digest, page, adapter)
            chain.append((digest, page))
        for page in reversed(pages):
            self.rest(page)
        return chain

    def rest(self, page: int) -> None:
        """A holder lets go of a page."""
        self.pool.release((page,))
        self.release(page)

    def use(self, chain: Chain, times: int = 1) -> None:
        for digest, page in chain * times:
            assert self.lookup(digest) == page
            self.count_use(page)
            self.rest(page)

    def check(self) -> None:
        self.check_integrity()
        self.pool.check_integrity(self.references())


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


def test_the_tail_of_a_prompt_goes_before_its_head_and_no_page_in_use() -> None:
    cache = Cache(8)
    chain = cache.kept(4, None)
    ((digest, page), *_) = chain
    assert cache.lookup(digest) == page
    assert cache.lookup(b"unknown") is None
    assert cache.num_cached == 3
    for kept in (3, 2, 1):
        assert cache.evict_lowest()
        assert [digest in cache._pages for digest, _ in chain] == [n < kept for n in range(4)]
    assert not cache.evict_lowest(), "in use"
    cache.rest(page)
    cache.check()
    assert cache.evict_lowest()
    assert not cache.evict_lowest()
    assert cache.pool.num_free == 8


def test_a_second_page_of_the_same_content_is_not_kept() -> None:
    cache = Cache()
    ((digest, _),) = cache.kept(1, None)
    other = cache.pool.allocate_singles(1)
    assert other is not None
    assert not cache.insert(digest, other[0], None)
    cache.pool.release(other)
    cache.check()


def test_pages_of_an_adapter_that_left_go_first_and_come_back_with_it() -> None:
    cache = Cache()
    base, mia, zoe = cache.kept(2, None), cache.kept(3, MIA), cache.kept(1, ZOE)
    cache.on_adapter_evicted(MIA)
    assert (cache.num_orphaned, cache.num_cached) == (3, 3)
    cache.check()
    cache.on_adapter_resident(MIA)
    assert (cache.num_orphaned, cache.num_cached) == (0, 6)
    cache.on_adapter_evicted(MIA)
    for _ in range(3):
        assert cache.evict_orphaned()
    assert not cache.evict_orphaned()
    assert not any(cache.lookup(digest) for digest, _ in mia)
    assert cache.num_pages == len(base) + len(zoe)
    cache.on_adapter_evicted(ZOE)
    assert cache.lookup(zoe[0][0]) == zoe[0][1], "a page may be used again before its adapter is back"
    assert cache.num_orphaned == 0


def test_a_prefix_that_is_used_again_and_again_takes_no_memory() -> None:
    """Where pages are never short nothing is evicted, and nothing asks for the lowest page."""
    cache = Cache()
    chain = cache.kept(8, None)
    cache.use(chain, 1000)
    assert len(cache._queue) < 100
    cache.check()
    assert [cache.evict_lowest() for _ in range(9)] == [True] * 8 + [False]


def test_pages_keep_their_names_when_they_move() -> None:
    cache = Cache()
    _, (digest, page), _ = cache.kept(3, MIA)
    cache.pool.take_page(9)
    cache.pool.move({page: 9})
    cache.move({page: 9})
    cache.check()
    assert cache.lookup(digest) == 9
    cache.on_adapter_evicted(MIA)
    assert cache.num_orphaned == 2


def test_reused_pages_outlive_those_that_never_were() -> None:
    cache = Cache()
    old, new = cache.kept(2, None), cache.kept(3, MIA)
    cache.use(old)
    for _ in new:
        assert cache.evict_lowest()
    cache.use(old)
    assert not any(cache.lookup(digest) for digest, _ in new)


def test_where_prompts_never_repeat_a_page_is_worth_nothing() -> None:
    cache = Cache(2000)
    once = cache.kept(1000, None)
    assert cache.reuse_rate < 0.002
    assert cache.lowest_score() < 0.002
    cache.use(once[:500])
    assert cache.reuse_rate == pytest.approx(0.5, rel=0.01)
    for number in range(30):
        cache.kept(100, AdapterKey(f"{number:064x}"))
        for _ in range(100):
            cache.evict_lowest()
    assert cache.reuse_rate < 0.3, "uses of long ago count less and less"


def test_uses_of_long_ago_are_forgotten() -> None:
    cache = Cache(100)
    old = cache.kept(1, None)
    cache.use(old, 40)
    for number in range(300):
        cache.use(cache.kept(2, AdapterKey(f"{number:064x}")), 2)
        cache.evict_lowest()
        cache.evict_lowest()
        if old[0][1] not in cache:
            return
    raise AssertionError("the page of old is still there")


def test_integrity_check_bites() -> None:
    cache = Cache()
    cache.kept(2, None)
    cache._cached.popitem()
    with pytest.raises(AssertionError, match="evictable"):
        cache.check_integrity()
