import threading
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adapter_store.host_cache import HostCache


def test_least_recently_used_goes_first() -> None:
    cache: HostCache[str] = HostCache(100)
    assert cache.put(("a", 1), "A", 40)
    assert cache.put(("b", 1), "B", 40)
    assert cache.get(("a", 1)) == "A"
    assert cache.put(("c", 1), "C", 40)
    assert ("b", 1) not in cache
    assert ("a", 1) in cache
    stats = cache.stats()
    assert (stats.entries, stats.bytes_used, stats.hits, stats.misses, stats.evictions) == (2, 80, 1, 0, 1)


def test_pinned_entries_stay() -> None:
    cache: HostCache[str] = HostCache(100)
    cache.put("a", "A", 60)
    assert cache.pin("a")
    assert cache.pin("a")
    assert not cache.pin("nobody")
    assert not cache.put("b", "B", 50)
    assert not cache.discard("a")
    cache.unpin("a")
    assert not cache.put("b", "B", 50)
    cache.unpin("a")
    assert cache.put("b", "B", 50)
    assert cache.get("a") is None
    with pytest.raises(KeyError):
        cache.unpin("b")


def test_bounds() -> None:
    cache: HostCache[str] = HostCache(10)
    with pytest.raises(ValueError, match="11 bytes does not fit a host cache of 10 bytes"):
        cache.put("a", "A", 11)
    with pytest.raises(ValueError, match="-1"):
        cache.put("a", "A", -1)
    with pytest.raises(ValueError, match="negative"):
        HostCache(-1)
    assert cache.put("a", "A", 10)
    assert cache.put("a", "other", 10)
    assert cache.get("a") == "A"
    assert cache.discard("a")
    assert not cache.discard("a")
    assert cache.stats().bytes_used == 0


class HostCacheMachine(RuleBasedStateMachine):
    """The cache against a plain model: an ordered dictionary and pin counts."""

    keys = st.integers(0, 5)

    def __init__(self) -> None:
        super().__init__()
        self.cache: HostCache[int] = HostCache(20)
        self.order: OrderedDict[int, int] = OrderedDict()
        self.pins: dict[int, int] = {}

    @rule(key=keys, nbytes=st.integers(0, 20))
    def put(self, key: int, nbytes: int) -> None:
        kept = self.cache.put(key, key, nbytes)
        if key in self.order:
            assert kept
            return
        pinned = sum(self.order[k] for k in self.pins)
        assert kept == (pinned + nbytes <= 20)
        if kept:
            while sum(self.order.values()) + nbytes > 20:
                del self.order[next(k for k in self.order if k not in self.pins)]
            self.order[key] = nbytes

    @rule(key=keys)
    def get(self, key: int) -> None:
        assert self.cache.get(key) == (key if key in self.order else None)
        if key in self.order:
            self.order.move_to_end(key)

    @rule(key=keys)
    def pin(self, key: int) -> None:
        assert self.cache.pin(key) == (key in self.order)
        if key in self.order:
            self.pins[key] = self.pins.get(key, 0) + 1

    @rule(key=keys)
    def unpin(self, key: int) -> None:
        if key not in self.pins:
            return
        self.cache.unpin(key)
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]
            self.order.move_to_end(key)

    @invariant()
    def same_contents(self) -> None:
        stats = self.cache.stats()
        assert stats.bytes_used == sum(self.order.values()) <= 20
        assert stats.bytes_pinned == sum(self.order[k] for k in self.pins)
        assert {k for k in range(6) if k in self.cache} == set(self.order)


TestHostCacheMachine = HostCacheMachine.TestCase
TestHostCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_many_threads_keep_the_books() -> None:
    cache: HostCache[int] = HostCache(50)

    def work(seed: int) -> None:
        for i in range(400):
            key = (seed * 7 + i) % 20
            cache.put(key, key, 5)
            if cache.pin(key):
                assert cache.get(key) == key
                cache.unpin(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = cache.stats()
    assert stats.bytes_pinned == 0
    assert stats.bytes_used == 5 * stats.entries <= 50
