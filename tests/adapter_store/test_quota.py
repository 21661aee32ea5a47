"""Quotas of the store: versions, bytes, uploads, and those of each principal."""

from pathlib import Path

import pytest
from store_kit import BASE, add, blobs, build, put

from adapter_store.errors import QuotaExceeded
from adapter_store.quota import StoreQuota, Usage
from adapter_store.registry.records import Change
from adapter_store.store import AdapterStore


class TestQuotas:
    def open(self, tmp_path: Path, **quota: int) -> AdapterStore:
        return AdapterStore(tmp_path / "quota", BASE, quota=StoreQuota(**quota))

    def test_versions(self, tmp_path: Path) -> None:
        with self.open(tmp_path, max_adapters=2) as store:
            for name in ("mia", "zoe"):
                add(store, name, 0)
            with pytest.raises(QuotaExceeded, match=r"2 adapter versions are stored, 1 more would be 3, 2 are allowed"):
                add(store, "mia", 1, alias="prod")
            assert (len(store.get("mia").versions), dict(store.get("mia").aliases)) == (1, {})
            assert len(blobs(store)) == 1, "the weights are not kept"
            with pytest.raises(QuotaExceeded):
                add(store, "new", 0)
            assert not add(store, "mia", 0).created
            store.delete("zoe")
            assert add(store, "mia", 1).ref.version == 2

    def test_bytes_count_once(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as store:
            first = add(store, "mia", 0)
            size = first.report.weights_bytes
            store.register("zoe", build.config(lora_alpha=3), put(store, build.file(seed=0)))
            assert store._usage.of(None) == Usage(2, size)
        with self.open(tmp_path, store_bytes=2 * size) as store:
            add(store, "mia", 1)
            with pytest.raises(QuotaExceeded) as caught:
                add(store, "mia", 2)
            refused = caught.value
            assert (refused.quota, refused.used, refused.wanted, refused.allowed) == (
                "store_bytes", 2 * size, size, 2 * size
            )  # fmt: skip
            assert add(store, "zoe", 1).created
        with self.open(tmp_path, store_bytes=1) as store:
            assert add(store, "bob", 1).created, "costs nothing"

    def test_what_is_sent_and_never_registered(self, tmp_path: Path) -> None:
        """Pending uploads have their own limit, stored or in progress; stored weights may be sent again."""
        files = [build.file(seed=seed) for seed in range(6)]
        size = len(files[0])
        with self.open(tmp_path, store_bytes=3 * size) as store:
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

    def test_of_each_principal(self, tmp_path: Path) -> None:
        with self.open(tmp_path, max_adapters_per_key=1, max_adapters=3) as store:

            def upload(seed: int, principal: str) -> None:
                add(store, f"a{seed}", seed, principal=principal)

            upload(0, "anonymous")
            upload(1, "ann")
            for principal in ("ann", "anonymous"):
                with pytest.raises(QuotaExceeded, match="max_adapters_per_key"):
                    upload(2, principal)
            upload(2, "bob")
            with pytest.raises(QuotaExceeded, match=r"\(max_adapters\)"):
                upload(3, "eve")
            assert store._usage.of("ann").versions == store._usage.of("anonymous").versions == 1
            store.delete("a1")
            upload(3, "ann")
        with self.open(tmp_path, store_bytes_per_key=1) as store:
            with pytest.raises(QuotaExceeded, match="store_bytes_per_key"):
                add(store, "a9", 9, principal="ann")
            assert store._usage.of("ann").versions == 1

    def test_versions_of_one_id(self, tmp_path: Path) -> None:
        with self.open(tmp_path, max_per_id=2) as store:
            add(store, "mia", 0)
            store.register_defaults("mia", '{"system": "a"}')
            store.register_defaults("mia", '{"system": "a"}', alias="prod")
            with pytest.raises(
                QuotaExceeded, match=r"2 versions of 'mia' are stored, 1 more would be 3, 2 are allowed"
            ):
                store.register_defaults("mia", '{"system": "b"}')
            with pytest.raises(QuotaExceeded, match=r"\(max_per_id\)"):
                add(store, "mia", 1)
            assert (len(store.get("mia").versions), len(blobs(store))) == (2, 1)
            add(store, "zoe", 1)
            store.delete("mia@1")
            assert add(store, "mia", 1).ref.version == 3

    def test_aliases_of_one_id(self, tmp_path: Path) -> None:
        with self.open(tmp_path, max_per_id=2) as store:
            add(store, "mia", 0)
            before = store.change("mia", Change(aliases={"a": 1, "b": 1}))
            with pytest.raises(QuotaExceeded, match=r"2 aliases of 'mia' are stored, 1 more would be 3"):
                store.change("mia", Change(aliases={"c": 1}, limits={"weight": 2}))
            with pytest.raises(QuotaExceeded, match="max_per_id"):
                add(store, "mia", 1, alias="c")
            assert store.get("mia") == before
            store.change("mia", Change(aliases={"c": 1, "a": None}))
            add(store, "mia", 1, alias="c")
            add(store, "zoe", 0, alias="a")
        with self.open(tmp_path, max_per_id=1) as store:
            store.change("mia", Change(aliases={"c": 1, "b": 2}))
            with pytest.raises(QuotaExceeded):
                store.change("mia", Change(aliases={"d": 1, "c": None, "a": 1}))
            assert list(store.change("mia", Change(aliases={"d": 1, "c": None})).aliases) == ["b", "d"]

    def test_principals_that_have_nothing_any_more_are_forgotten(self, tmp_path: Path) -> None:
        """A backend may make a key for each session."""
        with self.open(tmp_path, store_bytes=1 << 20) as store:
            for number in range(9):
                data, principal = build.file(seed=number), f"session-{number}"
                digest = put(store, data, principal)
                store.register("mia", build.config(), digest, principal=principal)
                store.delete("mia")
            assert (len(store._usage._used), len(store.pending_uploads._in_progress)) == (0, 1)
