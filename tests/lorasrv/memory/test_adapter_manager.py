"""Disk, host, pool: the documented transitions, every illegal call, random walks over all of it; one load whoever asks,
bounded host bytes, reservations kept as far as no request needs the pages.

The walk runs the real manager, evictor, pool, host cache and loader; only the store and the memory are not there. After
every rule each owner's total is computed anew from the states.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
from bare_scheduler import KEYS, PAGE_BYTES, layout_of
from clock import Clock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from adapter_store.errors import AdapterCorrupt
from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions
from lorasrv.memory import adapter_manager
from lorasrv.memory.adapter_cache import Need
from lorasrv.memory.adapter_manager import MAX_RESERVED, OWNED, TRANSITIONS, AdapterManager, AdapterState
from lorasrv.memory.eviction import EvictionLevel
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.outputs import RequestId
from lorasrv.worker.adapter_loader import Done, InlineLoader
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

LAYOUT = AdapterLayout((SiteDims(64, (64,)),), (((8,),),), 2)
SIZE = LAYOUT.num_pages(PAGE_BYTES)
A, B, C = (AdapterKey(x * 64) for x in "abc")


class Bench:
    """The accounts of a pool of a few adapters of one size."""

    def __init__(self, pages: int = 6 * SIZE, host_bytes: int = 100 * LAYOUT.nbytes) -> None:
        self.pages, self.clock = pages, Clock(0.0)
        options = MemoryOptions(host_cache_bytes=host_bytes)
        self.memory = MemoryManager.make(PoolLayout(pages, 4, PAGE_BYTES, 1), options, clock=self.clock)
        self.manager = self.memory.adapter_manager

    def load(self, key: AdapterKey, keep_free: int = 0, layout: AdapterLayout = LAYOUT) -> bool:
        has_room = self.memory.load_adapter(key, layout, keep_free, EvictionLevel.ADMIT)
        self.manager.check_integrity()
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

    def loads(self, keep_free: int = 0) -> tuple[AdapterKey, ...]:
        """Return what reservations have loaded now."""
        self.memory.prefetch(keep_free)
        return self.manager.take_orders().loads

    def is_reserved(self, key: AdapterKey) -> bool:
        return key in dict(self.manager.reservations())


def test_several_requests_cause_one_load_and_one_copy() -> None:
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


def test_without_room_the_host_copy_waits() -> None:
    bench = Bench(pages=SIZE + 2)
    assert bench.load(A)
    bench.loaded(A)
    assert not bench.load(A, keep_free=3)
    assert bench.manager.state(A) is AdapterState.ON_HOST
    assert bench.load(A, keep_free=2)
    assert bench.manager.state(A) is AdapterState.COPYING


def test_unneeded_loads_are_cancelled_unless_their_pages_are_being_written() -> None:
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
    assert not bench.is_reserved(A), "a reservation that fails is not tried again and again"
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


def test_a_reservation_is_loaded_and_ends_at_the_latest_time() -> None:
    bench = Bench()
    bench.manager.reserve(A, LAYOUT, until_s=5.0)
    bench.manager.reserve(A, LAYOUT, until_s=1.0)
    assert bench.loads() == (A,)
    bench.arrive(A)
    for now, reserved in ((4.9, True), (5.1, False)):
        bench.clock.now = now
        bench.manager.begin_step()
        assert bench.is_reserved(A) == reserved


def test_a_pin_outlives_a_reservation_is_brought_back_and_leaves_the_reservation() -> None:
    bench = Bench()
    bench.manager.pin(A, LAYOUT)
    bench.manager.reserve(A, LAYOUT, until_s=1.0)
    bench.clock.now = 2.0
    bench.manager.begin_step()
    bench.memory.prefetch(0)
    assert bench.manager.is_pinned(A)
    assert bench.manager.num_pinned_pages() == SIZE
    bench.arrive(A)
    bench.manager.evict(A)
    assert bench.loads() == (A,)
    bench.manager.reserve(A, LAYOUT, until_s=9.0)
    bench.manager.unpin(A)
    assert not bench.manager.is_pinned(A)
    bench.manager.begin_step()
    assert bench.is_reserved(A)
    bench.manager.unpin(B)


def test_a_reservation_without_room_holds_no_host_memory_and_delays_no_load() -> None:
    bench = Bench(pages=2 * SIZE, host_bytes=LAYOUT.nbytes)
    assert bench.memory.kv_pool.allocate_singles(SIZE + 1) is not None
    bench.manager.reserve(A, LAYOUT, until_s=99.0)
    assert bench.loads() == (), "there is no room for it"
    bench.memory.kv_pool.release((0, 1))
    assert bench.loads() == (A,)
    bench.loaded(A)
    assert bench.memory.kv_pool.allocate_singles(2) is not None
    bench.memory.prefetch(0)
    assert bench.manager.take_orders().cancels == (A,), "its room has gone meanwhile"
    assert bench.load(B)
    assert bench.manager.take_orders().loads == (B,)
    bench.manager.check_integrity()


def test_a_reservation_does_not_cancel_a_load_that_a_request_waits_for() -> None:
    bench = Bench(pages=2 * SIZE)
    bench.manager.reserve(A, LAYOUT, until_s=99.0)
    bench.manager.add_request(A)
    assert bench.load(A)
    bench.loaded(A)
    bench.manager.take_orders()
    assert bench.memory.kv_pool.allocate_singles(SIZE + 1) is not None
    assert not bench.load(A)
    bench.memory.prefetch(0)
    assert bench.manager.state(A) is AdapterState.ON_HOST
    assert bench.manager.take_orders().cancels == ()


def test_reservations_are_bounded_and_pins_are_not_among_them() -> None:
    bench = Bench()
    bench.manager.pin(A, LAYOUT)
    for number in range(MAX_RESERVED + 10):
        bench.manager.reserve(AdapterKey(f"{number:064x}"), LAYOUT, until_s=9.0)
    assert len(list(bench.manager.reservations())) == MAX_RESERVED + 1
    assert bench.manager.is_pinned(A)
    assert not bench.is_reserved(AdapterKey(f"{9:064x}"))


def test_a_reservation_that_is_renewed_is_the_newest() -> None:
    bench = Bench()
    keys = [AdapterKey(f"{number:064x}") for number in range(MAX_RESERVED + 1)]
    for key in (*keys[:-1], keys[0], keys[-1]):
        bench.manager.reserve(key, LAYOUT, until_s=9.0)
    assert [bench.is_reserved(key) for key in (keys[0], keys[1], keys[-1])] == [True, False, True]


def test_the_outlook_counts_what_is_on_its_way_and_says_if_there_is_no_room() -> None:
    bench = Bench()

    def outlook(on_host: bool = False) -> tuple[float, str]:
        return bench.memory.estimate_ready_s([(A, LAYOUT)], on_host=on_host, keep_free=0)

    alone, why = outlook()
    assert "being brought in" in why
    assert 0 < outlook(on_host=True)[0] < alone
    bench.load(A)
    assert outlook()[0] == alone, "not twice"
    bench.load(B)
    assert alone < outlook()[0] < 2 * alone, "loads run side by side"
    assert bench.memory.kv_pool.allocate_singles(bench.pages - 1) is not None
    assert outlook() == (5.0, "running requests leave no room for it now")


# Transitions.

PAGES = 20
FILLER = RequestId("filler")
HOST_BYTES = layout_of(KEYS[-1]).nbytes + layout_of(KEYS[1]).nbytes
"""Not enough for all of them at once."""


@dataclass(frozen=True)
class Packed:
    key: AdapterKey

    @property
    def nbytes(self) -> int:
        return layout_of(self.key).nbytes


class Source:
    """`AdapterSource` over a real host cache. Broken adapters cannot be read."""

    def __init__(self) -> None:
        self.cache: HostCache[Packed] = HostCache(HOST_BYTES)
        self.broken: set[AdapterKey] = set()

    def fetch_pinned(self, key: AdapterKey, _: Callable[[], bool]) -> tuple[Packed, bool]:
        cached = self.cache.get_pinned(key)
        if cached is not None:
            return cached, False
        if key in self.broken:
            raise AdapterCorrupt("damaged")
        return self.cache.put_pinned(key, Packed(key), layout_of(key).nbytes), True

    def pinned(self, key: AdapterKey) -> Packed:
        return self.cache.pinned(key)

    def unpin(self, key: AdapterKey) -> None:
        self.cache.unpin(key)


class World:
    """What an engine has between its scheduler and its device, and the transitions that were seen."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.source = Source()
        self.uncopyable: set[AdapterKey] = set()
        self.loader = InlineLoader(cast(Any, self.source), cast(Any, self._write))
        self.memory = MemoryManager.make(
            PoolLayout(PAGES, 4, PAGE_BYTES, 1), MemoryOptions(host_cache_bytes=HOST_BYTES), clock=self.clock
        )
        self.manager = self.memory.adapter_manager
        self.seen: set[tuple[AdapterState, str]] = set()
        self._move = self.manager._move
        self.manager._move = self._watch  # type: ignore[method-assign]

    def _write(self, packed: Packed, _: object) -> None:
        if packed.key in self.uncopyable:
            raise RuntimeError("out of memory")

    def _watch(self, key: AdapterKey, method: str) -> None:
        assert sys._getframe(1).f_code.co_name == method, "the transition of another method"
        before = self.manager.state(key)
        self._move(key, method)
        assert self.manager.state(key) is TRANSITIONS[before, method]
        self.seen.add((before, method))

    def order(self) -> None:
        orders = self.manager.take_orders()
        for key in orders.cancels:
            self.loader.cancel(key)
        for key in orders.loads:
            self.loader.load(key)
        for copy in orders.copies:
            self.loader.copy(*copy)

    def poll(self) -> None:
        for report in self.loader.poll():
            REPORTS[report.done](self.manager, report.key)

    def check(self) -> None:
        """Every owner's total, from the states alone."""
        self.memory.check_integrity()
        owned = {key: OWNED[self.manager.state(key)] for key in KEYS}
        assert self.manager.host_bytes == sum(layout_of(key).nbytes for key in KEYS if owned[key].host_bytes)
        assert {key for key in KEYS if key in self.memory.adapters} == {key for key in KEYS if owned[key].pages}
        pages = sum(self.memory.adapters.placed(key).num_pages for key in KEYS if owned[key].pages)
        assert self.memory.num_free == PAGES - pages - self.memory.kv.num_pages
        assert all(owned[key].request_pins for key in self.memory.adapters.pins())

    def check_host_pins(self) -> None:
        """When no order and no report is under way."""
        pinned = sum(layout_of(key).nbytes for key in KEYS if OWNED[self.manager.state(key)].host_pin)
        assert self.source.cache.stats().bytes_pinned == pinned


def _in_state(state: AdapterState) -> tuple[World, AdapterKey]:
    """Return an adapter that came to this state on the shortest way."""
    world, key = World(), KEYS[0]
    for method in ("request_load", "on_loaded", "place", "on_copied"):
        if world.manager.state(key) is not state:
            CALLS[method](world.manager, key)
            world.manager.take_orders()
    assert world.manager.state(key) is state
    return world, key


REPORTS = {
    Done.LOADED: AdapterManager.on_loaded,
    Done.COPIED: AdapterManager.on_copied,
    Done.FAILED: AdapterManager.on_failed,
}
CALLS: dict[str, Callable[[AdapterManager, AdapterKey], object]] = {
    "request_load": lambda manager, key: manager.request_load(key, layout_of(key)),
    "on_loaded": AdapterManager.on_loaded,
    "on_failed": AdapterManager.on_failed,
    "cancel": AdapterManager.cancel,
    "place": AdapterManager.place,
    "on_copied": AdapterManager.on_copied,
    "evict": AdapterManager.evict,
}


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("state", AdapterState)
def test_every_call_in_every_state(state: AdapterState, method: str) -> None:
    world, key = _in_state(state)
    target = TRANSITIONS.get((state, method))
    if target is None:
        with pytest.raises(AssertionError, match=f"{method} is illegal"):
            CALLS[method](world.manager, key)
    else:
        CALLS[method](world.manager, key)
    assert world.manager.state(key) is (target or state)
    world.check()


def _rows(table: str, columns: int) -> list[list[str]]:
    """Of the table whose header begins so, in the module's docstring."""
    assert adapter_manager.__doc__ is not None
    lines = adapter_manager.__doc__.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(table))
    return [line.split(None, columns - 1) for line in itertools.takewhile(bool, lines[first + 2 :])]


def test_the_documented_tables_are_the_codes() -> None:
    transitions = {(AdapterState[a], method): AdapterState[b] for a, method, b, _ in _rows("From ", 4)}
    assert transitions == TRANSITIONS
    owned = {AdapterState[state]: tuple(word == "yes" for word in row) for state, *row in _rows("State ", 5)}
    assert owned == OWNED
    assert {method for _, method in TRANSITIONS} == set(CALLS), "a method that no test calls"


def test_an_adapter_that_a_request_reads_stays() -> None:
    world, key = _in_state(AdapterState.RESIDENT)
    world.memory.adapters.pin(key)
    with pytest.raises(AssertionError, match="in use"):
        world.manager.evict(key)
    assert not world.manager.evict_lowest()
    world.check()
    world.memory.adapters.unpin(key)
    assert world.manager.evict_lowest()
    world.check()


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("is_wanted_again", [False, True])
def test_a_report_that_a_cancel_has_overtaken_changes_nothing(is_broken: bool, is_wanted_again: bool) -> None:
    """A step that could not be planned to its end keeps its orders for the next; reports come in between."""
    world, key = World(), KEYS[0]
    world.source.broken |= {key} if is_broken else set()
    world.manager.request_load(key, layout_of(key))
    world.order()
    world.manager.cancel(key)
    if is_wanted_again:
        world.manager.request_load(key, layout_of(key))
    before = world.manager.state(key)
    world.poll()
    assert world.manager.state(key) is before
    world.order()
    world.poll()
    arrived = is_wanted_again and not is_broken
    assert world.manager.state(key) is (AdapterState.ON_HOST if arrived else AdapterState.ON_DISK)
    world.check()
    world.check_host_pins()


def test_a_cancel_of_a_load_that_was_not_ordered_yet_takes_the_order_back() -> None:
    world, key = _in_state(AdapterState.ON_DISK)
    world.manager.request_load(key, layout_of(key))
    world.manager.cancel(key)
    orders = world.manager.take_orders()
    assert (orders.loads, orders.cancels) == ((), ())


class AdapterMachine(RuleBasedStateMachine):
    """Requests, reservations, pins, steps, reports, faults, uses, evictions and pages for KV, in any order."""

    seen: set[tuple[AdapterState, str]] = set()  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.memory.kv.open(FILLER, None, "")
        self.world.seen = self.seen
        self.manager, self.memory = self.world.manager, self.world.memory

    keys = st.sampled_from(KEYS)

    @rule(key=keys)
    def add_request(self, key: AdapterKey) -> None:
        self.manager.add_request(key)

    @precondition(lambda self: self.manager.requests())
    @rule(data=st.data())
    def remove_request(self, data: st.DataObject) -> None:
        self.manager.remove_request(data.draw(st.sampled_from(sorted(self.manager.requests()))))

    @rule(key=keys, seconds=st.sampled_from([0.0, 3.0, 1e9]))
    def reserve(self, key: AdapterKey, seconds: float) -> None:
        self.manager.reserve(key, layout_of(key), self.world.clock.now + seconds)

    @rule(key=keys, pinned=st.booleans())
    def pin(self, key: AdapterKey, pinned: bool) -> None:
        self.manager.pin(key, layout_of(key)) if pinned else self.manager.unpin(key)

    @rule(keep_free=st.integers(0, 4), level=st.sampled_from(EvictionLevel), is_given=st.booleans())
    def step(self, keep_free: int, level: EvictionLevel, is_given: bool) -> None:
        """Plan as the scheduler does; a plan that fails at its end leaves its orders to the next."""
        self.world.clock.now += 1.0
        self.manager.begin_step()
        self.manager.cancel_unneeded()
        for key in self.manager.requests():
            self.memory.load_adapter(key, layout_of(key), keep_free, level)
        self.memory.prefetch(keep_free)
        if is_given:
            self.world.order()

    @rule()
    def poll(self) -> None:
        self.world.poll()

    @rule(level=st.sampled_from(EvictionLevel))
    def settle(self, level: EvictionLevel) -> None:
        """Every order is done and reported: what the host cache has pinned is what the states say."""
        self.step(0, level, is_given=True)
        self.world.poll()
        self.world.check_host_pins()

    @rule(key=keys, copies=st.booleans())
    def break_or_mend(self, key: AdapterKey, copies: bool) -> None:
        broken = self.world.uncopyable if copies else self.world.source.broken
        broken ^= {key}

    @rule(key=keys)
    def use(self, key: AdapterKey) -> None:
        if self.manager.is_resident(key):
            self.memory.adapters.pin(key)
        else:
            with pytest.raises((AssertionError, KeyError)):
                self.memory.adapters.pin(key)

    @precondition(lambda self: self.memory.adapters.pins())
    @rule(data=st.data())
    def end_use(self, data: st.DataObject) -> None:
        self.memory.adapters.unpin(data.draw(st.sampled_from(sorted(self.memory.adapters.pins()))))

    @rule(pages=st.integers(0, PAGES), level=st.sampled_from(EvictionLevel))
    def fill(self, pages: int, level: EvictionLevel) -> None:
        """Keys and values take so many pages, as far as adapters may be evicted for them."""
        kv = self.memory.kv
        kv.free(FILLER)
        kv.open(FILLER, None, "")
        spared = {key for key in KEYS if self.manager.is_pinned(key)}
        before = {key for key in KEYS if self.manager.is_resident(key)}
        if self.memory.evictor.make_room(pages, level):
            assert kv.allocate(FILLER, 0, pages * kv.page_size) is not None
        gone = {key for key in before if not self.manager.is_resident(key)}
        assert level is EvictionLevel.RUNNING or not gone & spared, "a pinned adapter was evicted"
        assert level is not EvictionLevel.PREFETCH or not any(map(self.manager.need, gone))

    @rule()
    def evict(self) -> None:
        self.manager.evict_lowest(Need.WANTED)

    @invariant()
    def owners_totals(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Once nothing needs it any more, no adapter is under way and none is pinned."""
        for key in Counter(self.manager.requests()).elements():
            self.manager.remove_request(key)
        for key in Counter(self.memory.adapters.pins()).elements():
            self.memory.adapters.unpin(key)
        for key in KEYS:
            self.manager.unpin(key)
        self.world.clock.now = 1e12
        for _ in range(3):
            self.step(0, EvictionLevel.ADMIT, is_given=True)
            self.world.poll()
        self.world.check()
        assert self.manager.num_loading == 0
        assert self.world.source.cache.stats().bytes_pinned == 0


def test_random_walks_reach_every_transition() -> None:
    AdapterMachine.seen.clear()
    run_state_machine_as_test(
        AdapterMachine,
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None),
    )
    assert AdapterMachine.seen == set(TRANSITIONS)
