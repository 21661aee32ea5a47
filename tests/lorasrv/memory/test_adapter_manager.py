"""Disk, host, pool: one load whoever asks, bounded host bytes, promises kept as far as nobody needs the pages."""

from dataclasses import dataclass

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions
from lorasrv.memory.adapter_manager import MAX_RESERVED, AdapterState
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

    def __post_init__(self) -> None:
        options = MemoryOptions(host_cache_bytes=self.host_bytes)
        self.memory = MemoryManager.make(PoolLayout(self.pages, 4, 1024, 1), options, clock=lambda: self.now)
        self.manager = self.memory.adapter_manager

    def load(self, key: AdapterKey, keep_free: int = 0, layout: AdapterLayout = LAYOUT) -> bool:
        has_room = self.memory.load_adapter(key, layout, keep_free, EvictionLevel.ADMIT)
        self.memory.adapter_manager.check_integrity()
        return has_room

    def loaded(self, key: AdapterKey) -> None:
        """The loader has its orders, and has read one of them."""
        self.manager.take_orders()
        self.manager.on_loaded(key)

    def arrive(self, key: AdapterKey) -> None:
        self.loaded(key)
        assert self.load(key)
        assert [k for k, _ in self.manager.take_orders().copies] == [key]
        self.manager.on_copied(key)


def test_two_who_ask_cause_one_load_and_one_copy() -> None:
    bench = Bench()
    for _ in range(3):
        assert bench.load(A)
    assert bench.manager.take_orders().loads == (A,)
    bench.loaded(A)
    for _ in range(3):
        assert bench.load(A)
    orders = bench.manager.take_orders()
    assert orders.loads == ()
    assert [key for key, _ in orders.copies] == [A]
    assert not bench.manager.is_resident(A), "not before the copy is done"
    bench.manager.on_copied(A)
    assert bench.manager.is_resident(A)
    assert bench.manager.num_loading == 0


def test_host_copies_on_their_way_are_bounded_but_one_always_goes() -> None:
    bench = Bench(host_bytes=2 * LAYOUT.nbytes + 1)
    for key in (A, B, C):
        assert bench.load(key)
    assert bench.manager.take_orders().loads == (A, B)
    bench.arrive(A)
    bench.manager.begin_step()
    assert bench.load(C)
    assert bench.manager.take_orders().loads == (C,)
    tight = Bench(host_bytes=1)
    assert tight.load(A)
    assert tight.load(B)
    assert tight.manager.take_orders().loads == (A,)


def test_no_room_is_said_and_the_host_copy_waits() -> None:
    bench = Bench(pages=SIZE + 2)
    assert bench.load(A)
    bench.loaded(A)
    assert not bench.load(A, keep_free=3)
    assert bench.manager.state(A) is AdapterState.ON_HOST
    assert bench.load(A, keep_free=2)
    assert bench.manager.state(A) is AdapterState.COPYING


def test_what_nobody_wants_is_cancelled_unless_its_pages_are_being_written() -> None:
    bench = Bench()
    for key in (A, B, C):
        bench.load(key)
    for key in (B, C):
        bench.loaded(key)
    bench.load(C)
    bench.manager.take_orders()
    bench.manager.cancel_unneeded()
    assert set(bench.manager.take_orders().cancels) == {A, B}
    assert bench.manager.state(C) is AdapterState.COPYING
    bench.manager.on_copied(C)
    bench.manager.check_integrity()


@pytest.mark.parametrize("copying", [False, True])
def test_a_failure_leaves_nothing_behind(copying: bool) -> None:
    bench = Bench()
    bench.manager.pin(A, LAYOUT)
    bench.load(A)
    if copying:
        bench.loaded(A)
        bench.load(A)
    bench.manager.take_orders()
    bench.manager.on_failed(A)
    assert A not in bench.memory.adapters
    assert bench.memory.adapter_pool.num_free == bench.pages
    assert not bench.manager.is_reserved(A), "a reservation that fails is not tried again and again"
    bench.manager.check_integrity()


def test_a_large_one_is_not_passed_by_small_ones_for_ever() -> None:
    wide = AdapterLayout(LAYOUT.sites, (((32,),),), 2)
    bench = Bench(pages=20 * SIZE, host_bytes=wide.nbytes + LAYOUT.nbytes)
    keys = iter(AdapterKey(f"{i:064x}") for i in range(100))
    first, second = next(keys), next(keys)
    bench.load(first)
    bench.load(second)
    assert bench.manager.take_orders().loads == (first, second)
    bench.manager.begin_step()
    bench.load(A, layout=wide)
    bench.load(next(keys))
    assert bench.manager.take_orders().loads == (), "the small one would fit, but came later"
    bench.arrive(first)
    bench.manager.begin_step()
    bench.load(A, layout=wide)
    assert bench.manager.take_orders().loads == (A,)


def test_what_is_warmed_comes_ahead_and_ends_at_the_latest_time() -> None:
    bench = Bench()
    bench.manager.reserve(A, LAYOUT, until_s=5.0)
    bench.manager.reserve(A, LAYOUT, until_s=1.0)
    bench.memory.prefetch_reserved(0)
    assert bench.manager.take_orders().loads == (A,)
    bench.arrive(A)
    for now, promised in ((4.9, True), (5.1, False)):
        bench.now = now
        bench.manager.begin_step()
        assert bench.manager.is_reserved(A) == promised


def test_a_pin_outlives_a_warm_is_brought_back_and_leaves_the_warm() -> None:
    bench = Bench()
    bench.manager.pin(A, LAYOUT)
    bench.manager.reserve(A, LAYOUT, until_s=1.0)
    bench.now = 2.0
    bench.manager.begin_step()
    bench.memory.prefetch_reserved(0)
    assert bench.manager.is_pinned(A)
    assert bench.manager.num_pinned_pages() == SIZE
    bench.arrive(A)
    bench.manager.evict(A)
    bench.memory.prefetch_reserved(0)
    assert bench.manager.take_orders().loads == (A,)
    bench.manager.reserve(A, LAYOUT, until_s=9.0)
    bench.manager.unpin(A)
    assert not bench.manager.is_pinned(A)
    bench.manager.begin_step()
    assert bench.manager.is_reserved(A)
    bench.manager.unpin(B)


def test_a_promise_without_room_holds_no_host_memory_and_delays_nobody() -> None:
    bench = Bench(pages=2 * SIZE, host_bytes=LAYOUT.nbytes)
    assert bench.memory.kv_pool.allocate_singles(SIZE + 1) is not None
    bench.manager.reserve(A, LAYOUT, until_s=99.0)
    bench.memory.prefetch_reserved(0)
    assert bench.manager.take_orders().loads == (), "there is no room for it"
    bench.memory.kv_pool.release((0, 1))
    bench.memory.prefetch_reserved(0)
    assert bench.manager.take_orders().loads == (A,)
    bench.loaded(A)
    assert bench.memory.kv_pool.allocate_singles(2) is not None
    bench.memory.prefetch_reserved(0)
    assert bench.manager.take_orders().cancels == (A,), "its room has gone meanwhile"
    assert bench.load(B)
    assert bench.manager.take_orders().loads == (B,)
    bench.manager.check_integrity()


def test_a_promise_does_not_send_back_what_a_request_waits_for() -> None:
    bench = Bench(pages=2 * SIZE)
    bench.manager.reserve(A, LAYOUT, until_s=99.0)
    bench.manager.add_request(A)
    assert bench.load(A)
    bench.loaded(A)
    bench.manager.take_orders()
    assert bench.memory.kv_pool.allocate_singles(SIZE + 1) is not None
    assert not bench.load(A)
    bench.memory.prefetch_reserved(0)
    assert bench.manager.state(A) is AdapterState.ON_HOST
    assert bench.manager.take_orders().cancels == ()


def test_promises_are_bounded_and_pins_are_not_among_them() -> None:
    bench = Bench()
    bench.manager.pin(A, LAYOUT)
    for number in range(MAX_RESERVED + 10):
        bench.manager.reserve(AdapterKey(f"{number:064x}"), LAYOUT, until_s=9.0)
    assert len(list(bench.manager.reservations())) == MAX_RESERVED + 1
    assert bench.manager.is_pinned(A)
    assert not bench.manager.is_reserved(AdapterKey(f"{9:064x}"))


def test_the_outlook_counts_what_is_on_its_way_and_says_if_there_is_no_room() -> None:
    bench = Bench()

    def outlook(on_host: bool = False) -> tuple[float, str]:
        return bench.memory.estimate_ready_s(A, LAYOUT, on_host=on_host, keep_free=0)

    alone, why = outlook()
    assert "being brought in" in why
    assert 0 < outlook(on_host=True)[0] < alone
    bench.load(A)
    assert outlook()[0] == alone, "not twice"
    bench.load(B)
    assert alone < outlook()[0] < 2 * alone, "loads run side by side"
    assert bench.memory.kv_pool.allocate_singles(bench.pages - 1) is not None
    assert outlook() == (5.0, "running requests leave no room for it now")
