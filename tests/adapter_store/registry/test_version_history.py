"""What belongs to one version and goes with it, though versions share contents."""

import contextlib
import sqlite3
from pathlib import Path

import pytest
from store_kit import add, build, put

from adapter_store.errors import AdapterNotFound
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore


class TestVerdicts:
    def test_they_go_with_the_version(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        first = store.resolve("mia@1")
        assert store.version_history.verdict(first) is None
        store.version_history.record_verdict(first, {"ok": False, "max_error": 1.0})
        store.version_history.record_verdict(first, {"ok": True, "max_error": 1e-3, "prompts": ["a"]})
        assert store.version_history.verdict(first) == {"ok": True, "max_error": 1e-3, "prompts": ["a"]}
        with pytest.raises(ValueError, match="JSON"):
            store.version_history.record_verdict(first, {"max_error": float("nan")})
        assert store.version_history.verdict(first)["ok"] is True  # type: ignore[index]
        hold = store.hold(mia[0])
        store.delete("mia@1")
        assert store.version_history.verdict(first) is None
        with pytest.raises(AdapterNotFound, match="mia@1"):
            store.version_history.record_verdict(first, {})
        again = add(store, "mia", 0).ref
        assert again.key == first.key == hold.key
        assert store.version_history.verdict(again) is None


def dump(root: Path) -> bytes:
    """Everything that the index of a closed store says."""
    with contextlib.closing(sqlite3.connect(root / "index.sqlite3")) as db:
        return "\n".join(db.iterdump()).encode()


def test_what_is_not_of_the_content_is_of_one_version(store: AdapterStore) -> None:
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
