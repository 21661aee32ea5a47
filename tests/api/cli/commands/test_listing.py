"""`lorasrv list --store` and `check --store`: a store that no server uses, through the real command line."""

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import cli_process
import pytest
from shaped_base import TINY_LLAMA, write_adapter

from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.store import AdapterStore
from lorasrv.models.loader.locate import read_model_shape
from lorasrv.models.lora_sites import base_shapes

NOBODY = "http://127.0.0.1:1"


def run(*arguments: object, **environment: str) -> Any:
    return cli_process.run(*arguments, env={"LORASRV_SERVER": NOBODY, **environment})


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


def refused(done: Any, *says: str) -> None:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert [words for words in says if words not in done.stderr] == [], done.stderr


def test_list(filled: Path, base: Path) -> None:
    done = run("list", "--store", filled)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row.split("\t")[:2] for row in done.stdout.splitlines()] == [["mia", "1"], ["zoe", "1"]]
    [mia, zoe] = json.loads(run("list", "--store", filled, "--json").stdout)
    with opened(filled, base) as store:
        record = store.get("mia")
    assert (mia["id"], mia["digest"], mia["etag"]) == ("mia", f"sha256:{record.key}", record.etag)
    assert (mia["versions"][0]["rank"], zoe["id"]) == (2, "zoe")
    assert run("list", LORASRV_STORE=str(filled)).returncode == 3, "the environment of serve is not meant"
    both = run("list", "--store", filled, "--server", NOBODY)
    assert (both.returncode, "give one of them" in both.stderr) == (2, True)


def test_check(filled: Path, base: Path, mia: Path, tmp_path: Path) -> None:
    done = run("check", mia, "--model", base, "--store", filled)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("  in the store already: mia@1, zoe@1\n")
    as_json = run("check", mia, "--model", base, "--store", filled, "--json")
    assert json.loads(as_json.stdout)["in_store"] == ["mia@1", "zoe@1"]
    other = base_of(tmp_path / "other", hidden_size=32)
    fits_other = write_adapter(tmp_path / "tom", 2, 32, 32)
    assert run("check", fits_other, "--model", other).returncode == 0
    says = f"lorasrv: {filled} belongs to a base of other shapes than other; name that base with --model\n"
    refused(run("check", fits_other, "--model", other, "--store", filled), says)


@pytest.mark.parametrize("command", ["list", pytest.param("check", marks=pytest.mark.long)])
def test_refused_in_one_line(command: str, filled: Path, base: Path, mia: Path, tmp_path: Path) -> None:
    more = (mia, "--model", base) if command == "check" else ()
    with opened(filled, base):
        refused(run(command, *more, "--store", filled), "in use by another server")
    refused(run(command, *more, "--store", tmp_path / "nothing"), "there is no adapter store in it")
    assert not (tmp_path / "nothing").exists()


def test_a_damaged_index_is_one_line(filled: Path, base: Path, mia: Path) -> None:
    with contextlib.closing(sqlite3.connect(filled / "index.sqlite3")) as index, index:
        index.execute("UPDATE base SET fingerprint = 'none'")
    refused(run("check", mia, "--model", base, "--store", filled), "damaged in the index")
