import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_kit import add, blobs, build, digest_of, put, registered

from adapter_store.errors import AdapterNotFound, StoreUnusable
from adapter_store.registry.records import Change
from adapter_store.store import AdapterStore


def test_what_is_held_outlives_its_deletion(store: AdapterStore) -> None:
    key, digest = registered(store)
    first, second = store.hold(key), store.hold(key)
    assert store.delete("mia").unnamed == (key,)
    assert not store.is_named(key)
    with pytest.raises(AdapterNotFound):
        store.resolve("mia")
    assert store.load(key).spec.key == key
    third = store.hold(key)
    del first, third
    assert store.collect() == 0
    assert blobs(store).keys() == {digest}
    del second
    assert store.collect() == 1
    assert not blobs(store)
    with pytest.raises(AdapterNotFound):
        store.hold(key)


def test_a_held_content_that_gets_a_name_again_stays(store: AdapterStore) -> None:
    digest = put(store, build.file())
    hold = store.hold(store.register("mia", build.config(), digest).ref.key)
    store.delete("mia")
    assert store.register("noa", build.config(), digest).ref.key == hold.key
    del hold
    assert store.collect() == 0
    assert blobs(store).keys() == {digest}


def test_what_was_held_when_the_server_died_is_gone_at_the_next_start(store: AdapterStore, tmp_path: Path) -> None:
    root, base = tmp_path / "store", store.base
    key = add(store, "mia").ref.key
    hold = store.hold(key)
    store.delete("mia")
    store.close()
    with AdapterStore(root, base) as again:
        with pytest.raises(AdapterNotFound):
            again.load(hold.key)
        assert not blobs(again)


class SlowCommit:
    """The store's next transactions wait here before they are durable, until `go` is set."""

    def __init__(self, store: AdapterStore, monkeypatch: pytest.MonkeyPatch, *, number: int = 1) -> None:
        self.reached, self.go, self.fails = threading.Event(), threading.Event(), False
        commit, self._left = store._index._commit, number

        def slow() -> None:
            self._left -= 1
            if self._left == 0:
                self.reached.set()
                assert self.go.wait(timeout=30)
                if self.fails:
                    raise StoreUnusable("the disk refused")
            commit()

        monkeypatch.setattr(store._index, "_commit", slow)


@pytest.mark.parametrize("action", ["register", "change", "delete"])
def test_holding_one_adapter_never_waits_for_what_is_done_to_another(
    action: str, store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request takes a hold when it is admitted."""
    key = add(store, "resident", 1).ref.key
    add(store, "other", 2)
    digest = put(store, build.file(seed=3))
    actions: dict[str, Callable[[], object]] = {
        "register": lambda: store.register("other", build.config(), digest),
        "change": lambda: store.change("other", Change(aliases={"prod": 1})),
        "delete": lambda: store.delete("other"),
    }
    slow = SlowCommit(store, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(actions[action])
        try:
            assert slow.reached.wait(timeout=30)
            assert pool.submit(store.hold, key).result(timeout=5).key == key
            assert not done.done()
        finally:
            slow.go.set()
        done.result(timeout=30)


def test_a_hold_while_its_deletion_is_committed_keeps_the_bytes(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = add(store, "mia").ref.key
    slow = SlowCommit(store, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(store.delete, "mia")
        try:
            assert slow.reached.wait(timeout=30)
            hold = pool.submit(store.hold, key).result(timeout=5)
        finally:
            slow.go.set()
        assert done.result(timeout=30).unnamed == (key,)
        assert store.load(key).spec.key == key
        assert store.collect() == 0
        del hold
        # The future, too, refers to it until its frame is gone.
    assert store.collect() == 1
    with pytest.raises(AdapterNotFound):
        store.load(key)


@pytest.mark.parametrize("fails", [False, True])
def test_a_hold_while_its_content_is_dropped_is_refused(
    fails: bool, store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there again if the disk would not drop it."""
    key = add(store, "mia").ref.key
    slow = SlowCommit(store, monkeypatch, number=2)
    slow.fails = fails
    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(store.delete, "mia")
        try:
            assert slow.reached.wait(timeout=30)
            with pytest.raises(AdapterNotFound):
                pool.submit(store.hold, key).result(timeout=5)
        finally:
            slow.go.set()
        done.result(timeout=30)
    if fails:
        hold = store.hold(key)
        assert store.load(hold.key).spec.key == key
        del hold
        assert store.collect() == 1
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
                store.collect()
                store.register("mia", config, put(store, data))
        finally:
            over.set()
        counts = [asker.result(timeout=30) for asker in askers]
    assert sum(held for held, _ in counts) > 0
    store.delete("mia")
    store.collect()
    assert store._refcounts._counts == {}
    assert not store.blob_exists(digest_of(data))
