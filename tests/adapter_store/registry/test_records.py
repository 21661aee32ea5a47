"""Changes of an id: preconditions, limits, and nothing by halves."""

from collections.abc import Iterator
from typing import Any

import pytest
from store_kit import add, build, put

from adapter_store.errors import AdapterChanged, AdapterNotFound, StoreUnusable
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
        """Another client changes the id while an upload is being checked."""
        check, etag = store._content_reader.check, store.get("mia").etag

        def slow_check(*arguments: Any, **terms: Any) -> Any:
            checked = check(*arguments, **terms)
            store.change("mia", Change(version=1))
            return checked

        monkeypatch.setattr(store._content_reader, "check", slow_check)
        with pytest.raises(AdapterChanged):
            add(store, "mia", 9, if_match={etag})
        assert (store.resolve("mia").version, len(store.get("mia").versions)) == (1, 3)


class TestLimits:
    def test_they_replace_the_old_ones_and_go_with_the_id(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        assert store.limits("mia") == store.limits("nobody") == {}
        given: dict[str, float] = {"max_running": 2, "tokens_per_s": 12.5}
        store.change("mia", Change(limits=given))
        given["max_running"] = 9
        with pytest.raises(TypeError):
            store.limits("mia")["max_running"] = 9  # type: ignore[index]
        assert store.limits("mia") == store.get("mia").limits == {"max_running": 2, "tokens_per_s": 12.5}
        add(store, "mia", 9)
        store.change("mia", Change(limits={"weight": 2.0}))
        assert store.limits("mia") == {"weight": 2.0}
        store.delete("mia")
        add(store, "mia")
        assert store.limits("mia") == {}

    def test_what_is_refused_changes_nothing(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        with pytest.raises(ValueError, match="JSON"):
            store.change("mia", Change(limits={"max_running": float("nan")}))
        for name in ("nobody", "mia@1"):
            with pytest.raises(AdapterNotFound):
                store.change(name, Change(limits={"weight": 2.0}))
        assert store.limits("mia") == {}
        store.close()
        with pytest.raises(StoreUnusable):
            store.change("mia", Change(limits={}))
