"""The store from upload to load: versions, deletion, restarts."""

import contextlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_kit import BASE, add, blobs, build, digest_of, litter, put, registered

from adapter_store.errors import AdapterExists, AdapterInvalid, AdapterNotFound, InvalidAdapterId, StoreUnusable
from adapter_store.registry.records import Change
from adapter_store.spec import AdapterId
from adapter_store.store import AdapterStore


def test_upload_register_resolve_load(store: AdapterStore) -> None:
    tensors = build.tensors()
    data = build.file(tensors)
    digest = put(store, data)
    assert store.blob_exists(digest)
    assert store.blob_exists("sha256:" + digest)
    registration = store.register("mia", build.config(), digest)
    assert registration.created
    assert registration.ref.version == 1
    ref = store.resolve("mia")
    assert ref == registration.ref
    assert ref == store.resolve("mia@1") == store.resolve(f"mia@sha256:{ref.key[:12]}")
    assert ref == store.resolve(f"mia@sha256:{ref.key}")
    spec = store.spec(ref.key)
    assert spec.key == ref.key
    assert spec.weights_digest == digest
    assert store.version_history.report(ref) == registration.report
    weights = store.load(ref.key)
    assert weights.spec == spec
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    np.testing.assert_array_equal(weights[1, "self_attn.v_proj"].b, tensors[name].numpy())
    record = store.get("mia")
    assert (record.current_version, record.key, len(record.versions)) == (1, ref.key, 1)
    assert record.versions[0].rank_max == 4
    assert record.versions[0].bytes == spec.weights_bytes
    assert store.list_adapters() == [record]
    assert not litter(store)


def test_a_local_file_is_copied_in(store: AdapterStore, tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(build.file())
    digest = store.add_blob(path)
    path.unlink()
    assert store.load(store.register("mia", build.config(), digest).ref.key).spec.weights_digest == digest


def test_versions_and_their_deletion(store: AdapterStore) -> None:
    """Random sequences of these are in test_store_machine.py."""
    first, second = add(store, "mia", 1).ref, add(store, "mia", 2).ref
    same = store.register("mia", build.config(lora_dropout=0.5), put(store, build.file(seed=1)))
    assert (same.created, same.ref) == (False, first)
    other_scale = store.register("mia", build.config(lora_alpha=16), put(store, build.file(seed=2))).ref
    assert (other_scale.version, len({v.key for v in store.get("mia").versions})) == (3, 3)
    with pytest.raises(AdapterExists, match="mia"):
        add(store, "mia", 2, if_not_exists=True)
    assert store.delete("mia@3").num_versions == 1
    with pytest.raises(AdapterNotFound, match="adapter 'mia' has no version 3; it has 1, 2"):
        store.resolve("mia@3")
    assert store.delete(f"mia@sha256:{first.key}").num_versions == 1
    assert store.resolve("mia") == second == store.resolve("mia@2")
    store.delete("mia")
    for call in (store.load, store.spec):
        with pytest.raises(AdapterNotFound):
            call(first.key)
    for ask in (store.version_history.report, store.version_history.peft_dir):
        with pytest.raises(AdapterNotFound, match="mia@2"):
            ask(second)
    assert add(store, "mia", 1).ref.version == 4


@pytest.mark.parametrize("adapter_id", ["Mia", "../x", "tiny-llama", "warm", "base", "other", "", "a@1", "a\n"])
def test_refused_ids_leave_the_weights_alone(adapter_id: str, store: AdapterStore) -> None:
    digest = put(store, build.file())
    with pytest.raises(InvalidAdapterId):
        store.register(adapter_id, build.config(), digest)
    assert store.list_adapters() == []
    assert blobs(store).keys() == {digest}


@pytest.mark.parametrize("name", ["base", "other"])
def test_an_adapter_that_is_called_as_statistics_call_something_stays(store: AdapterStore, name: str) -> None:
    """Earlier versions let an adapter have that id."""
    mia = add(store, "mia").ref
    with store._lock:
        store._index.add_version(AdapterId(name), store._index.upload(mia.adapter_id, 1), 0.0)
    store.close()
    with AdapterStore(store.root, BASE) as reopened:
        assert reopened.resolve(name).key == mia.key
        reopened.change(name, Change(aliases={"prod": 1}))
        with pytest.raises(InvalidAdapterId, match="taken by the server") as refused:
            add(reopened, name, 1)
        assert refused.value.suggestion == f"{name}-adapter"
        with pytest.raises(InvalidAdapterId):
            reopened.register_defaults(name, "{}")
        reopened.delete(name, force=True)


def test_an_invalid_adapter_leaves_nothing(store: AdapterStore) -> None:
    for data in (b"", b"\x80\x04\x95" + bytes(50), build.file()[:-1], build.file(modules=("mlp.up_proj",))[:200]):
        digest = put(store, data)
        with pytest.raises(AdapterInvalid):
            store.register("mia", build.config(), digest)
        assert not blobs(store)
    assert store.list_adapters() == []
    digest = put(store, build.file())
    store.register("mia", build.config(), digest)
    with pytest.raises(AdapterInvalid):
        store.register("zoe", build.config(use_bdlora=True), digest)
    assert [r.adapter_id for r in store.list_adapters()] == ["mia"]
    assert blobs(store).keys() == {digest}
    store.load(store.resolve("mia").key)


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "store"
    config = build.config(alpha_pattern={"q_proj": 3, "0.self_attn.q_proj": 5})
    with AdapterStore(root, BASE) as store:
        refs = [store.register("mia", config, put(store, build.file(seed=seed))).ref for seed in range(3)]
        store.delete("mia@2")
        store.change(
            "mia", Change(version=1, aliases={"prod": {1: 0.25, 3: 0.75}}, limits={"max_running": 2, "weight": 2.5})
        )
        before = store.list_adapters()
    with AdapterStore(root, BASE) as store:
        assert store.list_adapters() == before
        assert isinstance(store.limits("mia")["max_running"], int)
        assert store.resolve("mia@1") == refs[0]
        assert store.load(refs[2].key).spec.modules[0].scaling == 3 / 4
        assert store.register("mia", config, put(store, build.file(seed=9))).ref.version == 4


def test_a_closed_store_says_so(store: AdapterStore) -> None:
    key, digest = registered(store)
    store.close()
    for call in (lambda: store.load(key), lambda: store.delete("mia"), lambda: store.open_blob(digest, 1),
                 lambda: store.register("zoe", build.config(), digest)):  # fmt: skip
        with pytest.raises(StoreUnusable, match="closed"):
            call()


def test_opening_removes_unreferenced_files(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with AdapterStore(root, BASE) as store:
        kept = put(store, build.file())
        store.register("mia", build.config(), kept)
        fresh, old = (put(store, build.file(seed=seed)) for seed in (1, 2))
    day_before_yesterday = time.time() - 2 * 86_400
    for digest in (kept, old):
        os.utime(root / "blobs" / "sha256" / digest, (day_before_yesterday, day_before_yesterday))
    (root / "tmp" / "unfinished").write_bytes(b"x")
    with AdapterStore(root, BASE) as store:
        assert blobs(store).keys() == {kept, fresh}
        assert not litter(store)


def test_configs_that_json_cannot_hold_are_refused(store: AdapterStore) -> None:
    for bad in (float("nan"), float("inf"), b"x", {1: 2}, object()):
        digest = put(store, build.file())
        with pytest.raises(AdapterInvalid):
            store.register("mia", build.config(lora_dropout=bad), digest)
    odd = json.loads('"\\ud800"')
    store.register("mia", build.config(revision=odd), put(store, build.file()))
    store.spec(store.resolve("mia").key)


def test_concurrent_uploads_to_one_id(store: AdapterStore, tmp_path: Path) -> None:
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
        assert store.spec(registration.ref.key).weights_digest == digest_of(data)
    store.close()
    with AdapterStore(tmp_path / "store", BASE) as reopened:
        assert reopened.get("mia") == record


def test_concurrent_uploads_of_one_content(store: AdapterStore) -> None:
    data = build.file()
    with ThreadPoolExecutor(8) as pool:
        registrations = list(pool.map(lambda _: store.register("mia", build.config(), put(store, data)), range(16)))
    assert {r.ref.version for r in registrations} == {1}
    assert [r.created for r in registrations].count(True) == 1


def test_concurrent_uploads_to_many_ids_with_if_not_exists(store: AdapterStore) -> None:
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


def test_readers_see_whole_states_while_writers_replace_and_delete(store: AdapterStore) -> None:
    files = [build.file(seed=seed) for seed in range(4)]
    store.register("keep", build.config(), put(store, files[0]))
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            kept = store.resolve("keep")
            assert store.load(kept.key).spec.key == kept.key
            for record in store.list_adapters():
                assert record.current_version in {v.version for v in record.versions}
            with contextlib.suppress(AdapterNotFound):  # deleted at this moment
                ref = store.resolve("churn")
                assert store.load(ref.key).spec.key == ref.key

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(4)]
        try:
            for turn in range(12):
                store.register("churn", build.config(), put(store, files[1 + turn % 3]))
                store.register("keep", build.config(), put(store, files[turn % 4]))
                if turn % 3 == 2:
                    store.delete("churn")
        finally:
            stop.set()
        for reader in readers:
            reader.result()
