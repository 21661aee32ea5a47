import contextlib
import errno
import hashlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_store.errors import (
    AdapterCorrupt,
    AdapterExists,
    AdapterInvalid,
    AdapterNotFound,
    BlobLengthMismatch,
    BlobNotFound,
    BlobTooLarge,
    DigestMismatch,
    InvalidAdapterId,
    InvalidDigest,
    StoreFull,
    StoreLocked,
    StoreUnusable,
)
from adapter_store.registry.names import Names
from adapter_store.spec import AdapterKey, BaseShapes
from adapter_store.storage.blobs import fsync_directory
from adapter_store.store import AdapterStore

Put = Callable[..., str]


def blobs(store_or_root: AdapterStore | Path, tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "store" / "blobs" / "sha256").iterdir()}


def dump(root: Path) -> bytes:
    """Everything that the index of a closed store says."""
    with contextlib.closing(sqlite3.connect(root / "index.sqlite3")) as db:
        return "\n".join(db.iterdump()).encode()


def litter(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "store" / "tmp").iterdir())


def test_upload_register_resolve_load(store: AdapterStore, put: Put, build: Any, tmp_path: Path) -> None:
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
    assert not litter(tmp_path)


def test_a_local_file_is_copied_in(store: AdapterStore, build: Any, tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(build.file())
    digest = store.add_blob(path)
    path.unlink()
    assert store.load(store.register("mia", build.config(), digest).ref.key).spec.weights_digest == digest


def test_versions(store: AdapterStore, put: Put, build: Any) -> None:
    first, second = (put(store, build.file(seed=seed)) for seed in (1, 2))
    store.register("mia", build.config(), first)
    again = store.register("mia", build.config(lora_dropout=0.5), first)
    assert (again.created, again.ref.version) == (False, 1)
    new = store.register("mia", build.config(), second)
    assert (new.created, new.ref.version) == (True, 2)
    other_scale = store.register("mia", build.config(lora_alpha=16), second)
    assert other_scale.ref.version == 3
    assert len({v.key for v in store.get("mia").versions}) == 3
    back = store.register("mia", build.config(), first)
    assert (back.created, back.ref.version) == (False, 1)
    assert store.resolve("mia").version == 1
    assert store.resolve("mia@2") == new.ref
    with pytest.raises(AdapterExists, match="mia"):
        store.register("mia", build.config(), second, if_not_exists=True)
    assert store.resolve("mia").version == 1


@pytest.mark.parametrize("other", ["bob", "alice"])
def test_weights_that_were_taken_are_there_whatever_others_do(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path, other: str
) -> None:
    """Two send the same bytes, perhaps with one key or none; what becomes of the one's takes nothing from the other."""
    data = build.file()
    digest = hashlib.sha256(data).hexdigest()
    for principal in ("alice", other):
        put(store, data, principal)
    with pytest.raises(AdapterInvalid):
        store.register("theirs", build.config(use_dora=True), digest, principal=other)
    store.register("mia", build.config(), digest, principal="alice")
    put(store, data, other)
    store.delete("mia")
    store.register("theirs", build.config(), digest, principal=other)
    store.delete("theirs")
    assert blobs(store, tmp_path) == set()


def test_weights_that_become_visible_while_others_end_are_there(
    store: AdapterStore, put: Put, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration fails between the rename and what is noted of it."""
    data = build.file()
    digest = put(store, data)
    adopt = store._blobs.adopt

    def adopt_and_fail(temporary: Path, name: str) -> None:
        adopt(temporary, name)
        with pytest.raises(AdapterInvalid):
            store.register("theirs", build.config(use_dora=True), digest)

    monkeypatch.setattr(store._blobs, "adopt", adopt_and_fail)
    put(store, data)
    assert store.register("mia", build.config(), digest).created


def test_two_ids_share_one_content(store: AdapterStore, put: Put, build: Any, tmp_path: Path) -> None:
    digest = put(store, build.file())
    refs = [store.register(name, build.config(), digest).ref for name in ("a", "b")]
    keys = {ref.key for ref in refs}
    assert len(keys) == 1
    assert store.delete("a").num_versions == 1
    assert blobs(store, tmp_path) == {digest}
    key = keys.pop()
    store.load(key)
    assert store.delete("b").num_versions == 1
    assert blobs(store, tmp_path) == set()
    for call in (store.load, store.spec):
        with pytest.raises(AdapterNotFound):
            call(key)
    for ask in (store.version_history.report, store.version_history.peft_dir):
        for ref in refs:
            with pytest.raises(AdapterNotFound, match=f"{ref.adapter_id}@1"):
                ask(ref)


def test_what_is_not_of_the_content_is_of_one_version(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path
) -> None:
    """Two uploaders of one content: each is shown what it sent and was told, also after the other is gone."""
    digest = put(store, build.file())
    whole = build.config(base_model_name_or_path="acme/secret-13b", auto_mapping={"note": "secret"})
    part = build.config(base_model_name_or_path="probe", target_modules=["q_proj", "v_proj", "o_proj"])
    ann = store.register("ann", whole, digest)
    bob = store.register("bob", part, digest, allow_partial=True)
    assert ann.ref.key == bob.ref.key
    assert ann.report != bob.report
    for sent, done in ((whole, ann), (part, bob)):
        assert store.version_history.report(done.ref) == done.report
        assert store.version_history.peft_dir(done.ref).config == sent
    for name in ("cyd", "dan"):
        store.version_history.record_verdict(store.register(name, whole, digest).ref, {"of": name})
    store.version_history.record_verdict(bob.ref, {"of": "bob"})
    assert store.version_history.verdict(ann.ref) is None
    assert store.version_history.verdict(store.resolve("cyd")) == {"of": "cyd"}
    for name in ("ann", "cyd", "dan"):
        store.delete(name)
    root, base = store.root, store.base
    store.close()
    assert b"secret" not in dump(root)
    with AdapterStore(root, base) as again:
        assert again.version_history.report(bob.ref) == bob.report
        assert again.version_history.verdict(bob.ref) == {"of": "bob"}
        assert again.load(bob.ref.key).spec.key == bob.ref.key


def test_what_is_held_outlives_its_deletion(store: AdapterStore, put: Put, build: Any, tmp_path: Path) -> None:
    digest = put(store, build.file())
    key = store.register("mia", build.config(), digest).ref.key
    first, second = store.hold(key), store.hold(key)
    assert store.delete("mia").unnamed == (key,)
    assert not store.is_named(key)
    with pytest.raises(AdapterNotFound):
        store.resolve("mia")
    assert store.load(key).spec.key == key
    third = store.hold(key)
    del first, third
    assert store.collect() == 0
    assert blobs(store, tmp_path) == {digest}
    del second
    assert store.collect() == 1
    assert blobs(store, tmp_path) == set()
    with pytest.raises(AdapterNotFound):
        store.hold(key)


def test_a_held_content_that_gets_a_name_again_stays(store: AdapterStore, put: Put, build: Any, tmp_path: Path) -> None:
    digest = put(store, build.file())
    hold = store.hold(store.register("mia", build.config(), digest).ref.key)
    store.delete("mia")
    assert store.register("noa", build.config(), digest).ref.key == hold.key
    del hold
    assert store.collect() == 0
    assert blobs(store, tmp_path) == {digest}


def test_what_was_held_when_the_server_died_is_gone_at_the_next_start(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path
) -> None:
    root, base = tmp_path / "store", store.base
    key = store.register("mia", build.config(), put(store, build.file())).ref.key
    hold = store.hold(key)
    store.delete("mia")
    store.close()
    with AdapterStore(root, base) as again:
        with pytest.raises(AdapterNotFound):
            again.load(hold.key)
        assert blobs(again, tmp_path) == set()


def test_delete_of_a_version_moves_the_id_and_its_number_is_not_used_again(
    store: AdapterStore, put: Put, build: Any
) -> None:
    digests = [put(store, build.file(seed=seed)) for seed in range(4)]
    keys = [store.register("mia", build.config(), digest).ref.key for digest in digests[:3]]
    assert store.delete("mia@3").num_versions == 1
    assert store.resolve("mia").version == 2
    with pytest.raises(AdapterNotFound, match=r"mia@3.*did you mean mia"):
        store.resolve("mia@3")
    assert store.delete(f"mia@sha256:{keys[0]}").num_versions == 1
    assert store.resolve("mia").version == 2
    assert store.register("mia", build.config(), digests[3]).ref.version == 4
    assert store.delete("mia").num_versions == 2
    digest = put(store, build.file(seed=0))
    assert store.register("mia", build.config(), digest).ref.version == 5


def test_unknown_references_name_their_neighbours(store: AdapterStore, put: Put, build: Any) -> None:
    digest = put(store, build.file())
    for name in ("pirate", "pirates", "poet", "pilot-2", "zz"):
        store.register(name, build.config(), digest)
    with pytest.raises(AdapterNotFound) as caught:
        store.resolve("pirat")
    assert caught.value.near == ("pirate", "pirates")
    with pytest.raises(AdapterNotFound) as caught:
        store.resolve("Pirate")
    assert "pirate" in caught.value.near
    for reference in ("", "\x00", "x" * 100_000, "pirate@9", "pirate:prod", "../pirate"):
        for call in (store.resolve, store.delete):
            with pytest.raises(AdapterNotFound) as caught:
                call(reference)
            assert len(str(caught.value)) < 400
            assert len(caught.value.near) <= 3
    with pytest.raises(AdapterNotFound):
        store.get("nobody")


@pytest.mark.parametrize("adapter_id", ["Mia", "../x", "tiny-llama", "warm", "verify", "", "a@1", "a\n"])
def test_refused_ids_leave_the_weights_alone(
    adapter_id: str, store: AdapterStore, put: Put, build: Any, tmp_path: Path
) -> None:
    digest = put(store, build.file())
    with pytest.raises(InvalidAdapterId):
        store.register(adapter_id, build.config(), digest)
    assert store.list_adapters() == []
    assert blobs(store, tmp_path) == {digest}


def test_an_invalid_adapter_leaves_nothing(store: AdapterStore, put: Put, build: Any, tmp_path: Path) -> None:
    for data in (b"", b"\x80\x04\x95" + bytes(50), build.file()[:-1], build.file(modules=("mlp.up_proj",))[:200]):
        digest = put(store, data)
        with pytest.raises(AdapterInvalid):
            store.register("mia", build.config(), digest)
        assert blobs(store, tmp_path) == set()
    assert store.list_adapters() == []
    digest = put(store, build.file())
    store.register("mia", build.config(), digest)
    with pytest.raises(AdapterInvalid):
        store.register("zoe", build.config(use_dora=True), digest)
    assert [r.adapter_id for r in store.list_adapters()] == ["mia"]
    assert blobs(store, tmp_path) == {digest}
    store.load(store.resolve("mia").key)


def test_blob_uploads_that_fail_leave_nothing(store: AdapterStore, build: Any, tmp_path: Path) -> None:
    data = build.file()
    wrong = "0" * 64
    with store.open_blob(wrong, len(data)) as upload:
        upload.write(data)
        with pytest.raises(DigestMismatch) as mismatch:
            upload.commit()
    assert mismatch.value.expected == wrong
    assert mismatch.value.actual in str(mismatch.value)
    with store.open_blob(wrong, len(data)) as upload:
        upload.write(data[:-1])
        with pytest.raises(BlobLengthMismatch, match=f"{len(data) - 1} came"):
            upload.commit()
    upload = store.open_blob(wrong, 10)
    with pytest.raises(BlobLengthMismatch, match="at least 11 came"):
        upload.write(bytes(11))
    with pytest.raises(ValueError, match="over"):
        upload.write(b"x")
    with store.open_blob(wrong, 10) as upload:
        upload.write(b"half")
        assert len(litter(tmp_path)) == 1
    upload.abort()
    assert not litter(tmp_path)
    assert blobs(store, tmp_path) == set()
    with pytest.raises(BlobTooLarge) as too_large:
        store.open_blob(wrong, store.max_blob_bytes + 1)
    assert too_large.value.limit == store.max_blob_bytes
    for call in (
        lambda: store.open_blob("../../x", 1),
        lambda: store.blob_exists("x"),
        lambda: store.register("a", {}, "x"),
    ):
        with pytest.raises(InvalidDigest):
            call()
    with pytest.raises(BlobNotFound, match="upload the file first"):
        store.register("mia", build.config(), wrong)


def test_a_bit_flip_is_found_and_uploading_again_repairs_it(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path
) -> None:
    data = build.file()
    digest = put(store, data)
    key = store.register("mia", build.config(), digest).ref.key
    other = store.register("zoe", build.config(), put(store, build.file(seed=1))).ref.key
    path = tmp_path / "store" / "blobs" / "sha256" / digest
    for position in (3, 200, len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 4
        path.write_bytes(damaged)
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


def test_a_header_that_was_read_wrongly_once_is_not_believed(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path
) -> None:
    """The spec of a content is kept; weights that come with another header than it was read from are read anew."""
    data = build.file()
    digest = put(store, data)
    key = store.register("mia", build.config(), digest).ref.key
    whole = store.load(key)
    checked = store._content_reader._newest[key]
    store._content_reader._newest[key] = replace(checked, header_bytes=b"\xff" + checked.header_bytes[1:], spec=None)
    again = store.load(key)
    assert again.spec == whole.spec
    assert all((again[site].a == whole[site].a).all() for site in whole)


def test_a_damaged_header_is_found_by_whoever_reads_it_first(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path
) -> None:
    data = build.file()
    digest = put(store, data)
    key = store.register("mia", build.config(), digest).ref.key
    (tmp_path / "store" / "blobs" / "sha256" / digest).write_bytes(b"\xff" + data[1:])
    with pytest.raises(AdapterCorrupt):
        store.spec(key)


def test_a_flip_between_upload_and_registration(store: AdapterStore, put: Put, build: Any, tmp_path: Path) -> None:
    data = bytearray(build.file())
    digest = put(store, bytes(data))
    data[-1] ^= 1
    (tmp_path / "store" / "blobs" / "sha256" / digest).write_bytes(data)
    with pytest.raises(AdapterCorrupt):
        store.register("mia", build.config(), digest)
    assert store.list_adapters() == []


def test_everything_survives_a_restart(tmp_path: Path, base: BaseShapes, put: Put, build: Any) -> None:
    root = tmp_path / "deep" / "store"
    config = build.config(alpha_pattern={"q_proj": 3, "0.self_attn.q_proj": 5})
    with AdapterStore(root, base) as store:
        refs = [store.register("mia", config, put(store, build.file(seed=seed))).ref for seed in range(3)]
        store.delete("mia@2")
        before = store.list_adapters()
    with AdapterStore(root, base) as store:
        assert store.list_adapters() == before
        assert store.resolve("mia@1") == refs[0]
        assert store.load(refs[2].key).spec.modules[0].scaling == 3 / 4
        assert store.register("mia", config, put(store, build.file(seed=9))).ref.version == 4


def test_one_server_at_a_time(tmp_path: Path, base: BaseShapes) -> None:
    root = tmp_path / "store"
    first = AdapterStore(root, base)
    with pytest.raises(StoreLocked, match="another server"):
        AdapterStore(root, base)
    script = (
        "import sys, pathlib; from adapter_store.store import AdapterStore; from adapter_store.spec import BaseShapes\n"
        "from adapter_store.errors import StoreLocked\n"
        "try: AdapterStore(pathlib.Path(sys.argv[1]), BaseShapes('llama', 1, {}))\n"
        "except StoreLocked: print('locked')"
    )
    run = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=True)
    assert run.stdout == "locked\n"
    first.close()
    first.close()
    AdapterStore(root, base).close()


def test_a_closed_store_says_so(store: AdapterStore, put: Put, build: Any) -> None:
    digest = put(store, build.file())
    key = store.register("mia", build.config(), digest).ref.key
    store.close()
    for call in (lambda: store.load(key), lambda: store.delete("mia"), lambda: store.open_blob(digest, 1),
                 lambda: store.register("zoe", build.config(), digest)):  # fmt: skip
        with pytest.raises(StoreUnusable, match="closed"):
            call()


def test_another_base_is_refused_unless_the_store_is_empty(
    tmp_path: Path, base: BaseShapes, put: Put, build: Any
) -> None:
    root = tmp_path / "store"
    deeper = replace(base, num_layers=3)
    AdapterStore(root, deeper).close()
    with AdapterStore(root, base) as store:
        store.register("mia", build.config(), put(store, build.file()))
    with pytest.raises(StoreUnusable, match=r"other shapes.*--store"):
        AdapterStore(root, deeper)
    with pytest.raises(StoreUnusable, match=r"'mia'.*--served-model-name"):
        AdapterStore(root, base, reserved_ids=frozenset({"mia"}))
    AdapterStore(root, replace(base, name="renamed")).close()


def test_a_lower_rank_limit_refuses_the_load_not_the_start(
    tmp_path: Path, base: BaseShapes, put: Put, build: Any
) -> None:
    with AdapterStore(tmp_path / "store", base) as store:
        key = store.register("mia", build.config(r=8), put(store, build.file(rank=8))).ref.key
    with AdapterStore(tmp_path / "store", base, max_lora_rank=4) as store:
        for call in (store.load, store.spec):
            with pytest.raises(AdapterInvalid, match="max-lora-rank 8"):
                call(key)


def test_a_store_that_cannot_be_opened(tmp_path: Path, base: BaseShapes) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnusable, match=str(root)):
            AdapterStore(root, base)
    damaged = tmp_path / "damaged"
    AdapterStore(damaged, base).close()
    (damaged / "index.sqlite3").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreUnusable, match="not a database"):
        AdapterStore(damaged, base)
    (damaged / "index.sqlite3").unlink()
    AdapterStore(damaged, base).close()
    with sqlite3.connect(damaged / "index.sqlite3") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreUnusable, match="layout 99"):
        AdapterStore(damaged, base)


def test_opening_sweeps_what_nobody_names(tmp_path: Path, base: BaseShapes, put: Put, build: Any) -> None:
    root = tmp_path / "store"
    with AdapterStore(root, base) as store:
        kept = put(store, build.file())
        store.register("mia", build.config(), kept)
        fresh, old = (put(store, build.file(seed=seed)) for seed in (1, 2))
    day_before_yesterday = time.time() - 2 * 86_400
    for digest in (kept, old):
        os.utime(root / "blobs" / "sha256" / digest, (day_before_yesterday, day_before_yesterday))
    (root / "tmp" / "unfinished").write_bytes(b"x")
    with AdapterStore(root, base) as store:
        assert blobs(store, tmp_path) == {kept, fresh}
        assert not litter(tmp_path)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, StoreUnusable)]
)
@pytest.mark.parametrize("operation", ["open", "write", "fsync", "replace"])
def test_a_disk_that_refuses_an_upload(
    operation: str, number: int, error: type[Exception], store: AdapterStore, put: Put, build: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    data = build.file()

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/secret/path")

    with monkeypatch.context() as patch:
        patch.setattr(f"adapter_store.storage.blobs.os.{operation}", fail)
        with pytest.raises(error) as caught:
            put(store, data)
    assert "secret" not in str(caught.value)
    assert blobs(store, tmp_path) == set()
    assert not litter(tmp_path)
    store.register("mia", build.config(), put(store, data))


def test_a_folder_that_cannot_be_made_durable_shows_no_blob(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr("adapter_store.storage.blobs.fsync_directory", fail)
        with pytest.raises(StoreUnusable):
            put(store, build.file())
    assert blobs(store, tmp_path) == set()


def test_an_upload_that_fails_takes_no_other_ones_weights(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients bring the same weights; the first one's folder cannot be made durable, after the second has come."""
    data, first_fails, calls = build.file(), threading.Event(), []
    real = fsync_directory

    def fail_first(path: Path) -> None:
        calls.append(path)
        if len(calls) > 1:
            return real(path)
        first_fails.wait(0.3)
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr("adapter_store.storage.blobs.fsync_directory", fail_first)
        first = pool.submit(put, store, data)
        while not calls:
            time.sleep(0.001)
        second = pool.submit(put, store, data)
        with contextlib.suppress(TimeoutError):
            second.result(0.1)
        first_fails.set()
        with pytest.raises(StoreUnusable):
            first.result()
        digest = second.result()
    store.register("mia", build.config(), digest)
    store.load(store.resolve("mia").key)


def test_what_is_uploaded_again_while_orphans_are_listed_stays(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = put(store, build.file())
    [name] = blobs(store, tmp_path)
    day_ago = time.time() - 90_000
    os.utime(tmp_path / "store" / "blobs" / "sha256" / name, (day_ago, day_ago))
    older_than = store._blobs.older_than

    def meanwhile(age_s: float) -> set[str]:
        found = older_than(age_s)
        put(store, build.file())
        return found

    monkeypatch.setattr(store._blobs, "older_than", meanwhile)
    assert store.remove_orphans().num_blobs == 0
    assert blobs(store, tmp_path) == {digest}


def test_orphans_are_listed_while_requests_go_on(
    store: AdapterStore, put: Put, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of names take long to list; whoever begins a request needs the store's lock."""
    key = store.register("mia", build.config(), put(store, build.file())).ref.key
    older_than = store._blobs.older_than

    def listing(age_s: float) -> set[str]:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(store.hold, key).result(5).key == key
        return older_than(age_s)

    monkeypatch.setattr(store._blobs, "older_than", listing)
    store.remove_orphans()


def test_a_full_disk_while_registering_changes_nothing(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path
) -> None:
    store.register("mia", build.config(), put(store, build.file()))
    before = store.list_adapters()
    digest = put(store, build.file(seed=1))
    pages = store._index._db.execute("PRAGMA page_count").fetchone()[0]
    store._index._db.execute(f"PRAGMA max_page_count = {pages}")
    big = build.config(revision="x" * 100_000)
    with pytest.raises(StoreFull, match="nothing changed"):
        store.register("mia", big, digest)
    assert store.list_adapters() == before
    assert digest not in blobs(store, tmp_path)
    store._index._db.execute("PRAGMA max_page_count = 1000000")
    assert store.register("mia", big, put(store, build.file(seed=1))).ref.version == 2


def test_the_index_is_durable_and_strict(store: AdapterStore) -> None:
    db = store._index._db
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)
    schema = db.execute("SELECT sql FROM sqlite_schema WHERE type = 'table'").fetchall()
    assert len(schema) == 10
    assert all(sql.endswith("STRICT") for (sql,) in schema)


def test_resolve_is_fast_among_thousands(store: AdapterStore, put: Put, build: Any) -> None:
    digest = put(store, build.file())
    key = store.register("seed", build.config(), digest).ref.key
    db = store._index._db
    db.execute("BEGIN")
    for i in range(5000):
        db.execute("INSERT INTO adapters VALUES (?, 1, 0.0)", (f"persona-{i:04}",))
        db.execute("INSERT INTO versions VALUES (?, 1, ?, 0.0)", (f"persona-{i:04}", key))
        db.execute(
            "INSERT INTO uploads SELECT ?, 1, report, config FROM uploads WHERE adapter_id = 'seed'",
            (f"persona-{i:04}",),
        )
    db.execute("COMMIT")
    store._names = Names(store._index.records(), random.random)
    started = time.perf_counter()
    for _ in range(1000):
        store.resolve("persona-2500")
    assert (time.perf_counter() - started) / 1000 < 1e-4
    started = time.perf_counter()
    assert len(store.list_adapters()) == 5001
    assert time.perf_counter() - started < 0.05
    started = time.perf_counter()
    with pytest.raises(AdapterNotFound) as caught:
        store.resolve("persona-25000")
    assert len(caught.value.near) == 3
    assert time.perf_counter() - started < 0.5


def test_configs_that_json_cannot_hold_are_refused(store: AdapterStore, put: Put, build: Any) -> None:
    for bad in (float("nan"), float("inf"), b"x", {1: 2}, object()):
        digest = put(store, build.file())
        with pytest.raises(AdapterInvalid):
            store.register("mia", build.config(lora_dropout=bad), digest)
    odd = json.loads('"\\ud800"')
    store.register("mia", build.config(revision=odd), put(store, build.file()))
    store.spec(store.resolve("mia").key)


def test_an_index_that_contradicts_the_weights_is_corrupt(store: AdapterStore, put: Put, build: Any) -> None:
    key = store.register("mia", build.config(), put(store, build.file())).ref.key
    store._index._db.execute("UPDATE contents SET config = ?", (json.dumps(build.config(lora_alpha=9)),))
    for call in (store.load, store.spec):
        with pytest.raises(AdapterCorrupt, match="upload it again"):
            call(key)


def test_unknown_key_is_not_found(store: AdapterStore) -> None:
    with pytest.raises(AdapterNotFound):
        store.load(AdapterKey("0" * 64))


def test_many_versions_go_with_one_fsync(
    store: AdapterStore, put: Put, build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each would keep everybody else from changing anything; a file that stays keeps none of the others."""
    digests = [put(store, build.file(seed=seed)) for seed in range(12)]
    for digest in digests:
        store.register("mia", build.config(), digest)
    kept = store.register("zoe", build.config(), digests[3]).ref.key
    done: list[str] = []
    unlink = os.unlink

    def unlink_but_one(path: Path) -> None:
        done.append(Path(path).name)
        if done[-1] == digests[7]:
            raise OSError(errno.EIO, "EIO")
        unlink(path)

    def fsync(path: Path) -> None:
        done.append("fsync")
        fsync_directory(path)

    monkeypatch.setattr("adapter_store.storage.blobs.os.unlink", unlink_but_one)
    monkeypatch.setattr("adapter_store.storage.blobs.fsync_directory", fsync)
    assert store.delete("mia").num_versions == 12
    assert sorted(done[:-1]) == sorted(set(digests) - {digests[3]})
    assert done[-1] == "fsync"
    assert blobs(store, tmp_path) == {digests[3], digests[7]}
    store.load(kept)
