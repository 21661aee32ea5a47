"""Page tables: beginnings shared, forks, and a copy for the holder that writes first."""

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.memory.cost_model import CostModel
from lorasrv.memory.kv_cache_manager import KVCacheManager, SwapSpace
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.prefix_cache import PrefixCache
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import PageCopy

PAGE = 4
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
MIA = AdapterKey("a" * 64)


class Tables(KVCacheManager):
    """Page tables over a pool of 24 pages; `tokens` opens a request and computes so many."""

    def __init__(self) -> None:
        self.pool = PagePool(24)
        self.prefixes = PrefixCache(self.pool)
        super().__init__(self.pool, PAGE, self.prefixes)

    def tokens(self, rid: RequestId, ids: list[int]) -> tuple[int, ...]:
        self.open(rid, None, "")
        assert self.allocate(rid, 0, len(ids)) == ()
        self.cache_full_pages(rid, ids, len(ids))
        return self.page_table(rid)

    def attached(self, rid: RequestId, ids: list[int], key: AdapterKey | None = None, salt: str = "") -> int:
        self.open(rid, key, salt)
        return self.attach_prefix(rid, ids)

    def forked(self, child: RequestId, num_tokens: int) -> None:
        self.open(child, None, "")
        self.fork(A, child, num_tokens)

    def check(self) -> None:
        self.prefixes.check_integrity()
        self.pool.check_integrity([*self.references(), *self.prefixes.references()])


@pytest.fixture
def kv() -> Tables:
    return Tables()


def test_a_prompt_that_begins_alike_takes_the_pages_and_computes_at_least_one_token(kv: Tables) -> None:
    ids = list(range(12))
    first = kv.tokens(A, ids)
    assert kv.attached(B, ids, MIA) == kv.attached(C, ids, salt="tenant") == 0, "another adapter, another tenant"
    for rid in (A, B, C):
        kv.free(rid)
    for prompt, tokens in ((ids, 8), ([*ids, 99], 12), (ids[:8], 4), ([*ids[:5], 7, 7, 7, 7], 4), ([5, *ids], 0)):
        assert kv.attached(B, prompt) == tokens
        assert kv.page_table(B) == first[: tokens // PAGE]
        kv.free(B)
        kv.check()


def test_generated_tokens_are_kept_too(kv: Tables) -> None:
    ids = list(range(6))
    kv.tokens(A, ids)
    for count in range(6, 14):
        kv.cache_full_pages(A, ids, count)
        ids.append(50 + count)
        assert kv.allocate(A, count, len(ids)) == ()
    kv.free(A)
    assert kv.attached(B, ids) == 12
    kv.check()


def test_a_write_into_a_shared_page_copies_it(kv: Tables) -> None:
    shared = kv.tokens(A, list(range(100, 110)))
    for child in (B, C):
        kv.forked(child, 9)
    assert kv.page_table(B) == kv.page_table(C) == shared
    assert kv.missing_pages(B, 9, 10) == 1
    for child in (B, C):
        copies = kv.allocate(child, 9, 10)
        assert copies == (PageCopy(shared[2], kv.page_table(child)[2]),)
    assert kv.page_table(B)[:2] == shared[:2]
    assert kv.allocate(A, 10, 11) == (), "the last holder writes where it is"
    assert len({kv.page_table(r)[2] for r in (A, B, C)}) == 3
    assert (kv.num_copies, kv.num_pages) == (2, 5)
    kv.check()


def test_a_page_of_the_prefix_cache_is_never_written(kv: Tables) -> None:
    """A fork computes the prompt's last token again; where that ends a page, the page may be in the cache already."""
    table = kv.tokens(A, list(range(8)))
    kv.forked(B, 7)
    assert kv.allocate(B, 7, 8) == (PageCopy(table[1], kv.page_table(B)[1]),)
    assert kv.page_table(B)[1] != table[1]
    kv.check()


def test_nothing_changes_where_pages_are_missing(kv: Tables) -> None:
    kv.tokens(A, list(range(10)))
    kv.forked(B, 9)
    taken = kv.pool.allocate_singles(kv.pool.num_free)
    assert taken is not None
    before = kv.page_table(B)
    assert kv.allocate(B, 9, 10) is None
    assert kv.page_table(B) == before
    kv.pool.release(taken)
    kv.check()


def test_a_table_that_a_step_reads_stays_as_it_was(kv: Tables) -> None:
    kv.open(A, None, "")
    kv.allocate(A, 0, 10)
    kv.forked(B, 10)
    changes = (
        lambda: kv.allocate(A, 10, 11),  # copies the page that B has, too
        lambda: kv.allocate(A, 11, 40),
        lambda: kv.drop(A, [0]),
        lambda: kv.truncate(A, 10),
        lambda: kv.move({kv.page_table(A)[2]: 23}),
    )
    for change in changes:
        read = kv.page_table(A)
        pages = list(read)
        change()
        assert list(read) == pages
        assert list(kv.page_table(A)) != pages


def test_tables_follow_moves(kv: Tables) -> None:
    kv.open(A, None, "")
    assert kv.allocate(A, 0, 10) == ()
    old = kv.page_table(A)
    kv.pool.take_page(20)
    kv.pool.move({old[1]: 20})
    kv.move({old[1]: 20})
    assert list(kv.page_table(A)) == [old[0], 20, old[2]]
    kv.check()


def test_pages_taken_ahead_are_given_back(kv: Tables) -> None:
    ids = list(range(20))
    kv.tokens(A, ids[:6])
    assert kv.num_writable_tokens(A) == 8
    assert kv.allocate(A, 6, 20) == ()
    first = kv.page_table(A)
    assert len(first) == 5
    for num_tokens, num_pages in ((20, 5), (17, 5), (16, 4), (9, 3), (8, 2), (7, 2)):
        kv.truncate(A, num_tokens)
        assert kv.page_table(A) == first[:num_pages]
        kv.check()
    assert kv.pool.num_free == 22
    assert kv.attached(B, ids) == 4, "the page that was computed is still there"


def test_pages_given_back_stay_with_others_that_hold_them(kv: Tables) -> None:
    ids = list(range(13))
    kv.tokens(A, ids)
    assert kv.attached(B, ids) == 12
    kv.truncate(A, 5)
    assert kv.page_table(B)[:2] == kv.page_table(A)
    kv.free(B)
    assert kv.prefixes.num_cached == 1
    kv.check()


def test_the_cheaper_of_swapping_and_computing_again_within_the_bytes_there_are() -> None:
    costs, block = CostModel(), 1000
    swap = SwapSpace("auto", 10 * block, block, costs)
    costs.page_copy.observe(1.0, block)
    costs.token.observe(1.0, 1)
    assert swap.should_swap(1, 3), "2 seconds out and in against 3"
    assert not swap.should_swap(2, 3), "4 seconds against 3"
    assert not SwapSpace("recompute", 10 * block, block, costs).should_swap(1, 10**9)
    swap = SwapSpace("swap", 10 * block + 1, block, costs)
    assert swap.should_swap(10, 1)
    assert not swap.should_swap(11, 10**9)
    assert not swap.should_swap(0, 0)
    swap.allocate(A, 7)
    assert swap.nbytes == 7 * block
    assert not swap.should_swap(4, 10**9)
    assert swap.should_swap(3, 1)
    swap.free(A)
    assert swap.should_swap(10, 1)
    assert list(swap.holders()) == []


def test_pages_before_an_alora_acts_are_the_bases_and_stay_when_it_is_evicted(kv: Tables) -> None:
    ids = list(range(16))
    kv.open(A, MIA, "", home=MIA, active_from=9)
    assert kv.allocate(A, 0, len(ids)) == ()
    kv.cache_full_pages(A, ids, len(ids))
    kv.free(A)
    kv.prefixes.on_adapter_evicted(MIA)
    assert (kv.prefixes.num_cached, kv.prefixes.num_orphaned) == (2, 2)
    assert kv.attached(B, ids) == 8
    kv.check()
