from pathlib import Path

import pytest
from store_kit import blobs, build, digest_of, put

from adapter_store.errors import AdapterInvalid
from adapter_store.store import AdapterStore


@pytest.mark.parametrize("other", ["bob", "alice"])
def test_weights_that_were_taken_are_there_whatever_others_do(store: AdapterStore, other: str) -> None:
    """Two uploads of the same bytes, by one principal or two: the end of one does not affect the other."""
    data = build.file()
    digest = digest_of(data)
    for principal in ("alice", other):
        put(store, data, principal)
    with pytest.raises(AdapterInvalid):
        store.register("theirs", build.config(use_dora=True), digest, principal=other)
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
            store.register("theirs", build.config(use_dora=True), digest)

    monkeypatch.setattr(store._blobs, "adopt", adopt_and_fail)
    put(store, data)
    assert store.register("mia", build.config(), digest).created
