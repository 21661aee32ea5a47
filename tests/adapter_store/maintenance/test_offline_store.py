"""A store that no server has open: gc, fsck and what they find."""

import os
import time
from pathlib import Path

import pytest
from store_kit import BASE, add, blobs, build, digest_of, flip, put

from adapter_store.errors import StoreLocked, StoreUnusable
from adapter_store.maintenance.offline_store import CollectSummary, OfflineStore
from adapter_store.quota import ANONYMOUS, StoreQuota
from adapter_store.store import AdapterStore


class TestOpening:
    def test_a_server_keeps_it(self, root: Path) -> None:
        with AdapterStore(root, BASE), pytest.raises(StoreLocked, match="another server"):
            OfflineStore(root)
        with OfflineStore(root), pytest.raises(StoreLocked):
            AdapterStore(root, BASE)
        AdapterStore(root, BASE).close()

    def test_it_makes_none(self, tmp_path: Path) -> None:
        for path in (tmp_path / "new", tmp_path):
            with pytest.raises(StoreUnusable, match="no adapter store in it"):
                OfflineStore(path)
        assert list(tmp_path.iterdir()) == []


class TestCollect:
    def test_what_nothing_names(self, root: Path) -> None:
        (root / "tmp" / "half").write_bytes(b"x")
        orphan = digest_of(build.file(seed=8))
        num_bytes = blobs(root)[orphan].stat().st_size
        with OfflineStore(root) as closed:
            assert closed.collect() == CollectSummary(0, 0, 0, 1), "it is younger than a day"
            assert orphan in blobs(root)
            assert closed.collect(age_s=-1.0) == CollectSummary(0, 1, num_bytes, 0)
            assert orphan not in blobs(root)
            assert closed.collect(age_s=-1.0) == CollectSummary(0, 0, 0, 0)
            assert closed.check() == []

    def test_contents_that_were_held_when_the_server_died(self, root: Path) -> None:
        with OfflineStore(root) as closed:
            record = closed.index.records()["mia"]  # type: ignore[index]
            closed.index.delete_versions(record, frozenset({3}))
            assert {f.kind for f in closed.check()} == {"orphaned"}
            done = closed.collect()
            assert (done.contents, done.blobs) == (1, 1)
            assert digest_of(build.file(seed=2)) not in blobs(root)

    def test_while_a_server_runs(self, root: Path) -> None:
        with AdapterStore(root, BASE) as store:
            old, young = (put(store, build.file(seed=seed)) for seed in (8, 9))
            past = time.time() - 2 * 86_400
            for path in blobs(root).values():
                if path.name != young:
                    os.utime(path, (past, past))
            with store._leases.lease(old), store.pending_uploads.using(ANONYMOUS, old):
                assert store.collector.remove_orphans().num_blobs == 0
                assert old in blobs(root)
            assert old not in blobs(root), "the last to leave removes it"
            assert young in blobs(root)
            assert store.collector.remove_orphans(-1.0).num_blobs == 1
            for record in store.list_adapters():
                store.load(record.key)


class TestCheck:
    def test_what_is_no_plain_file(self, root: Path, tmp_path: Path) -> None:
        """Foreign folders and links neither prevent the start nor are removed."""
        mine = tmp_path / "mine"
        mine.write_bytes(b"x")
        foreign_paths = [root / "tmp" / "lost+found", root / "blobs" / "sha256" / ("0" * 64)]
        links = [root / "tmp" / "link", root / "blobs" / "sha256" / "link"]
        for path in foreign_paths:
            (path / "notes").mkdir(parents=True)
        for path in links:
            path.symlink_to(mine)
        with AdapterStore(root, BASE, quota=StoreQuota(store_bytes=1 << 30)) as store:
            assert store.collector.remove_orphans(-1.0).num_blobs == 1
            assert not store.blob_exists("0" * 64)
            add(store, "new", 5)
        with OfflineStore(root) as closed:
            assert closed.collect(age_s=-1.0).blobs == 0
            findings = {(f.kind, f.what) for f in closed.check()}
        assert findings == {("foreign", f"'{path.parent.name}/{path.name}'") for path in [*foreign_paths, *links]}
        assert all((path / "notes").is_dir() for path in foreign_paths)
        assert all(path.is_symlink() for path in links)

    def test_everything_is_found(self, root: Path) -> None:
        first, last, orphan = (digest_of(build.file(seed=seed)) for seed in (0, 2, 8))
        flip(blobs(root)[first])
        blobs(root)[last].unlink()
        (root / "blobs" / "sha256" / "notes.txt").write_text("x")
        told: list[tuple[int, int]] = []
        with OfflineStore(root) as closed:
            findings = closed.check(lambda done, total: told.append((done, total)))
        assert {(f.kind, f.what, f.adapters) for f in findings} == {
            ("damaged", f"sha256:{first}", ("mia@1", "zoe@1")),
            ("missing", f"sha256:{last}", ("mia@3",)),
            ("orphaned", f"sha256:{orphan}", ()),
            ("foreign", "'notes.txt'", ()),
        }
        total = sum(path.stat().st_size for path in blobs(root).values())
        assert told[0] == (0, total)
        assert told[-1] == (total, total)

    def test_a_blob_that_is_no_file(self, root: Path) -> None:
        path = blobs(root)[digest_of(build.file(seed=2))]
        path.unlink()
        path.mkdir()
        with OfflineStore(root) as closed:
            assert {f.kind for f in closed.check()} == {"foreign", "missing", "orphaned"}

    def test_an_index_that_is_wrong(self, root: Path) -> None:
        with OfflineStore(root) as closed:
            closed.index._db.execute("PRAGMA foreign_keys = OFF")
            closed.index._db.execute("UPDATE aliases SET version = 7 WHERE alias = 'next'")
            [finding] = [f for f in closed.check() if f.kind == "index"]
        assert "aliases names a versions row" in finding.message
