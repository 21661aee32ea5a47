"""Near names among few and among thousands."""

import difflib

import pytest

from adapter_store.registry.near_names import NUM_COMPARED, near_names

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
