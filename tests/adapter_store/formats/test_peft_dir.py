import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapter_store.errors import Problem
from adapter_store.formats.peft_dir import digest_file, read_peft_dir

ProblemsOf = Callable[[Callable[[], object]], dict[str, Problem]]


@pytest.fixture
def write(tmp_path: Path, build: Any) -> Callable[[str], Path]:
    def write_adapter(folder: str = ".") -> Path:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(build.config()))
        (path / "adapter_model.safetensors").write_bytes(build.file())
        return path

    return write_adapter


def test_a_folder_and_what_else_lies_there(write: Any, build: Any) -> None:
    path = write()
    for name in ("rng_state.pth", "training_args.bin", "chat_template.jinja"):
        (path / name).write_bytes(b"\x80\x04")
    found = read_peft_dir(path)
    assert found.config == build.config()
    assert found.weights_path == path / "adapter_model.safetensors"
    assert found.ignored_files == ("chat_template.jinja", "rng_state.pth", "training_args.bin")
    assert found.subdirectory is None


def test_one_level_down(write: Any, tmp_path: Path, problems_of: ProblemsOf) -> None:
    write("pirate")
    found = read_peft_dir(tmp_path)
    assert found.subdirectory == "pirate"
    assert found.weights_path == tmp_path / "pirate" / "adapter_model.safetensors"
    write("poet")
    message = problems_of(lambda: read_peft_dir(tmp_path))["several_adapters"].message
    assert "'pirate', 'poet'" in message


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "missing_config"),
        ({"adapter_config.json": b"{}"}, "missing_weights"),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b"\x80"}, "not_safetensors"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors.index.json": b"{}"}, "sharded_weights"),
        ({"adapter_config.json": b"{}", "adapters.safetensors": b""}, "mlx_adapter"),
        ({"adapters.safetensors": b""}, "mlx_adapter"),
        ({"adapter.gguf": b"GGUF"}, "gguf_adapter"),
        ({"adapter_config.json": b'{"r":1,"r":2}', "adapter_model.safetensors": b""}, "malformed_config"),
        ({"adapter_config.json": b" " * (1 << 21), "adapter_model.safetensors": b""}, "config_too_large"),
    ],
)
def test_what_is_no_adapter(files: dict[str, bytes], code: str, tmp_path: Path, problems_of: ProblemsOf) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert list(problems_of(lambda: read_peft_dir(tmp_path))) == [code]


def test_not_a_folder(tmp_path: Path, problems_of: ProblemsOf) -> None:
    assert "not_a_directory" in problems_of(lambda: read_peft_dir(tmp_path / "nothing"))


def test_digest_file_tells_how_far_it_is(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    path = tmp_path / "f"
    path.write_bytes(data)
    steps: list[tuple[int, int]] = []
    assert digest_file(path, lambda done, total: steps.append((done, total))) == hashlib.sha256(data).hexdigest()
    assert steps == [(1 << 20, len(data)), (2 << 20, len(data)), (len(data), len(data))]
    assert digest_file(path) == hashlib.sha256(data).hexdigest()
