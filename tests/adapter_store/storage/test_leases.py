"""Weights that are being registered stay, whatever other registrations and deletions do."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from store_kit import build, put

from adapter_store.errors import AdapterInvalid, BlobNotFound
from adapter_store.store import AdapterStore


def test_a_bad_config_does_not_take_a_good_ones_weights(store: AdapterStore) -> None:
    """A refused registration cleans up, but never weights that another one is registering."""
    data = build.file()

    def upload(number: int) -> bool:
        config = build.config(use_bdlora=number % 2 == 0)
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


@pytest.mark.parametrize("action", ["delete", "invalid"])
def test_weights_being_registered_are_not_removed_by_others(
    action: str, store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's delete (or refusal) happens while this registration is checking the same weights."""
    digest = put(store, build.file())
    store.register("old", build.config(), digest)
    check = store._content_reader.check

    def slow_check(*arguments: Any, **terms: Any) -> Any:
        monkeypatch.setattr(store._content_reader, "check", check)
        checked = check(*arguments, **terms)
        store.delete("old")
        if action == "invalid":
            with pytest.raises(AdapterInvalid):
                store.register("bad", build.config(r=0), digest)
        return checked

    monkeypatch.setattr(store._content_reader, "check", slow_check)
    key = store.register("new", build.config(), digest).ref.key
    assert store.load(key).spec.key == key
