"""Resolving names from memory: never behind a writer, and with the most similar ids of thousands."""

import difflib
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_kit import add, build, put

from adapter_store.errors import AdapterNotFound
from adapter_store.registry.near_names import NUM_COMPARED, near_names
from adapter_store.registry.records import Change
from adapter_store.store import AdapterStore

MANY = [f"bot-{number:04d}" for number in range(5000)]


@pytest.mark.parametrize("wanted", ["mia", "Mio", "mai", "zzz", ""])
def test_few_are_compared_all(wanted: str) -> None:
    known = ["mia", "mia-2", "tom", "mario"]
    assert near_names(wanted, known) == tuple(difflib.get_close_matches(wanted.lower(), known, 3))


@pytest.mark.parametrize("typed", ["blakcbeard", "blackbeart", "lackbeard", "blackbeard2", "BlackBeard"])
def test_found_among_thousands(typed: str) -> None:
    assert near_names(typed, [*MANY[:2500], "blackbeard", *MANY[2500:]])[0] == "blackbeard"


def test_few_are_compared_of_thousands(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda word, names, n: compared.append(len(names)) or [])
    near_names("nobody", MANY)
    assert compared == [NUM_COMPARED]


def test_few_aliases_are_compared_of_thousands(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, "mia")
    store.change("mia", Change(aliases=dict.fromkeys([*MANY[: 2 * NUM_COMPARED], "blackbeard"], 1)))
    compared, compare = [], difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda *args: compared.append(len(args[1])) or compare(*args))
    with pytest.raises(AdapterNotFound, match=r"did you mean mia:blackbeard, mia\?"):
        store.resolve("mia:blackbeart")
    assert compared == [NUM_COMPARED]


def test_unknown_references_name_their_neighbours(store: AdapterStore) -> None:
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


def test_resolving_never_waits_for_a_writer(store: AdapterStore) -> None:
    ref = add(store, "mia").ref
    with ThreadPoolExecutor(1) as pool, store._lock:
        assert pool.submit(store.resolve, "mia").result(timeout=30) == ref
        assert pool.submit(store.list_adapters).result(timeout=30)
