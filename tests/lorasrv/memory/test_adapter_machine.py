"""The state machine of `adapter_tiers`: its documented tables, every illegal call, and random walks over all of it.

The walk runs the real manager, evictor, pool, host cache and loader; only the store and the memory are not there. After
every rule each owner's total is computed anew from the states.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
from bare_scheduler import KEYS, PAGE_BYTES, layout_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from adapter_store.errors import AdapterCorrupt
from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions
from lorasrv.memory import adapter_manager as adapter_tiers
from lorasrv.memory.adapter_cache import Need
from lorasrv.memory.adapter_manager import OWNED, TRANSITIONS, AdapterManager, AdapterState
from lorasrv.memory.eviction import EvictionLevel
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.outputs import RequestId
from lorasrv.worker.adapter_loader import Done, InlineLoader

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
        self.now = 0.0
        self.source = Source()
        self.uncopyable: set[AdapterKey] = set()
        self.loader = InlineLoader(cast(Any, self.source), cast(Any, self._write))
        self.memory = MemoryManager.make(
            PoolLayout(PAGES, 4, PAGE_BYTES, 1), MemoryOptions(host_cache_bytes=HOST_BYTES), clock=lambda: self.now
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
        for key, placed in orders.copies:
            self.loader.copy(key, placed)

    def poll(self) -> None:
        for report in self.loader.poll():
            match report.done:
                case Done.LOADED:
                    self.manager.on_loaded(report.key)
                case Done.COPIED:
                    self.manager.on_copied(report.key)
                case Done.FAILED:
                    self.manager.on_failed(report.key)

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


def _to(world: World, key: AdapterKey, state: AdapterState) -> None:
    """The shortest way."""
    for method in ("request_load", "on_loaded", "place", "on_copied"):
        if world.manager.state(key) is not state:
            CALLS[method](world.manager, key)
            world.manager.take_orders()
    assert world.manager.state(key) is state


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
    world, key = World(), KEYS[0]
    _to(world, key, state)
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
    assert adapter_tiers.__doc__ is not None
    lines = adapter_tiers.__doc__.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(table))
    rows = []
    for line in lines[first + 2 :]:
        if not line:
            break
        rows.append(line.split(None, columns - 1))
    return rows


def test_the_documented_tables_are_the_codes() -> None:
    transitions = {(AdapterState[a], method): AdapterState[b] for a, method, b, _ in _rows("From ", 4)}
    assert transitions == TRANSITIONS
    owned = {AdapterState[state]: tuple(word == "yes" for word in row) for state, *row in _rows("State ", 5)}
    assert owned == OWNED
    assert {method for _, method in TRANSITIONS} == set(CALLS), "a method that no test calls"


def test_an_adapter_that_a_request_reads_stays() -> None:
    world, key = World(), KEYS[0]
    _to(world, key, AdapterState.RESIDENT)
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
    assert world.manager.state(key) is (
        AdapterState.ON_HOST if is_wanted_again and not is_broken else AdapterState.ON_DISK
    )
    world.check()
    world.check_host_pins()


def test_a_cancel_of_a_load_that_was_not_ordered_yet_takes_the_order_back() -> None:
    world, key = World(), KEYS[0]
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
        self.manager.reserve(key, layout_of(key), self.world.now + seconds)

    @rule(key=keys)
    def pin(self, key: AdapterKey) -> None:
        self.manager.pin(key, layout_of(key))

    @rule(key=keys)
    def unpin(self, key: AdapterKey) -> None:
        self.manager.unpin(key)

    @rule(keep_free=st.integers(0, 4), level=st.sampled_from(EvictionLevel), is_given=st.booleans())
    def step(self, keep_free: int, level: EvictionLevel, is_given: bool) -> None:
        """Plan as the scheduler does; a plan that fails at its end leaves its orders to the next."""
        self.world.now += 1.0
        self.manager.begin_step()
        self.manager.cancel_unneeded()
        for key in self.manager.requests():
            self.memory.load_adapter(key, layout_of(key), keep_free, level)
        self.memory.prefetch_reserved(keep_free)
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

    @rule(key=keys)
    def break_or_mend(self, key: AdapterKey) -> None:
        self.world.source.broken ^= {key}

    @rule(key=keys)
    def break_or_mend_copies(self, key: AdapterKey) -> None:
        self.world.uncopyable ^= {key}

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
        for key, number in self.manager.requests().items():
            for _ in range(number):
                self.manager.remove_request(key)
        for key, number in self.memory.adapters.pins().items():
            for _ in range(number):
                self.memory.adapters.unpin(key)
        for key in KEYS:
            self.manager.unpin(key)
        self.world.now = 1e12
        for _ in range(3):
            self.step(0, EvictionLevel.ADMIT, is_given=True)
            self.world.poll()
        self.world.check()
        assert self.manager.num_loading == 0
        assert self.source_pins() == 0

    def source_pins(self) -> int:
        return self.world.source.cache.stats().bytes_pinned


def test_random_walks_reach_every_transition() -> None:
    AdapterMachine.seen.clear()
    run_state_machine_as_test(
        AdapterMachine,
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None),
    )
    assert AdapterMachine.seen == set(TRANSITIONS)
