"""Who gives way to whom: the order of the module's list, its floor, and what each need may take."""

import random
from dataclasses import dataclass

import pytest
from counted_work import count_instructions

from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions
from lorasrv.memory.eviction import EvictionLevel, Spared, compact
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.prefix_cache import page_hash, root_hash
from lorasrv.outputs import RequestId
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, SiteDims

PAGE_BYTES = 1024
LAYOUT = AdapterLayout((SiteDims(64, (64,)),), (((8,),),), 2)
SIZE = LAYOUT.num_pages(PAGE_BYTES)
KEYS = [AdapterKey(x * 64) for x in "abcdef"]


@dataclass
class Pool:
    """The accounts of a pool that tests fill by hand."""

    pages: int
    floor: float = 0.0
    split: float | None = None

    def __post_init__(self) -> None:
        options = MemoryOptions(adapter_pool_fraction=self.split)
        self.accounts = MemoryManager.make(PoolLayout(self.pages, 4, PAGE_BYTES, 1), options, adapter_floor=self.floor)
        self.manager = self.accounts.adapter_manager

    def on_host(self, key: AdapterKey, layout: AdapterLayout = LAYOUT) -> None:
        self.manager.begin_step()
        self.manager.request_load(key, layout)
        self.manager.on_loaded(key)

    def adapter(self, key: AdapterKey) -> None:
        self.on_host(key)
        assert self.manager.place(key)
        self.manager.on_copied(key)

    def place(self, key: AdapterKey, keep_free: int, level: EvictionLevel) -> PlacedAdapter | None:
        return self.accounts.evictor.place_adapter(key, keep_free, level)

    def prefix(self, count: int, adapter: AdapterKey | None) -> None:
        pages = self.accounts.kv_pool.allocate_singles(count)
        prefixes = self.accounts.prefixes
        assert pages is not None
        assert prefixes is not None
        for page in pages:
            prefixes.insert(page_hash(root_hash(adapter, str(page)), (page,)), page, adapter)
            self.accounts.kv_pool.release((page,))
            prefixes.release(page)

    def fill(self) -> None:
        """Nothing is free; the rest is held by somebody who runs."""
        assert self.accounts.kv_pool.allocate_singles(self.accounts.kv_pool.num_free) is not None

    def room(self, pages: int, level: EvictionLevel, ahead: frozenset[AdapterKey] = frozenset()) -> bool:
        return self.accounts.evictor.make_room(pages, level, Spared(ahead))

    def left(self) -> tuple[int, int, str]:
        """Return (orphaned prefix pages, cached prefix pages, adapters)."""
        prefixes = self.accounts.prefixes
        assert prefixes is not None
        names = "".join(key[0] for key in KEYS if key in self.accounts.adapters)
        return prefixes.num_orphaned, prefixes.num_cached, names


def _everything(floor: float = 0.0) -> Pool:
    """Orphaned and cached prefix pages and four evictable adapters: not needed, needed further back, needed further
    ahead, pinned by the operator."""
    pool = Pool(8 * SIZE, floor)
    pool.adapter(KEYS[5])
    pool.prefix(2, KEYS[5])
    pool.manager.evict(KEYS[5])
    pool.prefix(3, None)
    for key in KEYS[:4]:
        pool.adapter(key)
    pool.manager.add_request(KEYS[1])
    pool.manager.add_request(KEYS[2])
    pool.manager.pin(KEYS[3], LAYOUT)
    pool.fill()
    assert pool.left() == (2, 3, "abcd")
    return pool


AHEAD = frozenset({KEYS[2]})


def test_adapters_and_prefix_pages_compete_in_one_currency() -> None:
    """Which goes first is a matter of what they cost: 3 of 12 pages each way."""
    for seconds_a_token, left in ((1e-3, (0, 3, "")), (1e-9, (0, 0, "a"))):
        pool = Pool(SIZE + 3)
        pool.accounts.costs.token.observe(seconds_a_token, 1)
        pool.adapter(KEYS[0])
        pool.prefix(3, None)
        assert pool.accounts.kv_pool.num_free == 0
        assert pool.room(3, EvictionLevel.ADMIT)
        assert pool.left() == left


def test_what_is_asked_once_goes_before_what_is_asked_often() -> None:
    """As sums of random weights are: each of them takes the place of another, not of a persona's."""
    pool = Pool(2 * SIZE)
    for uses, key in zip((4, 1, 1, 1, 1), KEYS, strict=False):
        pool.on_host(key)
        assert pool.place(key, 0, EvictionLevel.ADMIT)
        pool.manager.on_copied(key)
        for _ in range(uses):
            pool.accounts.adapters.pin(key)
            pool.accounts.adapters.count_use(key)
            pool.accounts.adapters.unpin(key)
    assert pool.left()[2] == "ae"


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
    ("level", "most"),
    [
        (EvictionLevel.PREFETCH, 2 + SIZE + 3),
        (EvictionLevel.ADMIT, 2 + SIZE + 3 + SIZE),
        (EvictionLevel.RUNNING, 5 + 4 * SIZE),
    ],
)
def test_what_each_need_may_take_and_nothing_is_evicted_in_vain(level: EvictionLevel, most: int) -> None:
    pool = _everything()
    assert not pool.room(most + 1, level, AHEAD)
    assert pool.left() == (2, 3, "abcd")
    assert pool.room(most, level, AHEAD)


def _work_beside(num_wanted: int) -> int:
    """Instructions to make room for cached pages beside so many idle adapters that waiting requests want."""
    pool = Pool(num_wanted * SIZE + 40)
    for number in range(num_wanted):
        key = AdapterKey(f"{number:064x}")
        pool.adapter(key)
        pool.manager.add_request(key)
    pool.prefix(40, None)
    return count_instructions(lambda: pool.room(16, EvictionLevel.ADMIT))


def test_making_room_does_not_walk_over_idle_adapters() -> None:
    assert _work_beside(400) < 1.2 * _work_beside(20)


def test_a_burst_of_kv_stops_at_the_floor_but_a_running_request_does_not() -> None:
    pool = Pool(8 * SIZE, floor=2 / 8)
    for key in KEYS[:4]:
        pool.adapter(key)
    pool.prefix(3, None)
    pool.fill()
    assert not pool.room(2 * SIZE + 4, EvictionLevel.ADMIT)
    assert pool.room(2 * SIZE + 3, EvictionLevel.ADMIT)
    assert len(pool.accounts.adapters) == 2
    assert pool.room(3 * SIZE + 3, EvictionLevel.RUNNING)
    assert len(pool.accounts.adapters) == 1


def test_below_the_floor_pinned_adapters_are_evicted_last() -> None:
    pool = Pool(3 * SIZE, floor=0.99)
    for key in KEYS[:3]:
        pool.adapter(key)
    pool.manager.pin(KEYS[0], LAYOUT)
    pool.manager.add_request(KEYS[1])
    pool.fill()
    for number, left in enumerate(("ab", "a", ""), 1):
        assert pool.room(number * SIZE, EvictionLevel.RUNNING, frozenset({KEYS[1]}))
        assert pool.left()[2] == left


def test_an_adapter_may_replace_another_below_the_floor() -> None:
    pool = Pool(2 * SIZE, floor=0.9)
    for key in KEYS[:2]:
        pool.adapter(key)
    pool.on_host(KEYS[2])
    placed = pool.place(KEYS[2], 0, EvictionLevel.ADMIT)
    assert placed is not None
    assert len(pool.accounts.adapters) == 2


def test_prefetch_leaves_the_pages_that_those_who_run_need() -> None:
    pool = Pool(2 * SIZE + 3)
    pool.adapter(KEYS[0])
    pool.manager.add_request(KEYS[0])
    pool.on_host(KEYS[1])
    assert pool.place(KEYS[1], 4, EvictionLevel.PREFETCH) is None
    assert pool.place(KEYS[1], 3, EvictionLevel.PREFETCH) is not None


def test_scattered_pages_are_moved_before_anybody_is_evicted() -> None:
    wide = AdapterLayout(LAYOUT.sites, (((16,),),), 2)
    pool = Pool(30)
    pool.adapter(KEYS[0])
    kv, pages, rid = pool.accounts.kv, pool.accounts.kv_pool.allocate_singles(30 - SIZE), RequestId("r")
    assert pages is not None
    kv.open(rid, None, "")
    kv._tables[rid].pages = [p for p in pages if p % 2]
    pool.accounts.kv_pool.release([p for p in pages if not p % 2])
    before = kv.page_table(rid)
    assert wide.num_pages(PAGE_BYTES) < pool.accounts.kv_pool.num_free
    pool.on_host(KEYS[1], wide)
    assert pool.place(KEYS[1], 0, EvictionLevel.ADMIT) is not None
    assert KEYS[0] in pool.accounts.adapters
    copies = {c.source: c.target for op in pool.accounts.evictor.take_moves() for c in op.copies}
    assert pool.accounts.evictor.num_moved_pages == len(copies) > 0
    assert list(kv.page_table(rid)) == [copies.get(page, page) for page in before]
    assert pool.accounts.evictor.take_moves() == []


def test_a_split_pool_shares_nothing() -> None:
    pool = Pool(8 * SIZE, split=0.5)
    for key in KEYS[:4]:
        pool.adapter(key)
    assert pool.accounts.kv_pool.num_free == 4 * SIZE
    assert not pool.room(4 * SIZE + 1, EvictionLevel.RUNNING)
    assert len(pool.accounts.adapters) == 4
    pool.prefix(4 * SIZE, None)
    pool.on_host(KEYS[4])
    assert pool.place(KEYS[4], 99, EvictionLevel.ADMIT)
    assert pool.left()[1] == 4 * SIZE, "prefix pages cannot make room for adapters"
    pool.accounts.kv_pool.check_integrity(
        pool.accounts.prefixes.references() if pool.accounts.prefixes is not None else ()
    )
    pool.accounts.adapter_pool.check_integrity(pool.accounts.adapters.references())


# Compaction: whole runs move as wholes, what is being filled stays, accounts change only on success.


def _scattered(size: int, free: set[int]) -> PagePool:
    pool = PagePool(size)
    taken = pool.allocate_singles(size)
    assert taken is not None
    pool.release(sorted(free))
    return pool


def test_the_window_with_the_fewest_pages_to_move_is_cleared() -> None:
    pool = _scattered(24, {2, 8, 9, 11, 12, 20})
    moves = compact(pool, 5, {}, {})
    assert moves is not None
    assert set(moves.singles) == {10}
    assert moves.singles[10] in {2, 20}
    assert pool.allocate_run(5) == (8, 5)


def test_a_run_moves_as_a_whole_to_a_run() -> None:
    pool = _scattered(24, {0, 1, 2, 8, 9, 10, 14, 15, 16})
    runs = {(11, 3): "mia"}
    moves = compact(pool, 9, runs, {})
    assert moves is not None
    assert dict(moves.runs) == {(11, 3): (0, 3)}
    assert pool.allocate_run(9) == (8, 9)


def test_what_is_being_filled_stays() -> None:
    pool = _scattered(16, {4, 5, 7, 8, 14, 15})
    assert compact(pool, 6, {}, {(0, 4): "arriving", (6, 1): "arriving", (9, 5): "arriving"}) is None
    pool.check_integrity([p for p in range(16) if p not in {4, 5, 7, 8, 14, 15}])


def test_too_few_pages() -> None:
    assert compact(_scattered(8, {1, 3}), 3, {}, {}) is None


@pytest.mark.parametrize("seed", range(60))
def test_any_pool(seed: int) -> None:
    """Whatever lies where: afterwards there is such a run, or nothing has changed."""
    rng = random.Random(seed)
    size = rng.randint(16, 60)
    pool, movable, fixed, singles = PagePool(size), {}, {}, set()
    for _ in range(40):
        if rng.random() < 0.4 and (run := pool.allocate_run(rng.randint(1, 6))):
            (movable if rng.random() < 0.7 else fixed)[run] = None
        elif page := pool.allocate_singles(1):
            singles.add(page[0])
    for page in [p for p in singles if rng.random() < 0.5]:
        pool.release((page,))
        singles.discard(page)
    for run in [r for r in movable if rng.random() < 0.3]:
        pool.release(range(run[0], sum(run)))
        del movable[run]
    before = pool.num_free
    wanted = rng.randint(1, max(1, pool.num_free))
    moves = compact(pool, wanted, movable, fixed)
    assert pool.num_free == before
    if moves is not None:
        assert pool.fragmentation.longest_free_run >= wanted
        assert not set(moves.runs) & set(fixed)
        movable = {moves.runs.get(run, run): None for run in movable}
        singles = {moves.singles.get(page, page) for page in singles}
    in_runs = [page for first, count in (*movable, *fixed) for page in range(first, first + count)]
    pool.check_integrity([*singles, *in_runs])
