"""Holds of contents against deletions: one of both wins, and no bytes are lost."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from store_kit import add, build, digest_of, put

from adapter_store.errors import AdapterNotFound, StoreUnusable
from adapter_store.registry.records import Change
from adapter_store.store import AdapterStore


@contextlib.contextmanager
def during_commit(
    store: AdapterStore, action: Callable[[], object], *, number: int = 1, fails: bool = False
) -> Iterator[ThreadPoolExecutor]:
    """Run an action whose commit waits, just before it is durable, until the block has ended."""
    reached, go, commit, calls = threading.Event(), threading.Event(), store._index._commit, itertools.count(1)

    def slow() -> None:
        if next(calls) == number:
            reached.set()
            assert go.wait(timeout=30)
            if fails:
                raise StoreUnusable("the disk refused")
        commit()

    with mock.patch.object(store._index, "_commit", slow), ThreadPoolExecutor(2) as pool:
        done = pool.submit(action)
        try:
            assert reached.wait(timeout=30)
            yield pool
            assert not done.done()
        finally:
            go.set()
        done.result(timeout=30)


@pytest.mark.parametrize("action", ["register", "change", "delete"])
def test_holding_one_adapter_never_waits_for_what_is_done_to_another(action: str, store: AdapterStore) -> None:
    """Every request takes a hold when it is admitted."""
    key = add(store, "resident", 1).ref.key
    add(store, "mia", 2)
    actions: dict[str, Callable[[], object]] = {
        "register": lambda: add(store, "mia", 3),
        "change": lambda: store.change("mia", Change(aliases={"prod": 1})),
        "delete": lambda: store.delete("mia"),
    }
    with during_commit(store, actions[action]) as pool:
        assert pool.submit(store.hold, key).result(timeout=30).key == key


def test_a_hold_while_its_deletion_is_committed_keeps_the_bytes(store: AdapterStore) -> None:
    key = add(store, "mia").ref.key
    with during_commit(store, lambda: store.delete("mia")) as pool:
        hold = pool.submit(store.hold, key).result(timeout=30)
    assert not store.is_named(key)
    assert store.load(key).spec.key == key
    assert store.collector.collect() == 0
    del hold
    assert store.collector.collect() == 1
    with pytest.raises(AdapterNotFound):
        store.load(key)


@pytest.mark.parametrize("fails", [False, True])
def test_a_hold_while_its_content_is_dropped_is_refused(fails: bool, store: AdapterStore) -> None:
    """If the disk refuses to drop the content, it can be held again."""
    key = add(store, "mia").ref.key
    with during_commit(store, lambda: store.delete("mia"), number=2, fails=fails) as pool:
        refused = pool.submit(store.hold, key).exception(timeout=30)
        assert isinstance(refused, AdapterNotFound)
    if fails:
        hold = store.hold(key)
        assert store.load(hold.key).spec.key == key
        del hold
        assert store.collector.collect() == 1
    with pytest.raises(AdapterNotFound):
        store.hold(key)


def test_a_hold_wins_or_is_refused_and_never_loses_its_bytes(store: AdapterStore) -> None:
    """Threads hold what another keeps on deleting and uploading again."""
    data, config = build.file(), build.config()
    key = store.register("mia", config, put(store, data)).ref.key
    over = threading.Event()

    def ask() -> tuple[int, int]:
        held = refused = 0
        while not over.is_set():
            try:
                hold = store.hold(key)
            except AdapterNotFound:
                refused += 1
                continue
            assert store.load(hold.key).spec.key == key
            held += 1
            del hold
        return held, refused

    with ThreadPoolExecutor(3) as pool:
        askers = [pool.submit(ask) for _ in range(3)]
        try:
            for _ in range(60):
                store.delete("mia")
                store.collector.collect()
                store.register("mia", config, put(store, data))
        finally:
            over.set()
        counts = [asker.result(timeout=30) for asker in askers]
    assert sum(held for held, _ in counts) > 0
    store.delete("mia")
    store.collector.collect()
    assert store._refcounts._counts == {}
    assert not store.blob_exists(digest_of(data))
