"""Uploads without a version: kept for those who sent them, and bounded."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from store_kit import BASE, blobs, build, digest_of, put

from adapter_store.errors import AdapterInvalid
from adapter_store.quota import ANONYMOUS
from adapter_store.storage.blobs import REGISTRATION_S
from adapter_store.store import AdapterStore


@pytest.mark.parametrize("other", ["bob", "alice"])
def test_weights_that_were_taken_are_there_whatever_others_do(store: AdapterStore, other: str) -> None:
    """Two uploads of the same bytes, by one principal or two: the end of one does not affect the other."""
    data = build.file()
    digest = digest_of(data)
    for principal in ("alice", other):
        put(store, data, principal)
    with pytest.raises(AdapterInvalid):
        store.register("theirs", build.config(use_bdlora=True), digest, principal=other)
    store.register("mia", build.config(), digest, principal="alice")
    put(store, data, other)
    store.delete("mia")
    store.register("theirs", build.config(), digest, principal=other)
    store.delete("theirs")
    assert not blobs(store)


def test_weights_that_become_visible_while_others_end_are_there(
    store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration fails between the rename and its record."""
    data = build.file()
    digest = put(store, data)
    adopt = store._blobs.adopt

    def adopt_and_fail(temporary: Path, name: str) -> None:
        adopt(temporary, name)
        with pytest.raises(AdapterInvalid):
            store.register("theirs", build.config(use_bdlora=True), digest)

    monkeypatch.setattr(store._blobs, "adopt", adopt_and_fail)
    put(store, data)
    assert store.register("mia", build.config(), digest).created


def test_unregistered_weights_are_bounded_in_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first; what versions use stays, and what was uploaded a moment ago may still be registered."""
    files = [build.file(seed=seed) for seed in range(5)]
    with AdapterStore(tmp_path, BASE) as store:
        mia, *rest = [put(store, data) for data in files]
        store.register("mia", build.config(), mia)
        for age_s, name in zip((7200, 1000, 900, 800, 5), (mia, *rest), strict=True):
            os.utime(next(store.root.rglob(name)), (time.time() - age_s,) * 2)
        two = 2 * len(files[1])
        assert store.collector.remove_orphans(max_bytes=two).num_blobs == 0, (
            "their uploader may be about to register them"
        )
        with monkeypatch.context() as later:
            now_s = time.monotonic() + REGISTRATION_S + 1
            later.setattr("adapter_store.storage.pending_uploads.time", SimpleNamespace(monotonic=lambda: now_s))
            assert store.collector.remove_orphans(max_bytes=two).num_blobs == 2
        assert not store.pending_uploads.has_uploaded(ANONYMOUS, rest[0]), "to be sent again"
        assert blobs(store).keys() == {mia, *rest[2:]}
    with AdapterStore(tmp_path, BASE) as store:
        assert store.collector.remove_orphans(max_bytes=0).num_blobs == 1, "a restart forgets uploaders, but not ages"
        assert blobs(store).keys() == {mia, rest[3]}
        store.load(store.resolve("mia").key)
        store.register("late", build.config(), rest[3])
