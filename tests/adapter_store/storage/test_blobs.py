"""Uploads of weights: durable before they have a name, and without a trace if they fail."""

import contextlib
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_kit import add, blobs, build, digest_of, litter, put

from adapter_store.errors import (
    BlobLengthMismatch,
    BlobNotFound,
    BlobTooLarge,
    DigestMismatch,
    InvalidDigest,
    StoreFull,
    StoreUnusable,
)
from adapter_store.storage.blobs import BlobFile, fsync_directory
from adapter_store.store import AdapterStore


def test_blob_uploads_that_fail_leave_nothing(store: AdapterStore) -> None:
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
    with pytest.raises(ValueError, match="closed"):
        upload.write(b"x")
    with store.open_blob(wrong, 10) as upload:
        upload.write(b"half")
        assert len(litter(store)) == 1
    upload.abort()
    assert not litter(store)
    assert not blobs(store)
    with pytest.raises(BlobTooLarge, match="a rank above --max-lora-rank") as too_large:
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


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, StoreUnusable)]
)
@pytest.mark.parametrize("operation", ["open", "write", "fsync", "replace"])
def test_a_disk_that_refuses_an_upload(
    operation: str, number: int, error: type[Exception], store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = build.file()

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/secret/path")

    with monkeypatch.context() as patch:
        patch.setattr(f"adapter_store.storage.blobs.os.{operation}", fail)
        with pytest.raises(error) as caught:
            put(store, data)
    assert "secret" not in str(caught.value)
    assert not blobs(store)
    assert not litter(store)
    store.register("mia", build.config(), put(store, data))


def test_a_folder_that_cannot_be_made_durable_shows_no_blob(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr("adapter_store.storage.blobs.fsync_directory", fail)
        with pytest.raises(StoreUnusable):
            put(store, build.file())
    assert not blobs(store)


def test_weights_cannot_be_registered_before_their_name_is_durable(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client may ask for them between the rename and the fsync of the folder."""
    data, found = build.file(), []

    def look(path: Path) -> None:
        found.append(store.blob_exists(digest_of(data)))
        with pytest.raises(BlobNotFound):
            store.register("mia", build.config(), digest_of(data))

    monkeypatch.setattr("adapter_store.storage.blobs.fsync_directory", look)
    put(store, data)
    assert found == [False]
    assert store.register("mia", build.config(), digest_of(data)).ref.version == 1


def test_an_upload_that_fails_takes_no_other_ones_weights(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two uploads of the same weights, the first cannot be made durable, after the second has arrived."""
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
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = put(store, build.file())
    [name] = blobs(store)
    day_ago = time.time() - 90_000
    os.utime(blobs(store)[name], (day_ago, day_ago))
    list_files = store._blobs.oldest_first

    def meanwhile() -> list[BlobFile]:
        found = list_files()
        put(store, build.file())
        return found

    monkeypatch.setattr(store._blobs, "oldest_first", meanwhile)
    assert store.collector.remove_orphans().num_blobs == 0
    assert blobs(store).keys() == {digest}


def test_orphans_are_listed_while_requests_go_on(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing thousands of names takes long, and every new request needs the store's lock."""
    key = add(store, "mia").ref.key
    list_files = store._blobs.oldest_first

    def listing() -> list[BlobFile]:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(store.hold, key).result(5).key == key
        return list_files()

    monkeypatch.setattr(store._blobs, "oldest_first", listing)
    store.collector.remove_orphans()


def test_many_versions_go_with_one_fsync(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fsync per file would block other changes; a file that cannot be removed keeps none of the others."""
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
    assert blobs(store).keys() == {digests[3], digests[7]}
    store.load(kept)
