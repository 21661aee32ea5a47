"""Page tables: beginnings shared, forks, and a copy for whoever writes first."""

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.memory.kv_cache_manager import KVCacheManager
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.prefix_cache import PrefixCache
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import PageCopy

PAGE = 4
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
MIA = AdapterKey("a" * 64)


@pytest.fixture
def kv() -> KVCacheManager:
    pool = PagePool(24)
    return KVCacheManager(pool, PAGE, PrefixCache(pool))


def _check(kv: KVCacheManager) -> None:
    assert kv._prefixes is not None
    kv._prefixes.check_integrity()
    kv._pool.check_integrity([*kv.references(), *kv._prefixes.references()])


def _computed(
    kv: KVCacheManager, rid: RequestId, ids: list[int], key: AdapterKey | None = None, salt: str = ""
) -> None:
    kv.open(rid, key, salt)
    assert kv.allocate(rid, 0, len(ids)) == ()
    kv.cache_full_pages(rid, ids, len(ids))


def test_a_prompt_that_begins_alike_takes_the_pages_and_computes_at_least_one_token(kv: KVCacheManager) -> None:
    ids = list(range(12))
    _computed(kv, A, ids)
    first = kv.page_table(A)
    kv.free(A)
    for prompt, tokens in ((ids, 8), ([*ids, 99], 12), (ids[:8], 4), ([*ids[:5], 7, 7, 7, 7], 4), ([5, *ids], 0)):
        kv.open(B, None, "")
        assert kv.attach_prefix(B, prompt) == tokens
        assert kv.page_table(B) == first[: tokens // PAGE]
        kv.free(B)
        _check(kv)


@pytest.mark.parametrize(("key", "salt"), [(MIA, ""), (None, "tenant")])
def test_neither_another_adapter_nor_another_tenant_meets_them(
    kv: KVCacheManager, key: AdapterKey | None, salt: str
) -> None:
    ids = list(range(12))
    _computed(kv, A, ids)
    kv.open(B, key, salt)
    assert kv.attach_prefix(B, ids) == 0


def test_generated_tokens_are_kept_too(kv: KVCacheManager) -> None:
    ids = list(range(6))
    kv.open(A, None, "")
    assert kv.allocate(A, 0, 6) == ()
    for count in range(6, 14):
        kv.cache_full_pages(A, ids, count)
        ids.append(50 + count)
        assert kv.allocate(A, count, len(ids)) == ()
    kv.free(A)
    kv.open(B, None, "")
    assert kv.attach_prefix(B, ids) == 12
    _check(kv)


def test_whoever_writes_into_a_shared_page_gets_a_copy(kv: KVCacheManager) -> None:
    kv.open(A, None, "")
    assert kv.allocate(A, 0, 10) == ()
    for child in (B, C):
        kv.open(child, None, "")
        kv.fork(A, child, 9)
    shared = kv.page_table(A)
    assert kv.page_table(B) == kv.page_table(C) == shared
    assert kv.missing_pages(B, 9, 10) == 1
    copies = kv.allocate(B, 9, 10)
    assert copies == (PageCopy(shared[2], kv.page_table(B)[2]),)
    assert kv.page_table(B)[:2] == shared[:2]
    assert kv.allocate(C, 9, 10) == (PageCopy(shared[2], kv.page_table(C)[2]),)
    assert kv.allocate(A, 10, 11) == (), "the last holder writes where it is"
    assert len({kv.page_table(r)[2] for r in (A, B, C)}) == 3
    assert kv.num_copies == 2
    assert kv.num_pages == 5
    _check(kv)
    for rid in (B, A, C):
        kv.free(rid)
    assert kv._pool.num_free == 24


def test_a_page_of_the_prefix_cache_is_never_written(kv: KVCacheManager) -> None:
    """A fork computes the prompt's last token again; where that ends a page, the page may be in the cache already."""
    ids = list(range(8))
    _computed(kv, A, ids)
    kv.open(B, None, "")
    kv.fork(A, B, 7)
    copies = kv.allocate(B, 7, 8)
    assert copies is not None
    assert copies[0].source == kv.page_table(A)[1]
    assert kv.page_table(B)[1] != kv.page_table(A)[1]
    _check(kv)


def test_nothing_changes_where_pages_are_missing(kv: KVCacheManager) -> None:
    kv.open(A, None, "")
    assert kv.allocate(A, 0, 10) == ()
    kv.open(B, None, "")
    kv.fork(A, B, 9)
    taken = kv._pool.allocate_singles(kv._pool.num_free)
    assert taken is not None
    before = kv.page_table(B)
    assert kv.allocate(B, 9, 10) is None
    assert kv.page_table(B) == before
    kv._pool.release(taken)
    _check(kv)


def test_tables_follow_moves(kv: KVCacheManager) -> None:
    kv.open(A, None, "")
    assert kv.allocate(A, 0, 10) == ()
    old = kv.page_table(A)
    kv._pool.take_page(20)
    kv._pool.move({old[1]: 20})
    kv.move({old[1]: 20})
    assert kv.page_table(A) == (old[0], 20, old[2])
    _check(kv)


def test_what_was_taken_ahead_is_given_back(kv: KVCacheManager) -> None:
    ids = list(range(20))
    _computed(kv, A, ids[:6])
    assert kv.num_writable_tokens(A) == 8
    assert kv.allocate(A, 6, 20) == ()
    first = kv.page_table(A)
    assert len(first) == 5
    for num_tokens, num_pages in ((20, 5), (17, 5), (16, 4), (9, 3), (8, 2), (7, 2)):
        kv.truncate(A, num_tokens)
        assert kv.page_table(A) == first[:num_pages]
        _check(kv)
    assert kv._pool.num_free == 22
    kv.open(B, None, "")
    assert kv.attach_prefix(B, ids) == 4, "the page that was computed is still there"


def test_what_is_given_back_stays_with_others_that_hold_it(kv: KVCacheManager) -> None:
    ids = list(range(13))
    _computed(kv, A, ids)
    kv.open(B, None, "")
    assert kv.attach_prefix(B, ids) == 12
    kv.truncate(A, 5)
    assert kv.page_table(B)[:2] == kv.page_table(A)
    kv.free(B)
    assert kv._prefixes is not None
    assert kv._prefixes.num_cached == 1
    _check(kv)
