"""Aliases, rollback, canaries, expected states and quotas of the store."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapter_store.errors import (
    AdapterChanged,
    AdapterNotFound,
    InvalidAlias,
    QuotaExceeded,
    StoreUnusable,
    VersionInUse,
    VersionNotFound,
)
from adapter_store.quota import StoreQuota, Usage
from adapter_store.registry.records import Change
from adapter_store.registry.references import draw_version, target_from_json, target_to_json
from adapter_store.spec import AdapterKey, BaseShapes
from adapter_store.store import AdapterStore

Put = Callable[[AdapterStore, bytes], str]


@pytest.fixture
def mia(store: AdapterStore, put: Put, build: Any) -> list[AdapterKey]:
    """Keys of mia@1, mia@2 and mia@3."""
    return [store.register("mia", build.config(), put(store, build.file(seed=seed))).ref.key for seed in range(3)]


def aliases(store: AdapterStore) -> dict[str, dict[int, float]]:
    return {alias: dict(shares) for alias, shares in store.get("mia").aliases.items()}


class TestAliases:
    def test_set_move_and_remove(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        record = store.change("mia", Change(aliases={"prod": 1, "next": 3}))
        assert record == store.get("mia")
        assert aliases(store) == {"next": {3: 1.0}, "prod": {1: 1.0}}
        ref = store.resolve("mia:prod")
        assert (ref.adapter_id, ref.version, ref.key) == ("mia", 1, mia[0])
        store.change("mia", Change(aliases={"prod": 2, "old": 1, "next": None, "never": None}))
        assert aliases(store) == {"old": {1: 1.0}, "prod": {2: 1.0}}
        assert store.resolve("mia:prod").key == mia[1]
        with pytest.raises(AdapterNotFound, match=r"mia:prodd.*did you mean mia:prod"):
            store.resolve("mia:prodd")
        assert store.resolve("mia").version == 3

    def test_they_stay_over_restarts(
        self, store: AdapterStore, mia: list[AdapterKey], tmp_path: Path, base: BaseShapes
    ) -> None:
        store.change("mia", Change(version=1, aliases={"prod": {2: 0.25, 3: 0.75}}))
        before = store.get("mia")
        store.close()
        with AdapterStore(tmp_path / "store", base) as again:
            assert again.get("mia") == before
            assert again.get("mia").etag == before.etag

    def test_an_upload_moves_one(self, store: AdapterStore, mia: list[AdapterKey], put: Put, build: Any) -> None:
        store.register("mia", build.config(), put(store, build.file(seed=9)), alias="prod")
        assert aliases(store) == {"prod": {4: 1.0}}
        again = store.register("mia", build.config(), put(store, build.file(seed=1)), alias="prod")
        assert (again.created, again.ref.version, aliases(store)) == (False, 2, {"prod": {2: 1.0}})
        with pytest.raises(InvalidAlias):
            store.register("mia", build.config(), put(store, build.file(seed=9)), alias="warm")

    def test_all_or_nothing(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        before = store.change("mia", Change(aliases={"prod": 1}))
        for wrong in (
            Change(version=1, aliases={"prod": 9}),
            Change(version=9, aliases={"prod": 2}),
            Change(aliases={"prod": 2, "next": {2: 0.5, 9: 0.5}}),
        ):
            with pytest.raises(VersionNotFound, match="no version 9; it has 1, 2, 3"):
                store.change("mia", wrong)
        with pytest.raises(ValueError, match="JSON"):
            store.change("mia", Change(version=1, aliases={"prod": 2}, limits={"weight": float("inf")}))
        assert store.get("mia") == before
        with pytest.raises(AdapterNotFound):
            store.change("mio", Change(version=1))
        store.close()
        with pytest.raises(StoreUnusable):
            store.change("mia", Change(version=1))

    @pytest.mark.parametrize(
        "name", ["", "Prod", "a b", "3", "007", "warm", "verify", "x" * 65, "a:b", "a@1", "é", "²"]
    )
    def test_names_that_are_none(self, store: AdapterStore, mia: list[AdapterKey], name: str) -> None:
        with pytest.raises(InvalidAlias, match="use 1 to 64"):
            store.change("mia", Change(aliases={name: 1}))
        with pytest.raises(AdapterNotFound):
            store.resolve(f"mia:{name}")
        assert aliases(store) == {}

    @pytest.mark.parametrize("reference", ["mia:prod@1", "mia@1:prod", ":prod", "mia::prod", "mia:prod:x"])
    def test_references_that_are_none(self, store: AdapterStore, mia: list[AdapterKey], reference: str) -> None:
        store.change("mia", Change(aliases={"prod": 1}))
        with pytest.raises(AdapterNotFound):
            store.resolve(reference)

    def test_a_version_that_one_names_stays(
        self, store: AdapterStore, mia: list[AdapterKey], tmp_path: Path, base: BaseShapes
    ) -> None:
        store.change("mia", Change(aliases={"prod": {1: 0.5, 2: 0.5}, "old": 1, "next": 3}))
        before = store.get("mia")
        for reference in ("mia@1", f"mia@sha256:{mia[0]}"):
            with pytest.raises(VersionInUse, match="mia:old, mia:prod"):
                store.delete(reference)
        with pytest.raises(VersionInUse, match="mia:next, mia:old, mia:prod"):
            store.delete("mia")
        assert store.get("mia") == before
        gone = store.delete("mia@1", force=True)
        assert (gone.aliases, gone.num_versions) == (("old", "prod"), 1)
        assert aliases(store) == {"next": {3: 1.0}}
        assert store.delete("mia", force=True).aliases == ("next",)
        store.close()
        with AdapterStore(tmp_path / "store", base) as again:
            assert again.list_adapters() == []

    def test_an_alias_is_no_version_to_delete(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        store.change("mia", Change(aliases={"prod": 1}))
        with pytest.raises(InvalidAlias, match="lorasrv alias mia:prod --remove"):
            store.delete("mia:prod", force=True)
        with pytest.raises(AdapterNotFound):
            store.delete("mia:other")
        assert aliases(store) == {"prod": {1: 1.0}}


class TestRollback:
    def test_back_and_forth(self, store: AdapterStore, mia: list[AdapterKey], put: Put, build: Any) -> None:
        store.change("mia", Change(aliases={"prod": 3}))
        assert store.change("mia", Change(version=1)).key == mia[0]
        assert (store.resolve("mia").version, store.resolve("mia:prod").version) == (1, 3)
        assert store.register("mia", build.config(), put(store, build.file(seed=7))).ref.version == 4
        assert store.resolve("mia").version == 4
        store.change("mia", Change(version=2))
        assert store.delete("mia@4").num_versions == 1
        assert store.resolve("mia").version == 2


class TestCanary:
    def test_the_shares_are_kept(self, tmp_path: Path, base: BaseShapes, put: Put, build: Any) -> None:
        with AdapterStore(tmp_path / "canary", base, draw=random.Random(7).random) as store:
            for seed in range(2):
                store.register("mia", build.config(), put(store, build.file(seed=seed)))
            store.change("mia", Change(aliases={"prod": {1: 0.9, 2: 0.1}}))
            counts = Counter(store.resolve("mia:prod").version for _ in range(20_000))
            # 1,800 expected of 2 at most 0.1 +- 5 standard deviations of 0.0021
            assert counts.keys() == {1, 2}
            assert abs(counts[2] / 20_000 - 0.1) < 0.0106

    @pytest.mark.parametrize(("number", "version"), [(0.0, 1), (0.89, 1), (0.9, 2), (1 - 2**-53, 2)])
    def test_what_a_number_falls_to(
        self, tmp_path: Path, base: BaseShapes, put: Put, build: Any, number: float, version: int
    ) -> None:
        with AdapterStore(tmp_path / "canary", base, draw=lambda: number) as store:
            for seed in range(2):
                store.register("mia", build.config(), put(store, build.file(seed=seed)))
            store.change("mia", Change(aliases={"prod": {2: 0.1, 1: 0.9}}))
            assert store.resolve("mia:prod").version == version

    def test_rounding_leaves_no_gap(self) -> None:
        assert draw_version({1: 0.1, 2: 0.9 - 1e-9}, 1 - 2**-53) == 2

    @pytest.mark.parametrize(
        "shares", [{}, {1: 0.5}, {1: 0.5, 2: 0.6}, {1: 1.0, 2: 0.0}, {1: 1.5, 2: -0.5}, {1: 0.4, 2: 0.3, 3: 0.3}]
    )
    def test_shares_that_are_none(self, store: AdapterStore, mia: list[AdapterKey], shares: dict[int, float]) -> None:
        with pytest.raises(InvalidAlias, match="'prod'"):
            store.change("mia", Change(aliases={"prod": shares}))
        with pytest.raises(InvalidAlias, match="'prod'"):
            store.change("mia", Change(aliases={"prod": {1: float("nan"), 2: 0.5}}))
        assert aliases(store) == {}

    def test_what_cannot_be_about_two(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        store.change("mia", Change(aliases={"prod": {1: 0.9, 2: 0.1}, "next": 3}))
        with pytest.raises(InvalidAlias, match="mia@1 and mia@2; name one"):
            store.resolve_one("mia:prod")
        assert store.resolve_one("mia:next") == store.resolve_one("mia@3") == store.resolve_one("mia")

    @pytest.mark.parametrize("target", [3, {3: 1.0}, {3: 0.9, 4: 0.1}])
    def test_on_the_wire(self, target: Any) -> None:
        shares = {target: 1.0} if isinstance(target, int) else target
        wire = target_to_json(shares)
        assert target_from_json("prod", wire) == (3 if len(shares) == 1 else shares)

    @pytest.mark.parametrize(
        "value",
        [True, 0, -1, 2**63, 1.0, "3", [3], {"3": True}, {"3": "1"}, {"x": 1}, {"03": 1}, {3: 1}, {"3": 10**400}],
    )
    def test_not_on_the_wire(self, value: object) -> None:
        with pytest.raises(InvalidAlias, match="'prod' must be a version"):
            target_from_json("prod", value)


class TestExpectedState:
    def test_every_change_makes_another(self, store: AdapterStore, mia: list[AdapterKey], put: Put, build: Any) -> None:
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
            store.register("mia", build.config(), put(store, build.file(seed=9)))
            yield store.get("mia").etag
            store.delete("mia")
            store.register("mia", build.config(), put(store, build.file(seed=0)))
            yield store.get("mia").etag

        seen = list(states())
        assert len(set(seen)) == len(seen)

    def test_what_matches(self, store: AdapterStore, mia: list[AdapterKey], put: Put, build: Any) -> None:
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
        self, store: AdapterStore, mia: list[AdapterKey], put: Put, build: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody else flips the id while an upload is being checked."""
        check, etag = store._content_reader.check, store.get("mia").etag

        def slow_check(*arguments: Any) -> Any:
            checked = check(*arguments)
            store.change("mia", Change(version=1))
            return checked

        monkeypatch.setattr(store._content_reader, "check", slow_check)
        with pytest.raises(AdapterChanged):
            store.register("mia", build.config(), put(store, build.file(seed=9)), if_match={etag})
        assert (store.resolve("mia").version, len(store.get("mia").versions)) == (1, 3)


class TestQuotas:
    def open(self, tmp_path: Path, base: BaseShapes, **quota: int) -> AdapterStore:
        return AdapterStore(tmp_path / "quota", base, quota=StoreQuota(**quota))

    def blobs(self, tmp_path: Path) -> int:
        return len(list((tmp_path / "quota" / "blobs" / "sha256").iterdir()))

    def test_versions(self, tmp_path: Path, base: BaseShapes, put: Put, build: Any) -> None:
        with self.open(tmp_path, base, max_adapters=2) as store:
            for name in ("mia", "zoe"):
                store.register(name, build.config(), put(store, build.file(seed=0)))
            with pytest.raises(QuotaExceeded, match=r"2 adapter versions are stored, 1 more would be 3, 2 are allowed"):
                store.register("mia", build.config(), put(store, build.file(seed=1)), alias="prod")
            assert (len(store.get("mia").versions), dict(store.get("mia").aliases)) == (1, {})
            assert self.blobs(tmp_path) == 1, "the weights are not kept"
            with pytest.raises(QuotaExceeded):
                store.register("new", build.config(), put(store, build.file(seed=0)))
            assert not store.register("mia", build.config(), put(store, build.file(seed=0))).created
            store.delete("zoe")
            assert store.register("mia", build.config(), put(store, build.file(seed=1))).ref.version == 2

    def test_bytes_count_once(self, tmp_path: Path, base: BaseShapes, put: Put, build: Any) -> None:
        with self.open(tmp_path, base) as store:
            first = store.register("mia", build.config(), put(store, build.file(seed=0)))
            size = first.report.weights_bytes
            store.register("zoe", build.config(lora_alpha=3), put(store, build.file(seed=0)))
            assert store._index.usage() == Usage(2, size)
        with self.open(tmp_path, base, store_bytes=2 * size) as store:
            store.register("mia", build.config(), put(store, build.file(seed=1)))
            with pytest.raises(QuotaExceeded) as caught:
                store.register("mia", build.config(), put(store, build.file(seed=2)))
            refused = caught.value
            assert (refused.quota, refused.used, refused.wanted, refused.allowed) == (
                "store_bytes", 2 * size, size, 2 * size,
            )  # fmt: skip
            assert store.register("zoe", build.config(), put(store, build.file(seed=1))).created
        with self.open(tmp_path, base, store_bytes=1) as store:
            assert store.register("bob", build.config(), put(store, build.file(seed=1))).created, "costs nothing"

    def test_what_is_sent_and_never_registered(self, tmp_path: Path, base: BaseShapes, put: Put, build: Any) -> None:
        """It counts by itself, on the disk or on its way there; what is there already may be sent again."""
        files = [build.file(seed=seed) for seed in range(6)]
        size = len(files[0])
        with self.open(tmp_path, base, store_bytes=3 * size) as store:
            for seed in (0, 1):
                store.register("mia", build.config(), put(store, files[seed]))
            sent = [put(store, files[seed]) for seed in (2, 3)]
            with store.open_blob("e" * 64, size) as upload:
                with pytest.raises(QuotaExceeded) as caught:
                    put(store, files[5])
                assert (caught.value.used, caught.value.wanted, caught.value.allowed) == (3 * size, size, 3 * size)
                assert put(store, files[3]) == sent[1]
                upload.abort()
            digest = put(store, files[4])
            with pytest.raises(QuotaExceeded):
                put(store, files[5])
            store.register("mia", build.config(), digest)
            put(store, files[5])

    def test_of_each_principal(self, tmp_path: Path, base: BaseShapes, put: Put, build: Any) -> None:
        with self.open(tmp_path, base, max_adapters_per_key=1, max_adapters=3) as store:

            def add(seed: int, principal: str) -> None:
                store.register(f"a{seed}", build.config(), put(store, build.file(seed=seed)), principal=principal)

            add(0, "anonymous")
            add(1, "ann")
            for principal in ("ann", "anonymous"):
                with pytest.raises(QuotaExceeded, match="max_adapters_per_key"):
                    add(2, principal)
            add(2, "bob")
            with pytest.raises(QuotaExceeded, match=r"\(max_adapters\)"):
                add(3, "eve")
            assert store._index.usage("ann").versions == store._index.usage("anonymous").versions == 1
            store.delete("a1")
            add(3, "ann")
        with self.open(tmp_path, base, store_bytes_per_key=1) as store:
            with pytest.raises(QuotaExceeded, match="store_bytes_per_key"):
                store.register("a9", build.config(), put(store, build.file(seed=9)), principal="ann")
            assert store._index.usage("ann").versions == 1


class TestVerdicts:
    def test_they_go_with_the_version(self, store: AdapterStore, mia: list[AdapterKey], put: Put, build: Any) -> None:
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
        again = store.register("mia", build.config(), put(store, build.file(seed=0))).ref
        assert again.key == first.key == hold.key
        assert store.version_history.verdict(again) is None
