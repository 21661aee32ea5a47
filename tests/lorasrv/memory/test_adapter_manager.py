"""Disk, host, pool: one load whoever asks, bounded host bytes, promises kept as far as nobody needs the pages."""

from dataclasses import dataclass, field

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions
from lorasrv.memory.adapter_manager import MAX_WARMED, AdapterManager, Arriving
from lorasrv.memory.cost_model import CostModel
from lorasrv.memory.eviction import EvictionLevel
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

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
        self.books = MemoryManager.make(PoolLayout(self.pages, 4, 1024, 1), MemoryOptions())
        self.tiers = AdapterManager(
            self.books.adapters, self.books.evictor, self.host_bytes, CostModel(), lambda: self.now
        )

    def bring(self, key: AdapterKey, keep_free: int = 0, need: EvictionLevel = EvictionLevel.ADMIT) -> bool:
        came = self.tiers.bring(key, LAYOUT, keep_free, need)
        self.tiers.check_integrity()
        return came

    def arrive(self, key: AdapterKey) -> None:
        self.tiers.on_loaded(key)
        assert self.bring(key)
        assert [k for k, _ in self.tiers.take_orders().copies] == [key]
        self.tiers.copied(key)


def test_two_who_ask_cause_one_load_and_one_copy() -> None:
    bench = Bench()
    for _ in range(3):
        assert bench.bring(A)
    assert bench.tiers.take_orders().loads == (A,)
    bench.tiers.on_loaded(A)
    for _ in range(3):
        assert bench.bring(A)
    orders = bench.tiers.take_orders()
    assert orders.loads == ()
    assert [key for key, _ in orders.copies] == [A]
    assert not bench.books.adapter_manager.is_resident(A), "not before the copy is done"
    bench.tiers.copied(A)
    assert bench.books.adapter_manager.is_resident(A)
    assert bench.tiers.num_arriving == 0


def test_host_copies_on_their_way_are_bounded_but_one_always_goes() -> None:
    bench = Bench(host_bytes=2 * LAYOUT.nbytes + 1)
    for key in (A, B, C):
        assert bench.bring(key)
    assert bench.tiers.take_orders().loads == (A, B)
    bench.arrive(A)
    bench.tiers.begin_step()
    assert bench.bring(C)
    assert bench.tiers.take_orders().loads == (C,)
    tight = Bench(host_bytes=1)
    assert tight.bring(A)
    assert tight.bring(B)
    assert tight.tiers.take_orders().loads == (A,)


def test_no_room_is_said_and_the_host_copy_waits() -> None:
    bench = Bench(pages=SIZE + 2)
    assert bench.bring(A)
    bench.tiers.on_loaded(A)
    assert not bench.bring(A, keep_free=3)
    assert bench.tiers.state(A) is Arriving.ON_HOST
    assert bench.bring(A, keep_free=2)
    assert bench.tiers.state(A) is Arriving.COPYING


def test_what_nobody_wants_is_cancelled_unless_its_pages_are_being_written() -> None:
    bench = Bench()
    for key in (A, B, C):
        bench.bring(key)
    for key in (B, C):
        bench.tiers.on_loaded(key)
    bench.bring(C)
    bench.tiers.take_orders()
    bench.tiers.forget_unwanted(lambda key: key in bench.wanted)
    assert set(bench.tiers.take_orders().cancels) == {A, B}
    assert bench.tiers.state(C) is Arriving.COPYING
    bench.tiers.on_loaded(A)
    assert bench.tiers.state(A) is None, "a report that crossed the cancel changes nothing"
    bench.tiers.copied(C)
    bench.tiers.check_integrity()


@pytest.mark.parametrize("copying", [False, True])
def test_a_failure_leaves_nothing_behind(copying: bool) -> None:
    bench = Bench()
    bench.tiers.pin(A, LAYOUT)
    bench.bring(A)
    if copying:
        bench.tiers.on_loaded(A)
        bench.bring(A)
    bench.tiers.failed(A)
    assert A not in bench.books.adapters
    assert bench.books.adapter_pool.num_free == bench.pages
    assert not bench.tiers.is_promised(A), "a promise that cannot be kept is not tried for ever"
    bench.tiers.check_integrity()


def test_a_large_one_is_not_passed_by_small_ones_for_ever() -> None:
    wide = AdapterLayout(LAYOUT.sites, (((32,),),), 2)
    bench = Bench(pages=20 * SIZE, host_bytes=wide.nbytes + LAYOUT.nbytes)
    keys = iter(AdapterKey(f"{i:064x}") for i in range(100))
    first, second = next(keys), next(keys)
    bench.bring(first)
    bench.bring(second)
    assert bench.tiers.take_orders().loads == (first, second)
    bench.tiers.begin_step()
    bench.tiers.bring(A, wide, 0, EvictionLevel.ADMIT)
    bench.bring(next(keys))
    assert bench.tiers.take_orders().loads == (), "the small one would fit, but came later"
    bench.arrive(first)
    bench.tiers.begin_step()
    bench.tiers.bring(A, wide, 0, EvictionLevel.ADMIT)
    assert bench.tiers.take_orders().loads == (A,)


def test_what_is_warmed_comes_ahead_and_ends_at_the_latest_time() -> None:
    bench = Bench()
    bench.tiers.warm(A, LAYOUT, until_s=5.0)
    bench.tiers.warm(A, LAYOUT, until_s=1.0)
    bench.tiers.keep_promises(0)
    assert bench.tiers.take_orders().loads == (A,)
    bench.arrive(A)
    for now, promised in ((4.9, True), (5.1, False)):
        bench.now = now
        bench.tiers.begin_step()
        assert bench.tiers.is_promised(A) == promised


def test_a_pin_outlives_a_warm_is_brought_back_and_leaves_the_warm() -> None:
    bench = Bench()
    bench.tiers.pin(A, LAYOUT)
    bench.tiers.warm(A, LAYOUT, until_s=1.0)
    bench.now = 2.0
    bench.tiers.begin_step()
    bench.tiers.keep_promises(0)
    assert bench.tiers.is_held(A)
    assert bench.tiers.held_pages() == SIZE
    bench.arrive(A)
    bench.books.adapter_manager.evict(A)
    bench.tiers.keep_promises(0)
    assert bench.tiers.take_orders().loads[-1:] == (A,)
    bench.tiers.warm(A, LAYOUT, until_s=9.0)
    bench.tiers.unpin(A)
    assert not bench.tiers.is_held(A)
    bench.tiers.begin_step()
    assert bench.tiers.is_promised(A)
    bench.tiers.unpin(B)


def test_a_promise_without_room_holds_no_host_memory_and_delays_nobody() -> None:
    bench = Bench(pages=2 * SIZE, host_bytes=LAYOUT.nbytes)
    assert bench.books.kv_pool.allocate_singles(SIZE + 1) is not None
    bench.tiers.warm(A, LAYOUT, until_s=99.0)
    bench.tiers.keep_promises(0)
    assert bench.tiers.take_orders().loads == (), "there is no room for it"
    bench.books.kv_pool.release((0, 1))
    bench.tiers.keep_promises(0)
    assert bench.tiers.take_orders().loads == (A,)
    bench.tiers.on_loaded(A)
    assert bench.books.kv_pool.allocate_singles(2) is not None
    bench.tiers.keep_promises(0)
    assert bench.tiers.take_orders().cancels == (A,), "its room has gone meanwhile"
    assert bench.bring(B)
    assert bench.tiers.take_orders().loads == (B,)
    bench.tiers.check_integrity()


def test_a_promise_does_not_send_back_what_a_request_waits_for() -> None:
    bench = Bench(pages=2 * SIZE)
    bench.tiers.warm(A, LAYOUT, until_s=99.0)
    assert bench.bring(A)
    bench.tiers.on_loaded(A)
    bench.tiers.take_orders()
    assert bench.books.kv_pool.allocate_singles(SIZE + 1) is not None
    assert not bench.bring(A)
    bench.tiers.keep_promises(0, lambda key: key == A)
    assert bench.tiers.state(A) is Arriving.ON_HOST
    assert bench.tiers.take_orders().cancels == ()


def test_promises_are_bounded_and_pins_are_not_among_them() -> None:
    bench = Bench()
    bench.tiers.pin(A, LAYOUT)
    for number in range(MAX_WARMED + 10):
        bench.tiers.warm(AdapterKey(f"{number:064x}"), LAYOUT, until_s=9.0)
    assert len(list(bench.tiers.promises())) == MAX_WARMED + 1
    assert bench.tiers.is_held(A)
    assert not bench.tiers.is_promised(AdapterKey(f"{9:064x}"))


def test_the_outlook_counts_what_is_on_its_way_and_says_if_there_is_no_room() -> None:
    bench = Bench()

    def outlook(on_host: bool = False) -> tuple[float, str]:
        return bench.tiers.outlook(A, LAYOUT, on_host=on_host, keep_free=0)

    alone, why = outlook()
    assert "being brought in" in why
    assert 0 < outlook(on_host=True)[0] < alone
    bench.bring(A)
    assert outlook()[0] == alone, "not twice"
    bench.bring(B)
    assert alone < outlook()[0] < 2 * alone, "loads run side by side"
    assert bench.books.kv_pool.allocate_singles(bench.pages - 1) is not None
    assert outlook() == (5.0, "running requests leave no room for it now")
