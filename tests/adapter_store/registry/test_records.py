from collections.abc import Iterator
from typing import Any

import pytest
from store_kit import add, build, put

from adapter_store.errors import AdapterChanged
from adapter_store.registry.records import Change
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore


class TestExpectedState:
    def test_every_change_makes_another(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        def states() -> Iterator[str]:
            yield store.get("mia").etag
            for change in (
                Change(version=1),
                Change(aliases={"prod": 1}),
                Change(aliases={"prod": {1: 0.5, 2: 0.5}}),
                Change(limits={"weight": 2.0}),
                Change(aliases={"prod": None}),
            ):
                yield store.change("mia", change).etag
            store.delete("mia@2")
            yield store.get("mia").etag
            add(store, "mia", 9)
            yield store.get("mia").etag
            store.delete("mia")
            add(store, "mia", 0)
            yield store.get("mia").etag

        seen = list(states())
        assert len(set(seen)) == len(seen)

    def test_what_matches(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        digest = put(store, build.file(seed=9))
        old = store.get("mia").etag
        for tags in ({old}, {"x", old}, {"*"}, {f"sha256:{mia[2]}"}, None):
            store.change("mia", Change(limits={}), if_match=tags)
        store.change("mia", Change(version=1), if_match={old})
        for stale in ({old}, set(), {f"sha256:{mia[2]}"}):
            with pytest.raises(AdapterChanged, match="has changed since you looked"):
                store.change("mia", Change(version=2), if_match=stale)
            with pytest.raises(AdapterChanged):
                store.delete("mia@2", if_match=stale)
            with pytest.raises(AdapterChanged):
                store.register("mia", build.config(), digest, if_match=stale)
        assert (store.resolve("mia").version, len(store.get("mia").versions)) == (1, 3)
        with pytest.raises(AdapterChanged, match="does not exist"):
            store.register("new", build.config(), digest, if_match={"*"})
        assert store.register("mia", build.config(), digest, if_match={store.get("mia").etag}).created

    def test_it_is_compared_when_it_is_done(
        self, store: AdapterStore, mia: list[AdapterKey], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody else flips the id while an upload is being checked."""
        check, etag = store._content_reader.check, store.get("mia").etag

        def slow_check(*arguments: Any) -> Any:
            checked = check(*arguments)
            store.change("mia", Change(version=1))
            return checked

        monkeypatch.setattr(store._content_reader, "check", slow_check)
        with pytest.raises(AdapterChanged):
            add(store, "mia", 9, if_match={etag})
        assert (store.resolve("mia").version, len(store.get("mia").versions)) == (1, 3)
