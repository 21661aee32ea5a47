"""Many threads at once: one winner a version, nothing lost, nobody served a half-made state."""

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapter_store.errors import AdapterExists, AdapterInvalid, AdapterNotFound, BlobNotFound
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
    check = store._contents.check

    def slow_check(*arguments: Any) -> Any:
        monkeypatch.setattr(store._contents, "check", check)
        checked = check(*arguments)
        store.delete("old")
        if action == "invalid":
            with pytest.raises(AdapterInvalid):
                store.register("bad", build.config(r=0), digest)
        return checked

    monkeypatch.setattr(store._contents, "check", slow_check)
    key = store.register("new", build.config(), digest).ref.key
    assert store.load(key).spec.key == key
