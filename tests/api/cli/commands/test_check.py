"""`lorasrv check` without torch, and what it and `lorasrv upload` share: partial adapters, MLX's folders."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from shaped_base import TINY_LLAMA, write_adapter

from api.config.settings import ServerSettings
from api.server import open_store
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    report = json.loads(done.stdout)["report"]
    assert report["modules_matched"] == report["layers"] == (2 if base == "directory" else 30)
    assert done.stderr.strip() == "[]"


def test_the_shape_is_the_checkpoints() -> None:
    checkpoint = open_checkpoint(BUILTIN_MODEL)
    checkpoint.close()
    shape = read_model_shape(BUILTIN_MODEL)
    assert base_shapes(shape.spec, shape.name) == base_shapes(checkpoint.spec, checkpoint.name)


def test_what_a_base_is_called_on_the_disk(tmp_path: Path) -> None:
    revision = tmp_path / "models--meta-llama--Llama-3.2-1B" / "snapshots" / "4e20de36"
    revision.mkdir(parents=True)
    (tmp_path / "link").symlink_to(revision)
    (tmp_path / "mine.Q4_0.gguf").write_bytes(b"")
    names = [
        checkpoint_name(str(path)) for path in (revision, tmp_path / "link", tmp_path, tmp_path / "mine.Q4_0.gguf")
    ]
    assert names == ["Llama-3.2-1B", "Llama-3.2-1B", tmp_path.name, "mine.Q4_0"]
    with open_store(ServerSettings(served_model_name="chat", store=tmp_path / "store")) as store:
        assert (store.base.name, store.base.checkpoint) == ("chat", checkpoint_name(BUILTIN_MODEL))
    assert (checkpoint_name(BUILTIN_MODEL), checkpoint_name("llama-3-8b")) == (
        "SmolLM2-135M-Instruct.Q4_1",
        "llama-3-8b",
    )


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("absent", None, "not found"),
        ("base.gguf", b"GGUF", "base.gguf: the GGUF file is truncated"),
        ("base.gguf", b"", "base.gguf: the GGUF file is empty"),
        ("base/config.json", b"{", "config.json is not valid JSON"),
        ("base/readme", b"", "lacks config.json"),
        ("base/config.json", b'{"architectures": ["GPT2LMHeadModel"]}', "'GPT2LMHeadModel' is not supported"),
    ],
)
def test_a_base_that_cannot_be_read(cli, make_adapter, name: str, data: bytes | None, words: str, tmp_path) -> None:
    path = tmp_path / name
    if data is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    done = cli("check", make_adapter(), "--model", tmp_path / name.partition("/")[0])
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert words in done.err


class TestPartial:
    def test_upload(self, cli, server, make_adapter) -> None:
        folder = make_adapter(target_modules=["q_proj", "v_proj", "down_proj"])
        options = ("upload", folder, "--id", "mia", "--server", server.url)
        refused = cli(*options)
        assert refused.code == 1
        assert "(partial_adapter)" in refused.err
        assert "lorasrv upload --allow-partial" in refused.err
        done = cli(*options, "--allow-partial")
        assert done.code == 0
        assert "4 of 6 modules matched" in done.out
        assert "warning: partial: 2 of 6 targeted modules" in done.out
        assert "4 of 6 modules matched" in cli("show", "mia", "--server", server.url).out

    def test_post(self, server, make_adapter) -> None:
        folder = make_adapter(target_modules=["q_proj", "v_proj", "down_proj"])
        refused = server.upload(folder, "mia")
        assert refused.status_code == 422
        assert [problem["code"] for problem in refused.json()["error"]["details"]] == ["partial_adapter"]
        assert server.upload(folder, "mia", allow_partial=False).status_code == 422
        assert server.upload(folder, "mia", allow_partial="yes").status_code == 400
        assert server.upload(folder, "mia", allow_partial=True).status_code == 201

    def test_check(self, cli, store, make_adapter, monkeypatch) -> None:
        monkeypatch.setattr("api.cli.commands.check.shapes_of", lambda model: store.base)
        folder = make_adapter(target_modules=["q_proj", "v_proj", "down_proj"])
        problems = json.loads(cli("check", folder, "--json").out)["problems"]
        assert [problem["code"] for problem in problems] == ["partial_adapter"]
        done = cli("check", folder, "--allow-partial")
        assert (done.code, done.out.startswith("ok  ")) == (0, True)


class TestMlx:
    @pytest.fixture
    def mlx(self, make_adapter, tmp_path) -> Path:
        """MLX's copy of the adapter `mia`."""
        folder = tmp_path / "mlx"
        folder.mkdir()
        tensors = {
            name.removeprefix("base_model.model.")
            .replace("lora_A.weight", "lora_a")
            .replace("lora_B.weight", "lora_b"): t
            for name, t in load_file(make_adapter() / "adapter_model.safetensors").items()
        }
        save_file({name: np.ascontiguousarray(t.T) for name, t in tensors.items()}, folder / "adapters.safetensors")
        config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 2.0}, "model": "x/tiny-base"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    def test_upload_converts(self, cli, server, mlx, make_adapter, store) -> None:
        done = cli("upload", mlx, "--id", "mlx", "--server", server.url, "--json")
        assert done.err.splitlines()[0] == "converted from MLX: 8 tensors transposed, r=2, scaling 2"
        facts = json.loads(done.out)
        assert (facts["report"]["modules_matched"], facts["report"]["scaling_max"]) == (4, 2.0)
        assert (facts["converted"], facts["ignored_files"]) == ([done.err.splitlines()[0]], [])
        server.upload(make_adapter(), "mia")
        theirs, ours = (store.load(store.resolve(name).key) for name in ("mia", "mlx"))
        assert list(theirs) == list(ours)
        for site, lora in theirs.items():
            assert lora.scaling == ours[site].scaling
            assert np.array_equal(lora.a, ours[site].a)
            assert np.array_equal(lora.b, ours[site].b)

    def test_check_converts(self, cli, mlx, store, monkeypatch) -> None:
        monkeypatch.setattr("api.cli.commands.check.shapes_of", lambda model: store.base)
        done = cli("check", mlx, "--json")
        assert done.code == 0
        assert json.loads(done.out)["report"]["scaling_max"] == 2.0
        assert done.err == "converted from MLX: 8 tensors transposed, r=2, scaling 2\n"

    def test_the_route_does_not_and_says_who_does(self, server, mlx, make_adapter) -> None:
        folder = make_adapter()
        (folder / "adapter_config.json").write_bytes((mlx / "adapter_config.json").read_bytes())
        refused = server.upload(folder, "mia")
        assert refused.status_code == 422
        problems = {problem["code"]: problem["message"] for problem in refused.json()["error"]["details"]}
        assert "`lorasrv upload`" in problems["mlx_adapter"]
