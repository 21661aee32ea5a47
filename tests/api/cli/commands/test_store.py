"""Commands store gc, fsck, export and import; their work is tested in tests/adapter_store/maintenance."""

import errno
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from answers import failed
from tiny_adapter import HIDDEN
from whole_archives import rebuilt

from adapter_store.store import AdapterStore


@pytest.fixture
def filled(server, store: AdapterStore, make_adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of two ids and an orphan, which no server uses any more."""
    monkeypatch.setattr("api.cli.commands.store.shapes_of", lambda model: store.base)
    server.upload(make_adapter("1", seed=1), "mia", alias="prod")
    server.upload(make_adapter("2", seed=2), "zoe")
    store.add_blob(make_adapter("3", seed=3) / "adapter_model.safetensors")
    store.close()
    return tmp_path / "store"


@pytest.fixture
def own_defaults(server, filled: Path, store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a persona and a stored sum, of a base of 9 tokens."""
    base = replace(store.base, ends={"head": (HIDDEN, 9), "embed": (9, HIDDEN)}, embedding="embed")
    monkeypatch.setattr("api.cli.commands.store.shapes_of", lambda model: base)
    with AdapterStore(filled, store.base) as opened:
        opened.register_defaults("zoe", '{"seed":1}', opened.resolve("zoe"), principal="ann")
        part = {"id": "mia@1", "weight": 0.5, "digest": f"sha256:{opened.resolve('mia').key}"}
        opened.register_defaults("night", json.dumps({"adapters": [part]}), None, principal="ann")
    return filled


@pytest.fixture
def run(cli, filled: Path) -> Callable[..., Any]:
    return lambda *arguments: cli("store", *arguments, "--store", filled)


def blobs(root: Path) -> list[Path]:
    return sorted((root / "blobs" / "sha256").iterdir())


def damage(root: Path) -> None:
    for path in blobs(root):
        path.write_bytes(path.read_bytes()[:-1])


def test_without_store_it_is_the_one_that_serve_is_configured_for(
    cli, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text(f'store = "{filled}"\n')
    monkeypatch.setenv("LORASRV_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.delenv("LORASRV_STORE", raising=False)
    assert cli("store", "export", tmp_path / "all.tar").out.startswith("exported 2 adapters")


class TestGc:
    def test_by_age(self, run, filled: Path) -> None:
        assert run("gc").out == "removed 0 blobs (0 bytes), 0 contents, 0 unfinished uploads\n"
        assert len(blobs(filled)) == 3
        done = json.loads(run("gc", "--older-than", "0s", "--json").out)
        assert (done["blobs"], done["contents"], done["unfinished"]) == (1, 0, 0)
        assert done["bytes"] > 0
        assert len(blobs(filled)) == 2

    @pytest.mark.parametrize("age", ["", "soon", "-1", "1w", "1e9", "nan", "5 m", "0", "5"])
    def test_what_is_no_age(self, run, age: str) -> None:
        failed(run("gc", "--older-than", age), 2, "expected 90s, 30m, 12h or 7d")


class TestFsck:
    def test_clean(self, run) -> None:
        run("gc", "--older-than", "0s")
        done = run("fsck")
        assert (done.code, done.out) == (0, "ok: 2 blobs, each as it was uploaded\n")
        assert json.loads(run("fsck", "--json").out) == {"ok": True, "blobs": 2, "findings": []}

    def test_findings(self, run, filled: Path) -> None:
        damage(filled)
        done = run("fsck")
        kinds = sorted(line.split("\t")[0] for line in done.out.splitlines())
        assert (done.code, kinds) == (1, ["damaged", "damaged", "damaged", "finding", "orphaned"])
        assert "\tmia@1\t" in done.out
        assert all(words in done.err for words in ("lorasrv: 4 findings", "reading weights done"))
        found = run("fsck", "--json")
        assert (found.code, json.loads(found.out)["ok"]) == (1, False)
        assert {"kind", "what", "adapters", "message"} == set(json.loads(found.out)["findings"][0])


class TestMoving:
    def test_there_and_back(self, run, cli, filled: Path, tmp_path: Path) -> None:
        done, tar = run("export", tmp_path), tmp_path / "lorasrv-store.tar"
        assert (done.code, tar.is_file()) == (0, True)
        assert done.out.startswith("exported 2 adapters, 2 versions, 2 blobs (")
        assert tar.stat().st_mode & 0o777 == 0o600, "it has personas' hidden prompts"
        failed(run("export", tar), 1, "exists already")
        failed(run("export", tmp_path / "none" / "a.tar"), 1, f"the folder {tmp_path / 'none'} does not exist")
        new = tmp_path / "new"
        moved = json.loads(cli("store", "import", tar, "--store", new, "--json").out)
        assert (moved["adapters"], moved["versions"], moved["blobs"]) == (2, 2, 2)
        assert json.loads(cli("store", "fsck", "--store", new, "--json").out)["ok"]
        twice = cli("store", "import", tmp_path, "--store", new)
        assert (twice.code, "mia, zoe already" in twice.err) == (1, True)

    @pytest.mark.parametrize(
        ("adapter_id", "change", "says"),
        [
            ("zoe", {"temperature": -5}, "zoe@2: temperature: temperature must be between 0 and 100"),
            ("zoe", {"bogus": 1}, "zoe@2: bogus: is no field here; correct its name, or leave it out"),
            ("zoe", {"system": "To {{name}}."}, "zoe@2: system: '{{name}}' is not"),
            ("zoe", {"logit_bias": {"9": 1}}, "zoe@2: logit_bias: logit_bias must contain token ids in [0, 9)"),
            ("zoe", {"stop_token_ids": [9]}, "zoe@2: stop_token_ids: stop_token_ids must lie in [0, 9)"),
            (
                "zoe",
                {"response_format": {"type": "json_object"}, "ignore_eos": True},
                "zoe@2: ignore_eos: ignore_eos contradicts",
            ),
            ("zoe", {"tools": [{"type": "function"}]}, "zoe@2: tools: tools[0].function"),
            ("zoe", {"adapters": [{"id": "mia@1", "digest": None}]}, "zoe@2 of the archive has weights of its own"),
            ("night", {"adapters": [{"id": "ann@1", "digest": "0" * 64}]}, "'ann@1', which neither the archive nor"),
            ("night", {"adapters": [{"id": "mia@1", "digest": "0" * 64}]}, "'mia@1', which is not the content"),
        ],
    )
    def test_defaults_are_checked_as_at_an_upload(
        self, run, cli, own_defaults: Path, tmp_path: Path, adapter_id: str, change: dict[str, Any], says: str
    ) -> None:
        run("export", tmp_path / "a.tar")

        def altered(manifest: dict[str, Any]) -> None:
            versions = manifest["adapters"][adapter_id]["versions"]
            versions[max(versions)]["defaults"].update(change)

        (tmp_path / "b.tar").write_bytes(rebuilt((tmp_path / "a.tar").read_bytes(), altered))
        new = ("--store", tmp_path / "new")
        failed(cli("store", "import", tmp_path / "b.tar", *new), 1, says)
        assert cli("store", "import", tmp_path / "a.tar", *new).code == 0

    def test_what_is_refused_today_is_told_and_the_others_can_be_imported(
        self, run, cli, own_defaults: Path, store: AdapterStore, tmp_path: Path
    ) -> None:
        run("export", tmp_path / "a.tar")

        def altered(manifest: dict[str, Any]) -> None:
            manifest["adapters"]["mia"]["versions"]["1"]["defaults"] = {"bogus": 1}

        (tmp_path / "b.tar").write_bytes(rebuilt((tmp_path / "a.tar").read_bytes(), altered))
        new = ("--store", tmp_path / "new")
        reasons = "\n  mia@1: bogus: is no field here", "\n  night@1: a sum of 'mia@1', which is refused"
        refused = cli("store", "import", tmp_path / "b.tar", *new)
        failed(refused, 1, "2 adapters are refused, and nothing was imported; --skip-refused imports the", *reasons)
        done = cli("store", "import", tmp_path / "b.tar", *new, "--skip-refused", "--json")
        moved = json.loads(done.out)
        assert (done.code, all(reason in done.err for reason in reasons)) == (1, True), done.err
        assert (moved["adapters"], moved["versions"], moved["blobs"]) == (1, 2, 1)
        assert moved["refused"].keys() == {"mia", "night"}
        assert json.loads(cli("store", "fsck", *new, "--json").out) == {"ok": True, "blobs": 1, "findings": []}
        with AdapterStore(tmp_path / "new", store.base) as opened:
            assert [(name, record.current_version) for name, record in opened.records().items()] == [("zoe", 2)]
        assert cli("store", "import", tmp_path / "a.tar", "--store", tmp_path / "all", "--skip-refused").code == 0

    def test_a_failed_export_leaves_nothing(self, run, filled: Path, tmp_path: Path) -> None:
        damage(filled)
        failed(run("export", tmp_path / "a.tar"), 1, "are damaged")
        assert not list(tmp_path.glob("a.tar*"))

    def test_a_full_disk_is_told_with_the_file(self, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr("adapter_store.maintenance.archive.export_store", full)
        failed(run("export", tmp_path / "a.tar"), 1, f"No space left on device: {tmp_path / 'a.tar'}")
        assert not list(tmp_path.glob("a.tar*"))

    def test_what_follows_the_weights_is_refused_without_saying_done(self, run, cli, tmp_path: Path) -> None:
        run("export", tmp_path / "a.tar")
        with tarfile.open(tmp_path / "a.tar", "a") as tar:
            tar.addfile(tarfile.TarInfo("evil"))
        done = cli("store", "import", tmp_path / "a.tar", "--store", tmp_path / "new")
        failed(done, 1, "member 'evil' of the archive")
        assert "import" not in done.err.partition("lorasrv:")[0]

    def test_what_is_no_archive(self, cli, tmp_path: Path) -> None:
        (tmp_path / "x.tar").write_bytes(b"x" * 2000)
        new = ("--store", tmp_path / "new")
        failed(cli("store", "import", tmp_path / "x.tar", *new), 1, "not a tar file that lorasrv store export wrote")
        assert not (tmp_path / "new").exists(), "nothing is left of a store that was made for it"
        failed(cli("store", "import", tmp_path / "y.tar", *new), 2, "DIR_OR_TAR", "does not exist")
        (tmp_path / "new").mkdir()
        assert cli("store", "import", tmp_path / "x.tar", *new).code == 1
        assert (tmp_path / "new").exists(), "but a folder that was there is"

    def test_the_home_folder(self, cli, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("LORASRV_STORE", "~/store")
        assert cli("store", "fsck").code == 1, "it has an orphan"
        assert cli("store", "gc", "--older-than", "0s").code == 0
        assert cli("store", "fsck").code == 0
        assert cli("list", "--store", "~/store").code == 0
        assert cli("store", "export", "~/b.tar").code == 0
        assert (tmp_path / "b.tar").is_file()
        assert cli("store", "import", "~/b.tar", "--store", "~/new").code == 0
        assert (tmp_path / "new").is_dir()

    def test_one_is_not_several(self, cli, filled: Path, store: AdapterStore, tmp_path: Path) -> None:
        with AdapterStore(filled, store.base) as opened:
            opened.delete("zoe")
        assert cli("store", "export", tmp_path / "a.tar", "--store", filled).out.startswith(
            "exported 1 adapter, 1 version, 1 blob ("
        )


@pytest.mark.parametrize("command", [("gc",), ("fsck",), ("export", "x.tar")])
def test_a_server_keeps_it(cli, store: AdapterStore, tmp_path: Path, command: tuple[str, ...], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed(cli("store", *command, "--store", tmp_path / "store"), 1, "is in use by another server")
    failed(cli("store", *command, "--store", tmp_path / "none"), 2, "--store", "does not exist")
    (tmp_path / "empty").mkdir()
    failed(cli("store", *command, "--store", tmp_path / "empty"), 1, "no adapter store in it")
    assert not list(tmp_path.glob("x.tar*"))
