"""Who gives way to whom: the order of the module's list, its floor, and what each need may take."""

from dataclasses import dataclass

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions
from lorasrv.memory.eviction import EvictionLevel
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.memory.prefix_cache import page_hash, root_hash
from lorasrv.outputs import RequestId
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

PAGE_BYTES = 1024
LAYOUT = AdapterLayout((SiteDims(64, (64,)),), (((8,),),), 2)
SIZE = LAYOUT.num_pages(PAGE_BYTES)
KEYS = [AdapterKey(x * 64) for x in "abcdef"]


@dataclass
class Pool:
    """Books of a pool that tests fill by hand."""

    pages: int
    floor: float = 0.0
    split: float | None = None

    def __post_init__(self) -> None:
        options = MemoryOptions(adapter_pool_fraction=self.split)
        self.books = MemoryManager.make(PoolLayout(self.pages, 4, PAGE_BYTES, 1), options, adapter_floor=self.floor)
        self.wanted: set[AdapterKey] = set()
        self.held: set[AdapterKey] = set()
        self.books.evictor.is_wanted = self.wanted.__contains__
        self.books.evictor.is_held = self.held.__contains__

    def adapter(self, key: AdapterKey) -> None:
        assert self.books.adapters.place(key, LAYOUT)
        self.books.adapters.filled(key)

    def prefix(self, count: int, adapter: AdapterKey | None) -> None:
        pages = self.books.kv_pool.allocate_singles(count)
        prefixes = self.books.prefixes
        assert pages is not None
        assert prefixes is not None
        for page in pages:
            prefixes.keep(page_hash(root_hash(adapter, str(page)), (page,)), page, adapter)
            self.books.kv_pool.release((page,))
            prefixes.release(page)

    def fill(self) -> None:
        """Nothing is free; the rest is held by somebody who runs."""
        assert self.books.kv_pool.allocate_singles(self.books.kv_pool.num_free) is not None

    def room(self, pages: int, need: EvictionLevel, ahead: frozenset[AdapterKey] = frozenset()) -> bool:
        return self.books.evictor.make_room(pages, need, ahead.__contains__)

    def left(self) -> tuple[int, int, str]:
        """(stranded prefix pages, resting prefix pages, adapters)."""
        prefixes = self.books.prefixes
        assert prefixes is not None
        names = "".join(key[0] for key in KEYS if key in self.books.adapters)
        return prefixes.num_stranded, prefixes.num_resting, names


def _everything(floor: float = 0.0) -> Pool:
    """Stranded and resting prefix pages and four idle adapters: one unwanted, one wanted further back, one wanted
    further ahead, one pinned by the operator."""
    pool = Pool(8 * SIZE, floor)
    pool.adapter(KEYS[5])
    pool.prefix(2, KEYS[5])
    pool.books.adapter_manager.evict(KEYS[5])
    pool.prefix(3, None)
    for key in KEYS[:4]:
        pool.adapter(key)
    pool.wanted.update({KEYS[1], KEYS[2]})
    pool.held.add(KEYS[3])
    pool.fill()
    assert pool.left() == (2, 3, "abcd")
    return pool


AHEAD = frozenset({KEYS[2]})


def test_adapters_and_prefix_pages_compete_in_one_currency() -> None:
    """Which goes first is a matter of what they cost: 3 of 12 pages each way."""
    for seconds_a_token, left in ((1e-3, (0, 3, "")), (1e-9, (0, 0, "a"))):
        pool = Pool(SIZE + 3)
        pool.books.costs.token.observe(seconds_a_token, 1)
        pool.adapter(KEYS[0])
        pool.prefix(3, None)
        assert pool.books.kv_pool.num_free == 0
        assert pool.room(3, EvictionLevel.ADMIT)
        assert pool.left() == left


def test_the_order_of_giving_way() -> None:
    pool = _everything()
    taken = 0
    steps = [
        (2, (0, 3, "abcd")),
        (SIZE, (0, 3, "bcd")),
        (3, (0, 0, "bcd")),
        (SIZE, (0, 0, "cd")),
        (SIZE, (0, 0, "d")),
        (SIZE, (0, 0, "")),
    ]
    for pages, left in steps:
        taken += pages
        assert pool.room(taken, EvictionLevel.RUNNING, AHEAD)
        assert pool.left() == left
    assert not pool.room(taken + 1, EvictionLevel.RUNNING, AHEAD)


@pytest.mark.parametrize(
    ("need", "most"),
    [
        (EvictionLevel.PREFETCH, 2 + SIZE + 3),
        (EvictionLevel.ADMIT, 2 + SIZE + 3 + SIZE),
        (EvictionLevel.RUNNING, 5 + 4 * SIZE),
    ],
)
def test_what_each_need_may_take_and_nothing_is_evicted_in_vain(need: EvictionLevel, most: int) -> None:
    pool = _everything()
    assert not pool.room(most + 1, need, AHEAD)
    assert pool.left() == (2, 3, "abcd")
    assert pool.room(most, need, AHEAD)


def test_a_burst_of_kv_stops_at_the_floor_but_a_running_request_does_not() -> None:
    pool = Pool(8 * SIZE, floor=2 / 8)
    for key in KEYS[:4]:
        pool.adapter(key)
    pool.prefix(3, None)
    pool.fill()
    assert not pool.room(2 * SIZE + 4, EvictionLevel.ADMIT)
    assert pool.room(2 * SIZE + 3, EvictionLevel.ADMIT)
    assert len(pool.books.adapters) == 2
    assert pool.room(3 * SIZE + 3, EvictionLevel.RUNNING)
    assert len(pool.books.adapters) == 1


def test_an_adapter_may_replace_another_below_the_floor() -> None:
    pool = Pool(2 * SIZE, floor=0.9)
    for key in KEYS[:2]:
        pool.adapter(key)
    placed = pool.books.evictor.place_adapter(KEYS[2], LAYOUT, 0, EvictionLevel.ADMIT, lambda _: False)
    assert placed is not None
    assert len(pool.books.adapters) == 2


def test_prefetch_leaves_the_pages_that_those_who_run_need() -> None:
    pool = Pool(2 * SIZE + 3)
    pool.adapter(KEYS[0])
    pool.wanted.add(KEYS[0])
    place = pool.books.evictor.place_adapter
    assert place(KEYS[1], LAYOUT, 4, EvictionLevel.PREFETCH, lambda _: False) is None
    assert place(KEYS[1], LAYOUT, 3, EvictionLevel.PREFETCH, lambda _: False) is not None


def test_scattered_pages_are_moved_before_anybody_is_evicted() -> None:
    wide = AdapterLayout(LAYOUT.sites, (((16,),),), 2)
    pool = Pool(30)
    pool.adapter(KEYS[0])
    kv, pages, rid = pool.books.kv, pool.books.kv_pool.allocate_singles(30 - SIZE), RequestId("r")
    assert pages is not None
    kv.open(rid, None, "")
    kv._tables[rid].pages = [p for p in pages if p % 2]
    pool.books.kv_pool.release([p for p in pages if not p % 2])
    before = kv.page_table(rid)
    assert wide.num_pages(PAGE_BYTES) < pool.books.kv_pool.num_free
    assert pool.books.evictor.place_adapter(KEYS[1], wide, 0, EvictionLevel.ADMIT, lambda _: False) is not None
    assert KEYS[0] in pool.books.adapters
    copies = {c.source: c.target for op in pool.books.evictor.take_moves() for c in op.copies}
    assert pool.books.evictor.num_moved_pages == len(copies) > 0
    assert kv.page_table(rid) == tuple(copies.get(page, page) for page in before)
    assert pool.books.evictor.take_moves() == []


def test_a_split_pool_shares_nothing() -> None:
    pool = Pool(8 * SIZE, split=0.5)
    for key in KEYS[:4]:
        pool.adapter(key)
    assert pool.books.kv_pool.num_free == 4 * SIZE
    assert not pool.room(4 * SIZE + 1, EvictionLevel.RUNNING)
    assert len(pool.books.adapters) == 4
    pool.prefix(4 * SIZE, None)
    assert pool.books.evictor.place_adapter(KEYS[4], LAYOUT, 99, EvictionLevel.ADMIT, lambda _: False)
    assert pool.left()[1] == 4 * SIZE, "prefix pages cannot make room for adapters"
    pool.books.kv_pool.check_integrity(pool.books.prefixes.references() if pool.books.prefixes is not None else ())
    pool.books.adapter_pool.check_integrity(pool.books.adapters.references())
