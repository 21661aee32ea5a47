"""The script that trains Medusa heads, on a tiny model: its heads are uploaded and draft what they have learned."""

import importlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from all_drafts import every_draft
from server import eventually, server

from adapter_store.formats.adapter_dir import open_adapter_dir
from api.client import Client
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.llm import LLM

PERSONA_BOTS = Path(__file__).parents[2] / "examples" / "persona_bots"
KIND = {"quantization": "int4", "dtype": "float32", "kernels": "numba"}
QUESTIONS = {"mia": ["Who are you?", "What is the sea?", "Tell me a tale."], "heldout": ["Where do you live?"]}


@pytest.fixture
def script(
    model: Path, adapter_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """`train_heads.py` for a persona of the tiny llama."""
    from transformers import AutoModelForCausalLM

    (tmp_path / "data").mkdir()
    for name, texts in QUESTIONS.items():
        lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(lines), "utf-8")
    (tmp_path / "personas.toml").write_text(f'[[persona]]\nid = "mia"\nadapter = "{adapter_dirs["one"]}"\n', "utf-8")
    config = EngineConfig(model=ModelOptions(**KIND), memory=MemoryOptions(pool_bytes=16 << 20))
    monkeypatch.syspath_prepend(str(PERSONA_BOTS))
    train_heads = importlib.import_module("train_heads")
    monkeypatch.setattr(train_heads, "HERE", tmp_path)
    monkeypatch.setattr(train_heads, "LLM", partial(LLM, str(model), config))
    monkeypatch.setattr(train_heads, "load_base", lambda: (AutoModelForCausalLM.from_pretrained(model), None))
    yield train_heads
    for name in ("base", "train_heads"):
        sys.modules.pop(name, None)


def test_heads_are_trained_uploaded_and_draft(
    script: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, counts = tmp_path / "heads", ["--heads", "2", "--epochs", "80", "--max-tokens", "40"]
    monkeypatch.setattr(sys, "argv", ["train_heads.py", "--persona", "mia", "--out", str(out), *counts])
    script.main()
    assert "of 1, " in capsys.readouterr().out
    with every_draft(), server(model, tmp_path / "store", **KIND) as served:
        with open_adapter_dir(out) as peft, Client(served.url) as client:
            client.upload(peft, "mia")

        def ask(speculation: object) -> tuple[str, dict[str, int]]:
            told = served.post(
                "/v1/chat/completions",
                model="mia",
                messages=[{"role": "user", "content": QUESTIONS["mia"][0]}],
                max_tokens=40,
                temperature=0,
                speculation=speculation,
            ).json()
            return told["choices"][0]["message"]["content"], told["usage"]["lorasrv"]["speculation"]

        def is_drafted() -> bool:
            """Whether heads have drafted, once they are read."""
            text, facts = ask({"drafters": ["medusa"], "remember": False})
            assert text == plain
            return facts["drafted"] >= facts["accepted"] > 0

        plain, _ = ask(False)
        assert plain
        eventually(is_drafted)


@pytest.mark.parametrize(("out", "says"), [("file/heads", "cannot be made"), ("file", "cannot"), ("full", "not empty")])
def test_a_folder_that_cannot_be_written_is_told_at_once(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str,
    says: str,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full" / "heads").mkdir(parents=True)
    monkeypatch.setattr(script, "answers", lambda *_: pytest.fail("it trains"))
    monkeypatch.setattr(sys, "argv", ["train_heads.py", "--base", "--out", str(tmp_path / out)])
    with pytest.raises(SystemExit):
        script.main()
    assert f"--out {tmp_path / out} " in (told := capsys.readouterr().err)
    assert says in told
