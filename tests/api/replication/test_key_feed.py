"""Keys travel to followers as changes, and the digest of all keys says whether a follower has them."""

import json
import sqlite3
import tempfile
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.auth.key_store import FILE, ExportedKeys, InvalidKey, KeyStore
from api.auth.principal import KeyLimits, Scope
from api.replication.key_feed import NO_KEYS, KeyFeed, take_over

KEY_NAMES = st.sampled_from(["ann", "bob", "eve", "ida"])
KEY_CHANGES = st.lists(
    st.tuples(st.sampled_from(["create", "rotate", "revoke", "remove", "ask", "ask from afar", "restart"]), KEY_NAMES),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(KEY_CHANGES)
def test_a_follower_has_the_keys_of_its_registry(changes: list[tuple[str, str]]) -> None:
    """Whatever has changed since it asked last, and whether or not the registry knows the state that it has."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        here, there = Path(folder, "here"), Path(folder, "there")
        ours, theirs = (opened.enter_context(closing(KeyStore(root))) for root in (here, there))
        feed, tag = opened.enter_context(closing(KeyFeed(here))), NO_KEYS
        for what, name in [*changes, ("ask", "")]:
            if what == "create":
                with suppress(InvalidKey):
                    ours.create(name, frozenset({Scope.INFER}), limits=KeyLimits(requests_per_min=len(changes)))
            elif what in ("rotate", "revoke"):
                with suppress(InvalidKey):
                    getattr(ours, what)(name)
            elif what == "remove":
                with closing(sqlite3.connect(here / FILE)) as by_hand, by_hand:
                    by_hand.execute("DELETE FROM secrets WHERE name = ?", (name,))
                    by_hand.execute("DELETE FROM keys WHERE name = ?", (name,))
            elif what == "restart":
                feed = opened.enter_context(closing(KeyFeed(here)))
            elif feed.tag() != tag:
                said = feed.since(feed.number_of("of long ago" if what == "ask from afar" else tag))
                tag = take_over(there, json.loads(json.dumps(said)), tag)
                assert tag == feed.tag()
        assert theirs.exported().keys == ours.exported().keys
        assert feed.limits() == {key.name: key.limits for key in ours.all()}
        assert opened.enter_context(closing(KeyFeed(there))).tag() == tag


def test_only_keys_that_changed_are_read_and_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server writes once a minute when they were used."""
    with closing(KeyStore(tmp_path)) as key_store, closing(KeyFeed(tmp_path)) as feed:
        key_store.create("ann", frozenset({Scope.INFER}))
        tag = feed.tag()
        key_store.note_uses({"ann": 1.0})
        read: list[int] = []
        exported = KeyStore.exported

        def counted(store: KeyStore, after: int | None = None) -> ExportedKeys:
            found = exported(store, after)
            read.append(len(found.keys))
            return found

        monkeypatch.setattr(KeyStore, "exported", counted)
        assert feed.tag() == tag
        for name in ("bob", "eve", "ida"):
            key_store.create(name, frozenset({Scope.INFER}))
        assert (before := feed.tag()) != tag
        key_store.revoke("ann")
        assert feed.tag() != before
        assert [key["name"] for key in feed.since(feed.number_of(before))["keys"]] == ["ann"]
        assert read == [0, 3, 1, 1]


def test_a_follower_whose_keys_are_not_those_of_its_digest_gets_all(tmp_path: Path) -> None:
    """Otherwise it would ask again at once, forever, and never have a lease."""
    here, there = tmp_path / "here", tmp_path / "there"
    with closing(KeyStore(here)) as ours, closing(KeyFeed(here)) as feed, closing(KeyStore(there)) as theirs:
        for name in ("ann", "bob"):
            ours.create(name, frozenset({Scope.INFER}))
        tag = take_over(there, feed.since(None), NO_KEYS)
        assert tag == feed.tag()
        theirs.replace([], ["bob"])
        ours.revoke("bob")
        for asked in range(2):
            assert feed.tag() != tag, asked
            tag = take_over(there, feed.since(feed.number_of(tag)), tag)
        assert (tag, theirs.exported().keys) == (feed.tag(), ours.exported().keys)
