"""Archives of a store: what is exported is imported with all of its versions, or nothing is."""

import errno
import io
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from following import NearOrigin, catch_up
from sqlite_watch import is_possible
from store_disk import DiskWatch
from store_kit import BASE, OWN_TOKENS, RESIZABLE, add, add_with_tokens, blobs, build, digest_of, flip, put
from whole_archives import manifest_of, opened, rebuilt

from adapter_store.errors import (
    AdapterCorrupt,
    AdapterError,
    AdaptersRefused,
    DigestMismatch,
    InvalidArchive,
    StoreUnusable,
)
from adapter_store.maintenance import archive
from adapter_store.maintenance.archive import ArchiveSummary, export_store, import_store
from adapter_store.maintenance.offline_store import OfflineStore
from adapter_store.quota import MAX_PER_ID
from adapter_store.registry.index import Index
from adapter_store.storage.blobs import BlobUpload
from adapter_store.store import AdapterStore


def test_a_member_of_any_size_has_a_head_of_one_block() -> None:
    head = archive.tar_header("blobs/a", 9 << 30)
    assert len(head) == tarfile.BLOCKSIZE
    assert tarfile.TarInfo.frombuf(head, "utf-8", "strict").size == 9 << 30


KINDS = {"link": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE, "folder": tarfile.DIRTYPE, "device": tarfile.BLKTYPE}


def exported(root: Path) -> bytes:
    file = io.BytesIO()
    with OfflineStore(root) as closed:
        export_store(closed, file)
    return file.getvalue()


def written_digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []
    write = BlobUpload.__init__

    def noted(upload: BlobUpload, blobs: Any, digest: str, num_bytes: int) -> None:
        written.append(digest)
        write(upload, blobs, digest, num_bytes)

    monkeypatch.setattr(BlobUpload, "__init__", noted)
    return written


def first_version(manifest: dict[str, Any]) -> dict[str, Any]:
    version: dict[str, Any] = manifest["adapters"]["mia"]["versions"]["1"]
    return version


class TestArchive:
    @pytest.fixture
    def data(self, root: Path) -> bytes:
        return exported(root)

    @pytest.fixture
    def take(self, tmp_path: Path) -> Callable[[bytes], ArchiveSummary]:
        def run(data: bytes) -> ArchiveSummary:
            with OfflineStore(tmp_path / "new", create=True) as closed:
                return import_store(closed, io.BytesIO(data), BASE, 16)

        return run

    def assert_nothing_came(self, tmp_path: Path) -> None:
        with OfflineStore(tmp_path / "new") as closed:
            assert closed.index.records() == {}
            assert closed.index.last_versions() == {}
            assert closed.blobs.sizes() == {}

    def test_there_and_back(self, root: Path, data: bytes, take: Any, tmp_path: Path) -> None:
        moved = take(data)
        assert (moved.adapters, moved.versions, moved.blobs) == (2, 3, 2)
        with AdapterStore(root, BASE) as old, AdapterStore(tmp_path / "new", BASE) as new:
            assert new.list_adapters() == old.list_adapters()
            assert [r.etag for r in new.list_adapters()] == [r.etag for r in old.list_adapters()]
            for record in old.list_adapters():
                for version in record.versions:
                    ref = record.ref(version.version)
                    assert new.version_history.report(ref) == old.version_history.report(ref)
                    assert new.version_history.peft_dir(ref).config == old.version_history.peft_dir(ref).config
                    assert new.spec(version.key) == old.spec(version.key)
                    a, b = old.load(version.key), new.load(version.key)
                    assert all((a[site].b == b[site].b).all() for site in a)
            assert new._index.owners() == old._index.owners() == {("mia", 1): "bob", ("mia", 3): "ann"}
            assert new._index.last_versions() == old._index.last_versions()
            for name, version in (("mia", 4), ("gone", 2)):
                assert add(new, name, 9).ref.version == version
        assert digest_of(build.file(seed=8)) not in manifest_of(data)["contents"], "orphans stay behind"

    def test_what_was_allowed_at_the_upload_stays_allowed(self, tmp_path: Path, take: Any) -> None:
        with AdapterStore(tmp_path / "partial", BASE) as store:
            config = build.config(target_modules=["q_proj", "v_proj", "o_proj"])
            store.register("mia", config, put(store, build.file()), allow_partial=True)
        data = exported(tmp_path / "partial")
        for wrong in (None, 1):
            with pytest.raises(InvalidArchive, match="partial"):
                take(rebuilt(data, lambda m, wrong=wrong: first_version(m).update(partial=wrong)))
        with pytest.raises(AdaptersRefused, match=r"mia@1: .*allow-partial"):
            take(rebuilt(data, lambda m: first_version(m).pop("partial")))
        assert take(data).versions == 1
        with AdapterStore(tmp_path / "new", BASE) as store:
            assert "partial: 2 of 6" in store.version_history.report(store.resolve("mia")).warnings[0]

    def test_both_forms_of_one_content(self, tmp_path: Path, take: Any) -> None:
        with AdapterStore(tmp_path / "both", BASE) as store:
            digest = put(store, build.file())
            done = [store.register("mia", build.config(), digest, stored=form) for form in ("int8", "bf16")]
        data = exported(tmp_path / "both")
        for wrong, says in (("int4", "stored"), ("bf16", "does not match")):
            with pytest.raises(InvalidArchive, match=says):
                take(rebuilt(data, lambda m, to=wrong: m["contents"][done[0].ref.key].update(stored=to)))
        assert take(data) == ArchiveSummary(1, 2, 1, len(build.file()))
        with AdapterStore(tmp_path / "new", BASE) as store:
            assert [version.stored for version in store.get("mia").versions] == ["int8", "bf16"]
            assert [store.version_history.report(d.ref) for d in done] == [d.report for d in done]
            assert [store.load(d.ref.key).spec.stored for d in done] == ["int8", "bf16"]

    def test_tokens_of_its_own(self, tmp_path: Path) -> None:
        """Other tokens are another content, which the archive does not name."""
        with AdapterStore(tmp_path / "old", RESIZABLE) as store:
            key = add_with_tokens(store, "moods").ref.key
        data = exported(tmp_path / "old")

        def rename(manifest: dict[str, Any]) -> None:
            manifest["adapters"]["moods"]["versions"]["1"]["config"]["added_tokens"][0]["content"] = "<mud>"

        with OfflineStore(tmp_path / "new", create=True) as closed:
            with pytest.raises(InvalidArchive, match="does not match"):
                import_store(closed, io.BytesIO(rebuilt(data, rename)), RESIZABLE, 16)
            assert import_store(closed, io.BytesIO(data), RESIZABLE, 16).versions == 1
        with AdapterStore(tmp_path / "new", RESIZABLE) as store:
            assert store.added_tokens.of(key) == store.load(key).spec.added_tokens == OWN_TOKENS

    def test_versions_of_one_content_keep_what_is_their_own(self, tmp_path: Path, take: Any) -> None:
        configs = {
            "ann": build.config(base_model_name_or_path="acme/secret-13b"),
            "bob": build.config(base_model_name_or_path="probe", target_modules=["q_proj", "v_proj", "o_proj"]),
        }
        with AdapterStore(tmp_path / "both", BASE) as store:
            digest = put(store, build.file())
            done = {who: store.register(who, config, digest, allow_partial=True) for who, config in configs.items()}
        assert take(exported(tmp_path / "both")) == ArchiveSummary(2, 2, 1, len(build.file()))
        with AdapterStore(tmp_path / "new", BASE) as store:
            for who, config in configs.items():
                assert store.version_history.report(done[who].ref) == done[who].report
                assert store.version_history.peft_dir(done[who].ref).config == config

    def test_the_first_format(self, data: bytes, take: Any, tmp_path: Path) -> None:
        """A content had one config of an unknown uploader, so what it was trained on is shown to no other."""

        def older(manifest: dict[str, Any]) -> None:
            manifest["format"] = 1
            for record in manifest["adapters"].values():
                for version in record["versions"].values():
                    content = manifest["contents"][version["content"]]
                    content |= {"config": version.pop("config") | {"base_model_name_or_path": "acme/secret-13b"}}

        assert take(rebuilt(data, older)).versions == 3
        with AdapterStore(tmp_path / "new", BASE) as store:
            for record, version in [(r, v) for r in store.list_adapters() for v in r.versions]:
                assert store.version_history.report(record.ref(version.version)).warnings == ()
                store.load(version.key)
        assert b"secret" not in (tmp_path / "new" / "index.sqlite3").read_bytes()

    @pytest.mark.parametrize("refused", ["mia", "zoe", "mia zoe", ""])
    def test_others_come_without_those_that_are_refused(self, data: bytes, tmp_path: Path, refused: str) -> None:
        """Of mia the limits, which are looked at first, of zoe the weights: as if the archive never had them."""

        def check_limits(limits: Mapping[str, float]) -> None:
            if "tokens_per_s" in limits and "mia" in refused:
                raise ValueError("tokens_per_s is too much")

        def change(manifest: dict[str, Any]) -> None:
            if "zoe" in refused:
                manifest["adapters"]["zoe"]["versions"]["1"]["config"].update(use_bdlora=True)

        archive, told = rebuilt(data, change), dict[str, str]()
        says = {"mia": "mia: limits: tokens_per_s is too much", "zoe": "zoe@1: adapter refused, 1 problem: use_bdlora"}
        with OfflineStore(tmp_path / "new", create=True) as closed:
            if refused:
                with pytest.raises(AdaptersRefused, match=f"nothing was imported: {says[refused[:3]]}"):
                    import_store(closed, io.BytesIO(archive), BASE, 16, check_limits=check_limits)
                assert (closed.index.records(), blobs(tmp_path / "new")) == ({}, {})
            arguments = closed, io.BytesIO(archive), BASE, 16
            moved = import_store(*arguments, check_limits=check_limits, skip=told.__setitem__)
        assert [why for name, why in told.items() if not why.startswith(says[name])] == []
        assert told.keys() == set(refused.split())
        expected, found = manifest_of(data), manifest_of(exported(tmp_path / "new"))
        for name in told:
            del expected["adapters"][name], expected["last_versions"][name]
        used = {v["content"] for of in expected["adapters"].values() for v in of["versions"].values()}
        expected["contents"] = {key: of for key, of in expected["contents"].items() if key in used}
        assert found == expected
        assert blobs(tmp_path / "new").keys() == {of["weights"] for of in found["contents"].values()}
        assert (moved.adapters, moved.blobs) == (len(found["adapters"]), len(blobs(tmp_path / "new")))

    def test_weights_larger_than_any_of_this_base_are_refused(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the manifest, so that none of them are written."""
        with AdapterStore(root, BASE) as store:
            key = store.register("large", build.config(r=16), put(store, build.file(rank=16))).ref.key
        data, told = exported(root), dict[str, str]()
        manifest = manifest_of(data)
        most = manifest["contents"][key]["bytes"] - 1
        monkeypatch.setattr("adapter_store.maintenance.archive.max_adapter_bytes", lambda *_: most)
        written = written_digests(monkeypatch)
        with OfflineStore(tmp_path / "new", create=True) as closed:
            with pytest.raises(AdaptersRefused) as refused:
                import_store(closed, io.BytesIO(data), BASE, 16)
            import_store(closed, io.BytesIO(data), BASE, 16, skip=told.__setitem__)
        assert list(told.values()) == list(refused.value.reasons)
        assert told.keys() == {"large"}
        says = f"large@1: {most + 1} bytes is more than any adapter of this base can have ({most} "
        assert told["large"].startswith(says)
        found = manifest_of(exported(tmp_path / "new"))
        assert found["adapters"].keys() == manifest["adapters"].keys() - {"large"}
        assert set(written) == {of["weights"] for of in found["contents"].values()}

    @pytest.mark.parametrize("what", ["versions", "aliases"])
    def test_more_of_an_id_than_is_allowed(self, data: bytes, tmp_path: Path, what: str) -> None:
        """Each change of the id would read all of them. None of its weights are written."""

        def change(manifest: dict[str, Any]) -> None:
            zoe = manifest["adapters"]["zoe"]
            version = zoe["versions"]["1"]
            for number in range(2, MAX_PER_ID + 2):
                zoe["versions"][str(number)] = version
            if what == "aliases":
                del zoe["versions"][str(MAX_PER_ID + 1)]
                zoe["aliases"] = {f"a{number}": 1 for number in range(MAX_PER_ID + 1)}

        with OfflineStore(tmp_path / "new", create=True) as closed:
            with pytest.raises(AdaptersRefused, match=rf"zoe: 1001 {what}, and 1000 are allowed"):
                import_store(closed, io.BytesIO(rebuilt(data, change)), BASE, 16)
            assert (closed.index.records(), blobs(tmp_path / "new")) == ({}, {})

    def test_the_same_store_makes_the_same_file(self, root: Path, data: bytes) -> None:
        assert exported(root) == data

    def test_other_programs_can_read_it(self, data: bytes) -> None:
        with opened(data) as tar:
            for member in tar.getmembers()[1:]:
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                assert member.name == f"blobs/sha256/{digest_of(content)}"

    def test_into_a_store_with_others(self, data: bytes, tmp_path: Path) -> None:
        with AdapterStore(tmp_path / "new", BASE) as store:
            add(store, "bob", 0)
        with OfflineStore(tmp_path / "new") as closed:
            import_store(closed, io.BytesIO(data), BASE, 16)
        with AdapterStore(tmp_path / "new", BASE) as store:
            assert [r.adapter_id for r in store.list_adapters()] == ["bob", "mia", "zoe"]
            before = store.list_adapters()
        with OfflineStore(tmp_path / "new") as closed, pytest.raises(InvalidArchive, match="has mia, zoe already"):
            import_store(closed, io.BytesIO(data), BASE, 16)
        with AdapterStore(tmp_path / "new", BASE) as store:
            assert store.list_adapters() == before
            for record in before:
                store.load(record.key)

    def test_into_a_followers_folder(self, data: bytes, tmp_path: Path) -> None:
        """It shows what its registry has, and nothing else."""
        with AdapterStore(tmp_path / "owner", BASE) as owner:
            add(owner, "tom")
            with AdapterStore(tmp_path / "follower", BASE, origin=NearOrigin(lambda: owner)) as follower:
                catch_up(follower, owner)
        with OfflineStore(tmp_path / "follower") as closed:
            with pytest.raises(StoreUnusable, match="follows a registry"):
                import_store(closed, io.BytesIO(data), BASE, 16)
            assert closed.index.records().keys() == {"tom"}

    @pytest.mark.skipif(not is_possible(), reason="this Python's sqlite3 does not link a shared SQLite")
    def test_a_commit_that_fails_leaves_no_id_without_weights(
        self, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The transaction may be whole in the log, and a kill brings it back: then its weights must be there."""
        syncs, is_committing = [0], []

        def fail_the_second(number: int, kind: str) -> None:
            if is_committing and "sync" in kind:
                syncs[0] += 1
                if syncs[0] == 2:
                    raise OSError(errno.EIO, "I/O error")

        def restore(index: Index, *records: Any) -> None:
            commit = index._commit
            monkeypatch.setattr(index, "_commit", lambda: (is_committing.append(1), commit()))
            real(index, *records)

        real = Index.restore
        monkeypatch.setattr(Index, "restore", restore)
        with AdapterStore(tmp_path / "top" / "new", BASE) as new:
            add(new, "tom", 7)
        with DiskWatch(tmp_path / "top", fail_the_second).active():
            closed = OfflineStore(tmp_path / "top" / "new")
            with pytest.raises(StoreUnusable):
                import_store(closed, io.BytesIO(data), BASE, 16)
            is_committing.clear()
            shutil.copytree(tmp_path / "top" / "new", tmp_path / "killed")
        assert syncs[0] >= 2
        (tmp_path / "killed" / "index.sqlite3-shm").unlink(missing_ok=True)
        with AdapterStore(tmp_path / "killed", BASE) as store:
            for key in {version.key for record in store.list_adapters() for version in record.versions}:
                store.load(key)

    def test_an_empty_store(self, tmp_path: Path, take: Any) -> None:
        AdapterStore(tmp_path / "empty", BASE).close()
        assert take(exported(tmp_path / "empty")) == ArchiveSummary(0, 0, 0, 0)

    def test_more_than_an_archive_takes_is_not_exported(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rather than an archive that nothing imports."""
        monkeypatch.setattr(archive, "MAX_MANIFEST_BYTES", 100)
        with pytest.raises(StoreUnusable, match=r"an archive takes 100: copy the folder instead"):
            exported(root)

    def test_damaged_weights_are_not_exported(self, root: Path) -> None:
        blob = blobs(root)[digest_of(build.file(seed=0))]
        flip(blob)
        with pytest.raises(AdapterCorrupt, match=r"mia@1, zoe@1 are damaged"):
            exported(root)
        blob.unlink()
        with pytest.raises(AdapterCorrupt, match=r"mia@1, zoe@1 are missing"):
            exported(root)

    @pytest.mark.parametrize("position", [0, 200, 600, -4000, -3000])
    def test_any_damage_is_found(self, data: bytes, take: Any, tmp_path: Path, position: int) -> None:
        damaged = bytearray(data)
        damaged[position] ^= 4
        with pytest.raises(AdapterError):
            take(bytes(damaged))
        self.assert_nothing_came(tmp_path)

    def test_any_end_is_found(self, data: bytes, take: Any, tmp_path: Path) -> None:
        for end in (0, 100, 512, 1000, len(data) // 2, len(data) - 1024, len(data) - 1100):
            with pytest.raises(InvalidArchive, match="ends early"):
                take(data[:end])
            self.assert_nothing_came(tmp_path)

    def test_a_flip_in_weights(self, data: bytes, take: Any, tmp_path: Path) -> None:
        with opened(data) as tar:
            last = tar.getmembers()[-1]
        damaged = bytearray(data)
        damaged[last.offset_data + last.size - 1] ^= 1
        with pytest.raises(DigestMismatch):
            take(bytes(damaged))
        self.assert_nothing_came(tmp_path)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda m: m.update(format=5), "has format 5; this lorasrv reads 4 and older"),
            (lambda m: m.update(format=True, kind="x"), "not an archive of an adapter store"),
            (lambda m: m.pop("contents"), "contents of the archive's manifest"),
            (lambda m: m["adapters"]["mia"].update(version=2), r"adapters.'mia'.version .*no such version"),
            (lambda m: m["adapters"]["mia"]["aliases"].update(prod=2), "no such version"),
            (lambda m: m["adapters"]["mia"]["aliases"].update(prod={"1": 0.5}), "add up to 1"),
            (lambda m: m["adapters"]["mia"]["aliases"].update(Prod=1), "'Prod' is not allowed"),
            (lambda m: m["adapters"]["mia"]["limits"].update(weight="x"), "limits"),
            (lambda m: m["adapters"]["mia"]["limits"].update(weight=10**400), "limits"),
            (lambda m: m["adapters"]["mia"].update(created="x"), "created"),
            (lambda m: m["adapters"]["mia"]["versions"].update({"01": {}}), "not a version number"),
            (lambda m: m["adapters"]["mia"]["versions"].update({"-1": {}}), "not a version number"),
            (lambda m: m["adapters"]["mia"]["versions"].clear(), "no such version"),
            (lambda m: m["adapters"]["mia"]["versions"]["1"].update(content="0" * 64), "no such content"),
            (lambda m: m["adapters"].update({"../x": m["adapters"]["mia"]}), r"'\.\./x' is not allowed"),
            (lambda m: m["adapters"].update({"tiny-llama": m["adapters"].pop("mia")}), "taken by the server"),
            (lambda m: m["last_versions"].update(mia=-1), "last_versions"),
            (lambda m: next(iter(m["contents"].values())).update(weights="../../etc/passwd"), "is not a digest"),
            (lambda m: next(iter(m["contents"].values())).update(bytes=-1), "bytes"),
            (lambda m: next(iter(m["contents"].values())).update(bytes=5), "is not announced by its manifest"),
            (lambda m: first_version(m)["config"].update(lora_alpha=77), "does not match its config"),
            (lambda m: first_version(m)["config"].update(use_bdlora=True), "use_bdlora"),
            (lambda m: m["contents"].update({"f" * 64: next(iter(m["contents"].values()))}), "no version refers to it"),
            (lambda m: first_version(m).update(config=[]), r"versions.'1'.config .*wrong type"),
            (lambda m: first_version(m).pop("config"), r"contents.*.config .*missing"),
            (lambda m: first_version(m).update(partial=1), "partial"),
            (lambda m: m.update(base="0" * 64), "base of other shapes"),
            (lambda m: m["last_versions"].update({"\ud800": 1}), "last_versions.'.ud800'"),
            (lambda m: m["adapters"]["mia"]["versions"]["1"].update(owner="\ud800"), "versions.'1'.owner"),
            *(
                (lambda m, text=text: m.update(base=text.replace("<shapes>", m["base"][:64])), "^base of the archive")
                for text in (
                    "x y", "\ud800", "<shapes> x", "<shapes> 5", "<shapes> {}", "<shapes> [null, 1]", "<shapes> [true]",
                    "<shapes> [NaN]", "<shapes> [1e999]", f"<shapes> {[0.5] * 513}", f"<shapes> [1{400 * '0'}]",
                    "<shapes> " + "[" * 100_000, 'x [1]'
                )
            )
        ]
    )  # fmt: skip
    def test_manifests_that_lie(self, data: bytes, take: Any, tmp_path: Path, change: Any, says: str) -> None:
        with pytest.raises(AdapterError, match=says):
            take(rebuilt(data, change))
        self.assert_nothing_came(tmp_path)

    @pytest.mark.parametrize(
        "trick", ["../../evil", "/etc/evil", "blobs/sha256/../../evil", "link", "hardlink", "folder", "device", "twice"]
    )
    def test_members_that_are_none(self, data: bytes, take: Any, tmp_path: Path, trick: str) -> None:
        out = io.BytesIO()
        with opened(data) as old, tarfile.open(fileobj=out, mode="w") as new:
            members = old.getmembers()
            for member in [*members, *([members[-1]] if trick == "twice" else [])]:
                new.addfile(member, old.extractfile(member))
            info = tarfile.TarInfo(trick if "/" in trick else members[1].name)
            info.type = KINDS.get(trick, tarfile.REGTYPE)
            info.linkname = "/etc/passwd"
            if trick != "twice":
                new.addfile(info)
        with pytest.raises(InvalidArchive, match="member"):
            take(out.getvalue())
        self.assert_nothing_came(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"store", "new"}

    @pytest.mark.parametrize("data", [b"", b"x" * 5000, bytes(2000), b"PK\x03\x04" + bytes(600)])
    def test_what_is_no_archive(self, data: bytes, take: Any) -> None:
        with pytest.raises(InvalidArchive):
            take(data)

    def test_another_base(self, data: bytes, tmp_path: Path) -> None:
        with OfflineStore(tmp_path / "new", create=True) as closed:
            with pytest.raises(InvalidArchive, match="base of other shapes"):
                import_store(closed, io.BytesIO(data), replace(BASE, num_layers=3), 16)
            with pytest.raises(AdaptersRefused, match=r"mia@1: .*max-lora-rank.*; zoe@1: "):
                import_store(closed, io.BytesIO(data), BASE, 2)
        self.assert_nothing_came(tmp_path)
