"""Many threads at once: one winner a version, nothing lost, nobody served a half-made state."""

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapter_store.errors import AdapterExists, AdapterInvalid, AdapterNotFound, BlobNotFound, StoreUnusable
from adapter_store.registry.records import Change
from adapter_store.spec import BaseShapes
from adapter_store.store import AdapterStore

Put = Callable[[AdapterStore, bytes], str]


def test_concurrent_uploads_to_one_id(
    store: AdapterStore, put: Put, build: Any, base: BaseShapes, tmp_path: Path
) -> None:
    files = [build.file(seed=seed) for seed in range(24)]
    together = threading.Barrier(8)

    def upload(data: bytes) -> Any:
        digest = put(store, data)
        together.wait(timeout=30)
        return store.register("mia", build.config(), digest)

    with ThreadPoolExecutor(8) as pool:
        registrations = list(pool.map(upload, files))
    assert sorted(r.ref.version for r in registrations) == list(range(1, 25))
    record = store.get("mia")
    assert [v.version for v in record.versions] == list(range(1, 25))
    assert record.current_version == 24
    for registration, data in zip(registrations, files, strict=True):
        assert store.resolve(f"mia@{registration.ref.version}") == registration.ref
        assert store.spec(registration.ref.key).weights_digest == hashlib.sha256(data).hexdigest()
    store.close()
    with AdapterStore(tmp_path / "store", base) as reopened:
        assert reopened.get("mia") == record


def test_concurrent_uploads_of_one_content(store: AdapterStore, put: Put, build: Any) -> None:
    data = build.file()
    with ThreadPoolExecutor(8) as pool:
        registrations = list(pool.map(lambda _: store.register("mia", build.config(), put(store, data)), range(16)))
    assert {r.ref.version for r in registrations} == {1}
    assert [r.created for r in registrations].count(True) == 1


def test_concurrent_uploads_to_many_ids_with_if_not_exists(store: AdapterStore, put: Put, build: Any) -> None:
    def upload(number: int) -> int:
        digest = put(store, build.file(seed=number))
        try:
            store.register(f"mia-{number % 6}", build.config(), digest, if_not_exists=True)
        except AdapterExists:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(upload, range(18))) == 6
    assert [r.current_version for r in store.list_adapters()] == [1] * 6


def test_a_bad_config_does_not_take_a_good_ones_weights(store: AdapterStore, put: Put, build: Any) -> None:
    """Same weights, half of the configs refused: whoever fails cleans up, but never what another is registering."""
    data = build.file()

    def upload(number: int) -> bool:
        config = build.config(use_dora=number % 2 == 0)
        for _ in range(50):
            digest = put(store, data)
            try:
                store.register(f"mia-{number}", config, digest)
            except AdapterInvalid:
                return False
            except BlobNotFound:  # removed between this thread's upload and its registration: upload again
                continue
            return True
        raise AssertionError("never got through")

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(upload, range(16)))
    assert outcomes == [False, True] * 8
    for record in store.list_adapters():
        store.load(record.key)


def test_readers_see_whole_states_while_writers_replace_and_delete(store: AdapterStore, put: Put, build: Any) -> None:
    files = [build.file(seed=seed) for seed in range(4)]
    store.register("keep", build.config(), put(store, files[0]))
    stop = threading.Event()
    failures: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        kept = store.resolve("keep")
        assert store.load(kept.key).spec.key == kept.key
        for record in store.list_adapters():
            assert record.current_version in {v.version for v in record.versions}
        try:
            ref = store.resolve("churn")
            assert store.load(ref.key).spec.key == ref.key
        except AdapterNotFound:
            pass  # deleted at this moment

    readers = [threading.Thread(target=guarded, args=(read,)) for _ in range(4)]
    for reader in readers:
        reader.start()
    for turn in range(12):
        store.register("churn", build.config(), put(store, files[1 + turn % 3]))
        store.register("keep", build.config(), put(store, files[turn % 4]))
        if turn % 3 == 2:
            store.delete("churn")
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []


def test_resolving_never_waits_for_a_writer(store: AdapterStore, put: Put, build: Any) -> None:
    ref = store.register("mia", build.config(), put(store, build.file())).ref
    with ThreadPoolExecutor(1) as pool, store._lock:
        assert pool.submit(store.resolve, "mia").result(timeout=2) == ref
        assert pool.submit(store.list_adapters).result(timeout=2)


@pytest.mark.parametrize("action", ["delete", "invalid"])
def test_weights_being_registered_are_not_removed_by_others(
    action: str, store: AdapterStore, put: Put, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's delete (or refusal) happens while this registration is checking the same weights."""
    digest = put(store, build.file())
    store.register("old", build.config(), digest)
    check = store._content_reader.check

    def slow_check(*arguments: Any) -> Any:
        monkeypatch.setattr(store._content_reader, "check", check)
        checked = check(*arguments)
        store.delete("old")
        if action == "invalid":
            with pytest.raises(AdapterInvalid):
                store.register("bad", build.config(r=0), digest)
        return checked

    monkeypatch.setattr(store._content_reader, "check", slow_check)
    key = store.register("new", build.config(), digest).ref.key
    assert store.load(key).spec.key == key


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
    action: str, store: AdapterStore, put: Put, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request takes a hold when it is admitted."""
    key = store.register("resident", build.config(), put(store, build.file(seed=1))).ref.key
    store.register("other", build.config(), put(store, build.file(seed=2)))
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
    store: AdapterStore, put: Put, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = store.register("mia", build.config(), put(store, build.file())).ref.key
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
    fails: bool, store: AdapterStore, put: Put, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there again if the disk would not drop it."""
    key = store.register("mia", build.config(), put(store, build.file())).ref.key
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


def test_a_hold_wins_or_is_refused_and_never_loses_its_bytes(store: AdapterStore, put: Put, build: Any) -> None:
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
    assert not store.blob_exists(hashlib.sha256(data).hexdigest())
