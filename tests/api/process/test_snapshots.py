"""Snapshots of personas' prompts in a real server, by the real command line: restarts, damage, deletion."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from served import Served, lorasrv, serve

pytestmark = pytest.mark.long
SYSTEM = "You are Mia, who keeps a lighthouse on a cold coast and has a word for every ship that passes it by."
DEFAULTS = {"system": SYSTEM, "temperature": 0, "max_tokens": 12}
PERSONAS = ("mia", "muse")


def ask(served: Served, model: str, salt: str | None = None) -> tuple[str, int]:
    """The answer of a persona, and how many tokens of its prompt were not computed."""
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "cache_salt": salt}
    answer = served.post("/v1/chat/completions", model=model, **body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["message"]["content"], usage["prompt_tokens_details"]["cached_tokens"]


def command(served: Served, *words: object) -> str:
    done = lorasrv(*words, "--server", served.url)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(store: Path) -> list[Path]:
    return sorted((store / "snapshots").iterdir())


@pytest.fixture(scope="module")
def made(
    flags: Any, adapter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, tuple[str, int]]]:
    """A store of two personas with snapshots, and what the server said that made them: answers, shared tokens."""
    folder = tmp_path_factory.mktemp("snapshots")
    file = folder / "persona.json"
    file.write_text(json.dumps(DEFAULTS))
    with serve(*flags, store=folder / "store") as served:
        command(served, "upload", adapter_dirs["two"], "--id", "mia", "--defaults", file)
        command(served, "defaults", "muse", file, "--new")
        said = {}
        for name in PERSONAS:
            text, cached = ask(served, name)
            assert cached == 0
            others = {ask(served, name, salt) for salt in ("a tenant", "another")}
            assert {text} == {text for text, _ in others}
            [(_, shared)] = others
            assert shared >= 48, "the persona's own pages are every tenant's"
            said[name] = text, shared
        served.until(lambda: served.figure("lorasrv_snapshots_made_total") == 2)
        assert "snapshot of 80 tokens" in command(served, "show", "mia")
    return folder / "store", said


def test_a_restart_restores_and_says_the_same(flags: Any, made: Any, tmp_path: Path) -> None:
    store, said = made
    with serve(*flags, store=store) as served:
        for name in PERSONAS:
            assert ask(served, name) == said[name]
        assert served.figure("lorasrv_snapshots_restored_total") == 2
        assert served.figure("lorasrv_snapshot_bytes_restored_total") > 0
    with serve(*flags, "--snapshot-bytes", 0, store=store) as served:
        for name in PERSONAS:
            assert ask(served, name) == (said[name][0], 0)
        assert len(files(store)) == 2
    smaller = shutil.copytree(store, tmp_path / "store")
    with serve(*flags, "--snapshot-bytes", files(store)[0].stat().st_size, store=smaller):
        assert len(files(smaller)) == 1


def test_other_kernels_and_pages_find_nothing(flags: Any, made: Any) -> None:
    store, _ = made
    with serve(*flags, "--kv-cache-dtype", "float32", store=store) as served:
        assert ask(served, "mia")[1] == 0
        assert served.figure("lorasrv_snapshots_restored_total") == 0
        assert not served.figure('lorasrv_snapshots_refused_total{reason="damaged"}')


def test_damaged_files_are_computed_and_those_of_a_deleted_persona_are_gone(flags: Any, made: Any) -> None:
    store, said = made
    cut, flipped = files(store)
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(flipped.read_bytes())
    data[-9] ^= 1
    flipped.write_bytes(data)
    with serve(*flags, store=store) as served:
        for name in PERSONAS:
            assert ask(served, name) == (said[name][0], 0)
        assert served.figure('lorasrv_snapshots_refused_total{reason="damaged"}') == 2
        assert served.log.count("does not hold what its name says") == 2
        assert not files(store)
        told = command(served, "snapshot", "mia")
        assert told.startswith("snapshot of mia@1: 80 tokens, ")
        assert command(served, "snapshot", "mia") == told
        assert len(files(store)) == 1
        assert served.figure("lorasrv_snapshot_bytes") == files(store)[0].stat().st_size
        command(served, "rm", "mia")
        assert not files(store)
        served.until(lambda: served.figure("lorasrv_snapshot_bytes") == 0)
