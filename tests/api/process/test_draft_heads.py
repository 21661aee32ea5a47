"""Medusa heads through the command line: checked, uploaded with an adapter, and no answer differs; `--accept`."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa import save_heads
from served import Served, serve

HEADS = "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def mia(adapter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with heads, which guess anything."""
    folder = tmp_path_factory.mktemp("heads") / "mia"
    shutil.copytree(adapter_dirs["one"], folder)
    torch.manual_seed(0)
    save_heads([(torch.randn(64, 64), torch.randn(64)) for _ in range(2)], folder / HEADS)
    return folder


@pytest.fixture(scope="module")
def process(
    flags: tuple[object, ...], adapter_dirs: dict[str, Path], mia: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One whose base has the same heads, and which may accept by rejection."""
    base, store = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("store")
    shutil.copy(mia / HEADS, base)
    adapters = {"tom": adapter_dirs["one"], "eve": adapter_dirs["two"]}
    with serve(*flags, "--draft-heads", base, "--accept", "rejection", store=store, adapters=adapters) as served:
        yield served


def ask(served: Served, adapter: str | None, speculation: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": adapter or "tiny", "prompt": "once upon a time", "max_tokens": 60, "temperature": 0}
    said = served.post(
        "/v1/completions", **body | {"ignore_eos": True, "speculation": speculation} | more
    ).raise_for_status()
    return said.json()["choices"][0]["text"], said.json()["usage"]["lorasrv"]["speculation"]


def test_heads_are_part_of_a_version(cli: Callable[..., Any], served: Served, flags, mia: Path) -> None:
    checked = cli("check", mia, *flags[:2])
    assert checked.code == 0, checked.err
    assert "holds 2 Medusa heads" in checked.out
    assert "not used" not in checked.out
    done = cli("upload", mia, "--id", "mia", "--server", served.url)
    assert done.code == 0, done.err
    digests = {json.loads(cli("show", n, "--server", served.url, "--json").out)["digest"] for n in ("mia", "tom")}
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


def test_usage_says_how_drafts_were_accepted(served: Served) -> None:
    """A request with a seed says the same as without drafts, although others are accepted by rejection."""
    for more in ({"max_tokens": 30, "temperature": 1.2, "seed": 5}, {"max_tokens": 30}):
        plain, _ = ask(served, "eve", False, **more)
        prediction = {"type": "content", "content": plain}
        accepted = 0
        # On a machine that is busy with other tests a draft may not pay each time.
        for _ in range(100):
            text, facts = ask(served, "eve", {"remember": False}, prediction=prediction, **more)
            assert (text, facts["accept"]) == (plain, "same-draw")
            if accepted := facts["accepted"]:
                break
        assert accepted
    free = {"max_tokens": 30, "temperature": 1.2, "prediction": prediction}
    _, facts = ask(served, "eve", {"drafters": ["prediction"]}, **free)
    assert (facts["accept"], "not_drafted" in facts) == ("rejection", False)
    _, facts = ask(served, "eve", True, **free, ignore_eos=False, guided_regex="[a-z ]{20,}")
    assert facts["accept"] == "same-draw"


def test_bad_heads_are_one_line(refused: Callable[..., Any], flags, tmp_path: Path) -> None:
    save_heads([(torch.zeros(8, 8), torch.zeros(8))], tmp_path / HEADS)
    done = refused("serve", *flags, "--draft-heads", tmp_path, "--store", tmp_path / "store", "--port", 0)
    assert done.code == 2
    assert "this base has 64 hidden numbers" in done.errors[0]
