"""Reading stored weights: a flipped bit is found wherever it is, and the same upload repairs it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from store_kit import BASE, add, blobs, build, flip, put, registered

from adapter_store.errors import AdapterCorrupt, AdapterInvalid, AdapterNotFound
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore


def test_a_bit_flip_is_found_and_uploading_again_repairs_it(store: AdapterStore) -> None:
    data = build.file()
    key, digest = registered(store)
    other = add(store, "zoe", 1).ref.key
    path = blobs(store)[digest]
    for position in (3, 200, len(data) - 1):
        flip(path, position, 4)
        with pytest.raises(AdapterCorrupt, match="upload the same file again"):
            store.load(key)
        store.load(other)
        assert put(store, data) == digest
        assert store.load(key).spec == store.spec(key)
    path.unlink()
    with pytest.raises(AdapterCorrupt, match="gone"):
        store.load(key)
    assert put(store, data) == digest
    assert store.load(key).spec == store.spec(key)


def test_a_header_that_was_read_wrongly_once_is_not_believed(store: AdapterStore) -> None:
    """The spec of a content is kept; weights that come with another header than it was read from are read anew."""
    key, _ = registered(store)
    whole = store.load(key)
    checked = store._content_reader._newest[key]
    store._content_reader._newest[key] = replace(checked, header_bytes=b"\xff" + checked.header_bytes[1:], spec=None)
    again = store.load(key)
    assert again.spec == whole.spec
    assert all((again[site].a == whole[site].a).all() for site in whole)


def test_a_damaged_header_is_found_by_its_first_reader(store: AdapterStore) -> None:
    data = build.file()
    key, digest = registered(store)
    blobs(store)[digest].write_bytes(b"\xff" + data[1:])
    with pytest.raises(AdapterCorrupt):
        store.spec(key)


def test_a_flip_between_upload_and_registration(store: AdapterStore) -> None:
    data = bytearray(build.file())
    digest = put(store, bytes(data))
    data[-1] ^= 1
    blobs(store)[digest].write_bytes(data)
    with pytest.raises(AdapterCorrupt):
        store.register("mia", build.config(), digest)
    assert store.list_adapters() == []


def test_a_lower_rank_limit_refuses_the_load_not_the_start(tmp_path: Path) -> None:
    with AdapterStore(tmp_path / "store", BASE) as store:
        key = store.register("mia", build.config(r=8), put(store, build.file(rank=8))).ref.key
    with AdapterStore(tmp_path / "store", BASE, max_lora_rank=4) as store:
        for call in (store.load, store.spec):
            with pytest.raises(AdapterInvalid, match="max-lora-rank 8"):
                call(key)


def test_an_index_that_contradicts_the_weights_is_corrupt(store: AdapterStore) -> None:
    key = add(store, "mia").ref.key
    store._index._db.execute("UPDATE contents SET config = ?", (json.dumps(build.config(lora_alpha=9)),))
    for call in (store.load, store.spec):
        with pytest.raises(AdapterCorrupt, match="upload it again"):
            call(key)


def test_unknown_key_is_not_found(store: AdapterStore) -> None:
    with pytest.raises(AdapterNotFound):
        store.load(AdapterKey("0" * 64))
