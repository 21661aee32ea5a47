"""`lorasrv list --store` and `check --store`: a store that no server uses."""

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from answers import failed
from shaped_base import TINY_LLAMA, write_adapter

from adapter_store.errors import AdapterCorrupt
from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.store import AdapterStore
from lorasrv.models.loader.locate import read_model_shape
from lorasrv.models.lora_sites import base_shapes

NOBODY = "http://127.0.0.1:1"


def base_of(folder: Path, **changes: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **changes}))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return base_of(tmp_path / "base")


@pytest.fixture
def mia(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "mia", 2, 16, 16)


@pytest.fixture
def filled(base: Path, mia: Path, tmp_path: Path) -> Path:
    """A store with `mia@1` and `zoe@1` of one content."""
    with opened(tmp_path / "store", base) as store:
        peft = read_peft_dir(mia)
        digest = store.add_blob(peft.weights_path)
        for name in ("zoe", "mia"):
            store.register(name, peft.config, digest)
    return tmp_path / "store"


def opened(root: Path, base: Path) -> AdapterStore:
    shape = read_model_shape(str(base))
    return AdapterStore(root, base_shapes(shape.spec, shape.name))


def test_list(cli, filled: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli("list", "--store", filled)
    assert (done.code, done.err) == (0, "")
    assert [row.split("\t")[:2] for row in done.out.splitlines()] == [["mia", "1"], ["zoe", "1"]]
    [mia, zoe] = json.loads(cli("list", "--store", filled, "--json").out)
    with opened(filled, base) as store:
        record = store.get("mia")
    assert (mia["id"], mia["digest"], mia["etag"]) == ("mia", f"sha256:{record.key}", record.etag)
    assert (mia["versions"][0]["rank"], zoe["id"]) == (2, "zoe")
    failed(cli("list", "--store", filled, "--server", NOBODY), 2, "give one of them")
    monkeypatch.setenv("LORASRV_STORE", str(filled))
    assert cli("list", "--server", NOBODY).code == 3, "the environment of serve is not meant"


def test_rows_are_those_of_the_server(run, cli, server, store, make_adapter) -> None:
    run("upload", make_adapter(), "--id", "mia")
    run("upload", make_adapter("tom", seed=1), "--id", "tom", "--stored", "int8", "--allow-drift")
    run("upload", make_adapter("zoe", seed=2), "--id", "zoe")
    assert run("compose", "both", "mia", "0.5*zoe").code == 0
    rows = run("list").out
    assert [row.split("\t")[3:5] for row in rows.splitlines()] == [
        ["-", "-"],
        ["2", "bf16"],
        ["2", "int8"],
        ["2", "bf16"],
    ]
    store.close()
    assert cli("list", "--store", store.root).out == rows


def test_what_a_server_found_damaged_is_told(run, store, make_adapter) -> None:
    for number, name in enumerate(("mia", "zoe")):
        run("upload", make_adapter(name, seed=number), "--id", name)
    (blob,) = (store.root / "blobs").rglob(store.get("mia").versions[0].weights_digest)
    blob.chmod(0o600)
    blob.write_bytes(b"?" * blob.stat().st_size)
    assert run("list").err == "", "nobody has read it"
    with pytest.raises(AdapterCorrupt):
        store.load(store.get("mia").key)
    assert run("list").err == "mia@1 is damaged on the disk: upload it again\n"
    assert [each["corrupt"] for each in json.loads(run("list", "--json").out)] == [True, False]


def test_check(cli, filled: Path, base: Path, mia: Path, tmp_path: Path) -> None:
    done = cli("check", mia, "--model", base, "--store", filled)
    assert done.code == 0, done.err
    assert done.out.endswith("  in the store already: mia@1, zoe@1\n")
    as_json = cli("check", mia, "--model", base, "--store", filled, "--json")
    assert json.loads(as_json.out)["in_store"] == ["mia@1", "zoe@1"]
    other = base_of(tmp_path / "other", hidden_size=32)
    fits_other = write_adapter(tmp_path / "tom", 2, 32, 32)
    assert cli("check", fits_other, "--model", other).code == 0
    says = f"lorasrv: {filled} belongs to a base of other shapes than other; name that base with --model\n"
    failed(cli("check", fits_other, "--model", other, "--store", filled), 1, says)


@pytest.mark.parametrize("command", ["list", "check"])
def test_a_store_that_cannot_be_read(cli, command: str, filled: Path, base: Path, mia: Path, tmp_path: Path) -> None:
    arguments = (command, *((mia, "--model", base) if command == "check" else ()), "--store")
    with opened(filled, base):
        in_use = cli(*arguments, filled)
    (tmp_path / "nothing").mkdir()
    nothing = cli(*arguments, tmp_path / "nothing")
    with contextlib.closing(sqlite3.connect(filled / "index.sqlite3")) as index, index:
        index.execute("UPDATE base SET fingerprint = 'none'")
    damaged = cli(*arguments, filled)
    with contextlib.closing(sqlite3.connect(filled / "index.sqlite3")) as index, index:
        index.execute("UPDATE uploads SET report = '{'")
    unreadable = cli(*arguments, filled)
    (filled / "index.sqlite3").write_bytes(b"no database" * 99)
    no_index = cli(*arguments, filled)
    says = {
        "in use by another server": in_use,
        "there is no adapter store in it": nothing,
        f"store {filled} cannot be used: its index has a row that cannot be read": unreadable,
        "index is damaged (file is not a database): put back a copy": no_index,
    }
    for words, done in {**says, **({"damaged in the index": damaged} if command == "check" else {})}.items():
        failed(done, 1, words)
        assert done.err.count("\n") == 1
    assert in_use.err.endswith(", or ask it: lorasrv list\n") == (command == "list")
    assert not any((tmp_path / "nothing").iterdir())
