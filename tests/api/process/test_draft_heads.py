"""Medusa heads through the command line: checked, uploaded with an adapter, and no answer differs."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from medusa import save_heads
from served import Served, lorasrv, serve

HEADS = "medusa_lm_head.safetensors"


def ask(served: Served, adapter: str | None, speculation: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": adapter or "tiny", "prompt": "once upon a time", "max_tokens": 60, "temperature": 0}
    said = served.post("/v1/completions", **body, ignore_eos=True, speculation=speculation, **more).json()
    return said["choices"][0]["text"], said["usage"]["lorasrv"]["speculation"]


def test_heads_are_part_of_a_version(flags, adapter_dirs: dict[str, Path], tmp_path: Path) -> None:
    mia = tmp_path / "mia"
    shutil.copytree(adapter_dirs["one"], mia)
    torch.manual_seed(0)
    save_heads([(torch.randn(64, 64), torch.randn(64)) for _ in range(2)], mia / HEADS)
    (tmp_path / "base").mkdir()
    shutil.copy(mia / HEADS, tmp_path / "base")
    with serve(*flags, "--draft-heads", tmp_path / "base", store=tmp_path / "store") as served:
        checked = lorasrv("check", mia, *flags[:2])
        assert checked.returncode == 0, checked.stderr
        assert "holds 2 Medusa heads" in checked.stdout
        assert "not used" not in checked.stdout
        for folder, name in ((mia, "mia"), (adapter_dirs["one"], "tom")):
            done = lorasrv("upload", folder, "--id", name, "--server", served.url)
            assert done.returncode == 0, done.stderr
        digests = {
            json.loads(lorasrv("show", n, "--server", served.url, "--json").stdout)["digest"] for n in ("mia", "tom")
        }
        assert len(digests) == 2
        plain, _ = ask(served, "tom", False)
        for adapter in ("mia", "tom"):
            text, facts = ask(served, adapter, {"drafters": ["medusa"], "remember": False})
            assert text == plain
            assert "not_drafted" not in facts
        assert ask(served, None, {"drafters": ["medusa"]})[0] == ask(served, None, False)[0] != plain
        _, facts = ask(served, "mia", {"drafters": ["model"]})
        assert facts["not_drafted"] == "no such drafter"
        _, facts = ask(served, "mia", True, use_beam_search=True, best_of=2, n=1)
        assert (facts["not_drafted"], facts["drafted"]) == ("beam search", 0)


def test_bad_heads_are_one_line(flags, tmp_path: Path) -> None:
    save_heads([(torch.zeros(8, 8), torch.zeros(8))], tmp_path / HEADS)
    done = lorasrv("serve", *flags, "--draft-heads", tmp_path, "--store", tmp_path / "store")
    assert done.returncode == 2
    assert "this base has 64 hidden numbers" in done.stderr.splitlines()[-1]
