"""A flipped bit stops its own content only, is not looked for twice, and goes with the next upload of the file."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from store_kit import add, blobs, build, flip, put, registered

from adapter_store.errors import AdapterCorrupt
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore


@pytest.fixture
def damaged(store: AdapterStore) -> tuple[AdapterKey, bytes]:
    """A content whose last byte has flipped, and its file as it was uploaded."""
    key, digest = registered(store)
    flip(blobs(store)[digest])
    return key, build.file()


def test_the_disk_is_read_once(
    store: AdapterStore, damaged: tuple[AdapterKey, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, data = damaged
    other = add(store, "zoe", 1).ref.key
    assert store.quarantined() == frozenset()
    store.hold(key)
    with pytest.raises(AdapterCorrupt, match="upload the same file again"):
        store.load(key)
    assert store.quarantined() == {key}
    opened = []
    open_blob = store._blobs.open
    monkeypatch.setattr(store._blobs, "open", lambda digest: opened.append(digest) or open_blob(digest))
    for call in (store.load, store.spec, store.hold):
        with pytest.raises(AdapterCorrupt, match="upload the same file again"):
            call(key)
    assert opened == []
    store.load(other)
    store.hold(other)
    put(store, data)
    assert store.quarantined() == frozenset()
    store.hold(key)
    assert store.load(key).spec.key == key


def test_a_twin_with_the_same_weights_is_judged_by_its_own_read(
    store: AdapterStore, damaged: tuple[AdapterKey, bytes]
) -> None:
    key, data = damaged
    put(store, data)
    twin = store.register("twin", build.config(lora_alpha=3), put(store, data)).ref.key
    [file] = blobs(store).values()
    flip(file)
    with pytest.raises(AdapterCorrupt):
        store.load(key)
    store.hold(twin)
    with pytest.raises(AdapterCorrupt):
        store.load(twin)
    assert store.quarantined() == {key, twin}
    put(store, data)
    assert store.quarantined() == frozenset()


def test_a_content_that_goes_is_not_in_quarantine(store: AdapterStore, damaged: tuple[AdapterKey, bytes]) -> None:
    key, data = damaged
    with pytest.raises(AdapterCorrupt):
        store.load(key)
    store.delete("mia")
    assert store.quarantined() == frozenset()
    assert store.register("mia", build.config(), put(store, data)).ref.key == key
    store.load(key)


def test_a_repair_while_it_is_read_is_not_undone(
    store: AdapterStore, damaged: tuple[AdapterKey, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, data = damaged
    load, reading, repaired = store._content_reader.load, threading.Event(), threading.Event()

    def slow_load(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        finally:
            reading.set()
            assert repaired.wait(10)

    monkeypatch.setattr(store._content_reader, "load", slow_load)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(store.load, key)
        assert reading.wait(10)
        put(store, data)
        repaired.set()
        with pytest.raises(AdapterCorrupt):
            read.result()
    assert store.quarantined() == frozenset()
    store.load(key)


def test_the_log_says_so(
    store: AdapterStore, damaged: tuple[AdapterKey, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with pytest.raises(AdapterCorrupt):
            store.load(damaged[0])
    [line] = caplog.messages
    assert f"sha256:{damaged[0][:12]} is in quarantine" in line
