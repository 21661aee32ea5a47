"""Versions with defaults, with weights and without: their numbers, digests, deletion, export and import."""

import io
from collections.abc import Mapping
from pathlib import Path

import pytest
from store_kit import BASE, add, build, put

from adapter_store.errors import AdapterNotFound, AdaptersRefused
from adapter_store.maintenance.archive import export_store, import_store
from adapter_store.maintenance.offline_store import OfflineStore
from adapter_store.registry.records import Change
from adapter_store.store import AdapterStore

KIND, STERN = '{"system":"You are kind."}', '{"system":"You are stern."}'


def test_other_defaults_are_another_version_of_the_same_weights(store: AdapterStore) -> None:
    bare = add(store, "mia", 1).ref
    kind = store.register_defaults("mia", KIND, bare)
    stern = store.register_defaults("mia", STERN, kind.ref)
    assert [kind.ref.version, stern.ref.version] == [2, 3]
    assert {bare.key, kind.ref.key, stern.ref.key} == {bare.key}
    assert len({"", bare.persona, kind.ref.persona, stern.ref.persona}) == 3
    assert kind.report == stern.report == store.version_history.report(bare)
    again = store.register_defaults("mia", KIND, stern.ref)
    assert (again.ref, again.created) == (kind.ref, False)
    # Weights that come without defaults are the first version again, with the same defaults the second.
    assert add(store, "mia", 1).ref == bare
    config, digest = build.config(), put(store, build.file(seed=1))
    assert store.register("mia", config, digest, defaults=KIND).ref == kind.ref
    assert store.version_history.defaults(store.resolve("mia")) == KIND


def test_a_persona_needs_no_weights(store: AdapterStore) -> None:
    made = store.register_defaults("muse", KIND, principal="ann")
    assert (made.ref.key, made.report, made.created) == (None, None, True)
    ref = store.resolve("muse")
    assert (ref.version, store.version_history.defaults(ref), store.version_history.owner(ref)) == (1, KIND, "ann")
    store.change("muse", Change(aliases={"prod": 1}))
    with pytest.raises(AdapterNotFound):
        store.version_history.report(ref)
    gone = store.delete("muse", force=True)
    assert (gone.versions, gone.contents, gone.unnamed) == ((1,), (), ())
    assert store.list_adapters() == []


def test_weights_stay_until_their_last_version_goes(store: AdapterStore) -> None:
    bare = add(store, "mia", 1).ref
    kind = store.register_defaults("mia", KIND, bare).ref
    assert store.delete("mia@1").unnamed == ()
    store.load(kind.key)
    assert store.delete("mia").unnamed == (bare.key,)
    with pytest.raises(AdapterNotFound):
        store.register_defaults("mia", STERN, kind)


def test_a_digest_cannot_be_guessed(tmp_path: Path) -> None:
    """The same defaults have another digest in another store, and so has the etag of their id."""
    digests, etags = set(), set()
    for name in ("one", "two"):
        with AdapterStore(tmp_path / name, BASE) as store:
            digests.add(store.register_defaults("muse", KIND).ref.persona)
            etags.add(store.get("muse").etag)
        with AdapterStore(tmp_path / name, BASE) as store:
            digests.add(store.resolve("muse").persona)
    assert len(digests) == len(etags) == 2


def test_a_guess_meets_no_defaults_of_another_owner(store: AdapterStore) -> None:
    """Neither its digest under an own id, nor whether a version is new, tells what somebody else's defaults are."""
    kind = store.register_defaults("mia", KIND, principal="ann")
    digests = {kind.ref.persona, store.register_defaults("muse", KIND, principal="ann").ref.persona}
    stern = store.register_defaults("mia", STERN, principal="ann")
    guess = store.register_defaults("mia", KIND, principal="bob")
    digests.add(guess.ref.persona)
    assert (guess.created, guess.ref.version, len(digests)) == (True, stern.ref.version + 1, 3)
    assert store.register_defaults("mia", KIND, principal="ann").ref == kind.ref
    assert store.register_defaults("mia", KIND, principal="bob").ref == guess.ref
    # Weights hide nothing: they are one version, whoever uploads them.
    assert add(store, "zoe", 1, principal="ann").ref == add(store, "zoe", 1, principal="bob").ref


def test_an_archive_keeps_defaults(store: AdapterStore, tmp_path: Path) -> None:
    ordered = '{"system":"Grüß dich","response_format":{"type":"json_schema","json_schema":{"schema":{"b":1,"a":2}}}}'
    bare = add(store, "mia", 1).ref
    store.register_defaults("mia", ordered, bare, principal="ann")
    store.register_defaults("muse", KIND)
    store.change("mia", Change(version=1, aliases={"prod": {1: 0.9, 2: 0.1}}))
    records = store.list_adapters()
    store.close()
    file = io.BytesIO()
    with OfflineStore(store.root) as closed:
        export_store(closed, file)
    seen: list[str] = []

    def note(defaults: str, config: Mapping[str, object]) -> tuple[()]:
        seen.append(defaults)
        return ()

    with OfflineStore(tmp_path / "new", create=True) as closed:
        import_store(closed, io.BytesIO(file.getvalue()), BASE, 16, check_defaults=note)
    assert sorted(seen) == sorted([ordered, KIND])
    with AdapterStore(tmp_path / "new", BASE) as new:
        assert [(r.adapter_id, r.current_version, r.aliases) for r in new.list_adapters()] == [
            (r.adapter_id, r.current_version, r.aliases) for r in records
        ]
        ref = new.resolve("mia@2")
        assert (new.version_history.defaults(ref), new.version_history.owner(ref)) == (ordered, "ann")
        assert new.resolve("muse").key is None
        assert new.load(bare.key).spec.key == bare.key

    def refuse(defaults: str, config: Mapping[str, object]) -> tuple[()]:
        raise ValueError("no")

    with (
        OfflineStore(tmp_path / "other", create=True) as closed,
        pytest.raises(AdaptersRefused, match=r"mia@2: no; muse@1: no"),
    ):
        import_store(closed, io.BytesIO(file.getvalue()), BASE, 16, check_defaults=refuse)
