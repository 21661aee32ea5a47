"""`lorasrv check` without a server and without torch: what is accepted, refused, and converted as `upload` does."""

import json
import sys
from pathlib import Path
from subprocess import run as run_process

import numpy as np
import pytest
from answers import failed
from shaped_base import TINY_LLAMA, write_adapter

from api.config.settings import ServerSettings
from api.engine_server import open_store
from lorasrv.config import BUILTIN_MODEL
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.locate import builtin_file, checkpoint_name, read_model_shape
from lorasrv.models.lora_sites import base_shapes

SCRIPT = """
import sys
from api.cli.main import main
sys.argv = ["lorasrv", "check", {folder!r}, "--model", {model!r}, "--json"]
try:
    main()
finally:
    print(sorted({{"torch", "transformers", "peft", "fastapi"}} & set(sys.modules)), file=sys.stderr)
"""
CONVERTED = "converted from MLX: 8 tensors transposed, r=2, scaling 2"


@pytest.fixture
def check(cli, store, monkeypatch: pytest.MonkeyPatch):
    """Runs the command with the tiny base."""
    monkeypatch.setattr("api.cli.commands.check.shapes_of", lambda model: store.base)
    return lambda *arguments: cli("check", *arguments)


@pytest.mark.parametrize("base", ["built-in", "gguf", "directory"])
def test_no_torch_is_imported(base: str, tmp_path: Path) -> None:
    if base == "directory":
        model = tmp_path / "base"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY_LLAMA))
        folder = write_adapter(tmp_path / "mia", 2, 16, 16)
    else:
        model = tmp_path / "base.gguf" if base == "gguf" else Path(BUILTIN_MODEL)
        if base == "gguf":
            model.symlink_to(builtin_file())
        folder = write_adapter(tmp_path / "mia", 30, 576, 576)
    script = SCRIPT.format(folder=str(folder), model=str(model))
    done = run_process([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    report = json.loads(done.stdout)["report"]
    assert report["modules_matched"] == report["layers"] == (2 if base == "directory" else 30)
    assert done.stderr.strip() == "[]"


def test_the_shape_is_the_checkpoints() -> None:
    checkpoint = open_checkpoint(BUILTIN_MODEL)
    checkpoint.close()
    shape = read_model_shape(BUILTIN_MODEL)
    assert base_shapes(shape.spec, shape.name) == base_shapes(checkpoint.spec, checkpoint.name)


def test_the_name_of_a_base_on_the_disk(tmp_path: Path) -> None:
    revision = tmp_path / "models--meta-llama--Llama-3.2-1B" / "snapshots" / "4e20de36"
    revision.mkdir(parents=True)
    (tmp_path / "link").symlink_to(revision)
    (tmp_path / "mine.Q4_0.gguf").write_bytes(b"")
    paths = (revision, tmp_path / "link", tmp_path, tmp_path / "mine.Q4_0.gguf")
    names = [checkpoint_name(str(path)) for path in (*paths, BUILTIN_MODEL, "llama-3-8b")]
    builtin = "SmolLM2-135M-Instruct.Q4_1"
    assert names == ["Llama-3.2-1B", "Llama-3.2-1B", tmp_path.name, "mine.Q4_0", builtin, "llama-3-8b"]
    with open_store(ServerSettings(served_model_name="chat", store=tmp_path / "store")) as store:
        assert (store.base.name, store.base.checkpoint) == ("chat", builtin)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("absent", None, "not found"),
        ("base.gguf", b"GGUF", "base.gguf: the GGUF file is truncated"),
        ("base.gguf", b"", "base.gguf: the GGUF file is empty"),
        ("base/config.json", b"{", "config.json is not valid JSON"),
        ("base/readme", b"", "directory base lacks config.json; give the folder that save_pretrained() wrote"),
        ("base/config.json", b'{"architectures": ["GPT2LMHeadModel"]}', "'GPT2LMHeadModel' is not supported"),
    ],
)
def test_a_base_that_cannot_be_read(cli, make_adapter, name: str, data: bytes | None, says: str, tmp_path) -> None:
    path = tmp_path / name
    if data is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    done = cli("check", make_adapter(), "--model", tmp_path / name.partition("/")[0])
    failed(done, 1, says)
    assert done.err.count("\n") == 1


def test_accepted(check, server, make_adapter) -> None:
    folder = make_adapter("given/run-1").parent
    (folder / "run-1" / "optimizer.pt").write_bytes(b"x")
    done = check(folder)
    assert (done.code, done.out[:4], "4 of 4 modules matched" in done.out) == (0, "ok  ", True)
    assert done.err.splitlines() == ["found in sub-folder run-1", "not used: optimizer.pt"]
    report = json.loads(check(folder, "--json").out)["report"]
    assert report["rank_max"] == 2
    assert server.upload(folder / "run-1", "mia").json()["digest"] == f"sha256:{report['digest']}"


def test_refused(check, make_adapter) -> None:
    done = check(make_adapter(use_bdlora=True, rank=4), "--max-lora-rank", 3, "--json")
    fields = {problem["field"] for problem in json.loads(done.out)["problems"]}
    assert ("use_bdlora" in fields, len(fields) > 1) == (True, True)
    assert (done.code, done.err.startswith("lorasrv: the adapter is refused\n  ")) == (1, True)


def test_a_partial_adapter(check, make_adapter) -> None:
    folder = make_adapter(target_modules=["q_proj", "v_proj", "down_proj"])
    problems = json.loads(check(folder, "--json").out)["problems"]
    assert [problem["code"] for problem in problems] == ["partial_adapter"]
    done = check(folder, "--allow-partial")
    assert (done.code, done.out.startswith("ok  ")) == (0, True)


def test_mlx_is_converted(check, run, server, store, make_adapter, as_mlx) -> None:
    mlx = as_mlx(make_adapter())
    done = check(mlx, "--json")
    assert (done.code, done.err) == (0, f"{CONVERTED}\n")
    assert json.loads(done.out)["report"]["scaling_max"] == 2.0
    done = run("upload", mlx, "--id", "mlx", "--json")
    facts = json.loads(done.out)
    assert (facts["report"]["modules_matched"], facts["report"]["scaling_max"]) == (4, 2.0)
    assert (facts["converted"], facts["ignored_files"], done.err.splitlines()[0]) == ([CONVERTED], [], CONVERTED)
    server.upload(make_adapter(), "mia")
    theirs, ours = (store.load(store.resolve(name).key) for name in ("mia", "mlx"))
    assert list(theirs) == list(ours)
    for site, lora in theirs.items():
        assert lora.scaling == ours[site].scaling
        assert np.array_equal(lora.a, ours[site].a)
        assert np.array_equal(lora.b, ours[site].b)
