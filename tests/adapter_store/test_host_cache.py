"""The host cache: its bound and its pins, from many threads."""

import threading
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adapter_store.host_cache import HostCache


def test_an_entry_over_the_bound_goes_when_its_work_is_done() -> None:
    cache: HostCache[str] = HostCache(10)
    cache.put_pinned("a", "A", 11)
    assert cache.stats().bytes_used == 11
    cache.unpin("a")
    assert cache.stats().bytes_used == 0
    with pytest.raises(ValueError, match="negative"):
        HostCache(-1)


class HostCacheMachine(RuleBasedStateMachine):
    """The cache against a plain model: an ordered dictionary and pin counts."""

    keys = st.integers(0, 5)

    def __init__(self) -> None:
        super().__init__()
        self.cache: HostCache[object] = HostCache(20)
        self.order: OrderedDict[int, int] = OrderedDict()
        self.values: dict[int, object] = {}
        self.pins: dict[int, int] = {}
        self.hits = self.misses = self.evictions = 0

    def _shrink(self) -> None:
        while sum(self.order.values()) > 20:
            victim = next((k for k in self.order if k not in self.pins), None)
            if victim is None:
                return
            del self.order[victim], self.values[victim]
            self.evictions += 1

    @rule(key=keys, nbytes=st.integers(0, 25))
    def put(self, key: int, nbytes: int) -> None:
        value = object()
        expected = self.values.setdefault(key, value)
        assert self.cache.put_pinned(key, value, nbytes) is expected
        self.order.setdefault(key, nbytes)
        self.pins[key] = self.pins.get(key, 0) + 1
        self._shrink()

    @rule(key=keys)
    def get(self, key: int) -> None:
        assert self.cache.get_pinned(key) is self.values.get(key)
        self.hits += key in self.order
        self.misses += key not in self.order
        if key in self.order:
            self.pins[key] = self.pins.get(key, 0) + 1

    @rule(key=keys)
    def unpin(self, key: int) -> None:
        if key not in self.pins:
            with pytest.raises(KeyError):
                self.cache.unpin(key)
            return
        self.cache.unpin(key)
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]
            self.order.move_to_end(key)
            self._shrink()

    @invariant()
    def same_contents(self) -> None:
        stats = self.cache.stats()
        assert (stats.hits, stats.misses, stats.evictions) == (self.hits, self.misses, self.evictions)
        assert (stats.entries, stats.bytes_used) == (len(self.order), sum(self.order.values()))
        assert stats.bytes_pinned == sum(self.order[k] for k in self.pins)
        assert stats.bytes_used <= 20 or stats.bytes_used == stats.bytes_pinned
        assert {k for k in range(6) if k in self.cache} == set(self.order)


TestHostCacheMachine = HostCacheMachine.TestCase
TestHostCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_accounts_hold_with_many_threads() -> None:
    cache: HostCache[int] = HostCache(50)

    def work(seed: int) -> None:
        for i in range(400):
            key = (seed * 7 + i) % 20
            assert cache.put_pinned(key, key, 5) == key
            if cache.get_pinned(key) is not None:
                cache.unpin(key)
            cache.unpin(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = cache.stats()
    assert stats.bytes_pinned == 0
    assert stats.bytes_used == 5 * stats.entries <= 50
