"""Disk, host, pool: one load whoever asks, bounded host bytes, promises kept as far as nobody needs the pages."""

from dataclasses import dataclass, field

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.adapter_tiers import AdapterTiers, Arriving
from lorasrv.config import MemoryOptions
from lorasrv.costs import CostModel
from lorasrv.pool_books import PoolBooks, PoolGeometry
from lorasrv.reclaim import Need
from sgmv_kernels.layout import AdapterLayout, SiteDims

LAYOUT = AdapterLayout((SiteDims(64, (64,)),), (((8,),),), 2)
SIZE = LAYOUT.num_pages(1024)
A, B, C = (AdapterKey(x * 64) for x in "abc")


@dataclass
class Bench:
    pages: int = 6 * SIZE
    host_bytes: int = 100 * LAYOUT.nbytes
    now: float = 0.0
    wanted: set[AdapterKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.books = PoolBooks.make(PoolGeometry(self.pages, 4, 1024, 1), MemoryOptions())
        self.tiers = AdapterTiers(
            self.books.adapters, self.books.reclaimer, self.host_bytes, CostModel(), lambda: self.now
        )

    def bring(self, key: AdapterKey, keep_free: int = 0, need: Need = Need.ADMISSION) -> bool:
        came = self.tiers.bring(key, LAYOUT, keep_free, need)
        self.tiers.check_integrity()
        return came

    def arrive(self, key: AdapterKey) -> None:
        self.tiers.loaded(key)
        assert self.bring(key)
        assert [k for k, _ in self.tiers.take_orders().copies] == [key]
        self.tiers.copied(key)


def test_two_who_ask_cause_one_load_and_one_copy() -> None:
    bench = Bench()
    for _ in range(3):
        assert bench.bring(A)
    assert bench.tiers.take_orders().loads == (A,)
    bench.tiers.loaded(A)
    for _ in range(3):
        assert bench.bring(A)
    orders = bench.tiers.take_orders()
    assert orders.loads == ()
    assert [key for key, _ in orders.copies] == [A]
    assert not bench.books.adapters.is_ready(A), "not before the copy is done"
    bench.tiers.copied(A)
    assert bench.books.adapters.is_ready(A)
    assert bench.tiers.num_arriving == 0


def test_host_copies_on_their_way_are_bounded_but_one_always_goes() -> None:
    bench = Bench(host_bytes=2 * LAYOUT.nbytes + 1)
    for key in (A, B, C):
        assert bench.bring(key)
    assert bench.tiers.take_orders().loads == (A, B)
    bench.arrive(A)
    assert bench.bring(C)
    assert bench.tiers.take_orders().loads == (C,)
    tight = Bench(host_bytes=1)
    assert tight.bring(A)
    assert tight.bring(B)
    assert tight.tiers.take_orders().loads == (A,)


def test_no_room_is_said_and_the_host_copy_waits() -> None:
    bench = Bench(pages=SIZE + 2)
    assert bench.bring(A)
    bench.tiers.loaded(A)
    assert not bench.bring(A, keep_free=3)
    assert bench.tiers.state(A) is Arriving.ON_HOST
    assert bench.bring(A, keep_free=2)
    assert bench.tiers.state(A) is Arriving.COPYING


def test_what_nobody_wants_is_cancelled_unless_its_pages_are_being_written() -> None:
    bench = Bench()
    for key in (A, B, C):
        bench.bring(key)
    for key in (B, C):
        bench.tiers.loaded(key)
    bench.bring(C)
    bench.tiers.take_orders()
    bench.tiers.forget_unwanted(lambda key: key in bench.wanted)
    assert set(bench.tiers.take_orders().cancels) == {A, B}
    assert bench.tiers.state(C) is Arriving.COPYING
    bench.tiers.loaded(A)
    assert bench.tiers.state(A) is None, "a report that crossed the cancel changes nothing"
    bench.tiers.copied(C)
    bench.tiers.check_integrity()


@pytest.mark.parametrize("copying", [False, True])
def test_a_failure_leaves_nothing_behind(copying: bool) -> None:
    bench = Bench()
    bench.tiers.promise(A, LAYOUT, None)
    bench.bring(A)
    if copying:
        bench.tiers.loaded(A)
        bench.bring(A)
    bench.tiers.failed(A)
    assert A not in bench.books.adapters
    assert bench.books.adapter_pool.num_free == bench.pages
    assert not bench.tiers.is_promised(A), "a promise that cannot be kept is not tried for ever"
    bench.tiers.check_integrity()


def test_promises_come_ahead_and_end_at_their_time() -> None:
    bench = Bench()
    bench.tiers.promise(A, LAYOUT, until_s=5.0)
    bench.tiers.keep_promises(0)
    assert bench.tiers.take_orders().loads == (A,)
    bench.arrive(A)
    assert bench.tiers.is_promised(A)
    bench.now = 5.1
    bench.tiers.keep_promises(0)
    assert not bench.tiers.is_promised(A)


def test_a_pin_outlives_a_warm_and_is_brought_back() -> None:
    bench = Bench()
    bench.tiers.promise(A, LAYOUT, None)
    bench.tiers.promise(A, LAYOUT, until_s=1.0)
    bench.now = 2.0
    bench.tiers.keep_promises(0)
    assert bench.tiers.is_held(A)
    assert bench.tiers.held_pages() == SIZE
    bench.arrive(A)
    bench.books.adapters.evict(A)
    bench.tiers.keep_promises(0)
    assert bench.tiers.take_orders().loads[-1:] == (A,)
    bench.tiers.let_go(A)
    assert not bench.tiers.is_promised(A)


def test_the_expected_time_counts_what_is_on_its_way() -> None:
    bench = Bench()
    alone = bench.tiers.expected_s(LAYOUT, on_host=False)
    assert 0 < bench.tiers.expected_s(LAYOUT, on_host=True) < alone
    bench.bring(B)
    assert bench.tiers.expected_s(LAYOUT, on_host=False) == pytest.approx(2 * alone)
