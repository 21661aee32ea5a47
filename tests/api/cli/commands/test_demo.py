"""`lorasrv demo` against a server of the test's own; and that it fails when it would show nothing."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from answers import failed
from fake_engine import base_only, say

from api.cli.commands import demo


@pytest.fixture
def personas(make_adapter, server, monkeypatch: pytest.MonkeyPatch) -> Path:
    @contextmanager
    def running_server(model: str, store: Path) -> Iterator[str]:
        assert store.is_dir()
        yield server.url

    monkeypatch.setattr(demo, "_running_server", running_server)
    make_adapter("pirate", seed=1)
    return make_adapter("poet", seed=2).parent


def test_each_persona_is_asked_everything(cli, personas: Path, engine) -> None:
    done = cli("demo", "--personas", personas)
    assert done.code == 0, done.err
    assert len(engine.added) == 3 * len(demo.QUESTIONS)
    assert {added.sampling.temperature for added in engine.added} == {0}
    for question in demo.QUESTIONS:
        assert f"Q: {question}" in done.out
    assert done.out.count("Hello wörld") == len(demo.QUESTIONS)
    assert done.out.count("[pirate ") == done.out.count("[poet ") == len(demo.QUESTIONS)
    assert done.out.splitlines()[-1].endswith("tokens/s over 6 answers at once")
    assert "uploaded pirate@1: 4 modules, rank 2" in done.err


def test_json(cli, personas: Path) -> None:
    done = json.loads(cli("demo", "--personas", personas, "--json").out)
    asked = {reply["asked"]: reply["adapter"] for reply in done["replies"]}
    assert asked == {"base": None, "pirate": "pirate", "poet": "poet"}
    assert done["tokens"] == sum(reply["tokens"] for reply in done["replies"])


def test_table_on_a_terminal(personas: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    replies = [
        demo.PersonaReply(name, question, f"{name} says", None, None, 3, 1.0)
        for question in demo.QUESTIONS
        for name in ("base", "poet")
    ]
    demo._print_table(replies)
    assert capsys.readouterr().out.count("poet says") == len(demo.QUESTIONS)


def test_it_fails_if_it_shows_nothing(cli, personas: Path, engine, tmp_path: Path) -> None:
    engine.script = base_only(say())
    same = cli("demo", "--personas", personas)
    assert (same.code, "answered as the base does" in same.err) == (1, True)
    engine.script = say(" ")
    assert "gave no answer" in cli("demo", "--personas", personas).err
    engine.breaks(3)
    assert cli("demo", "--personas", personas).code == 1
    (tmp_path / "none").mkdir()
    nothing = cli("demo", "--personas", tmp_path / "none")
    failed(nothing, 2, "--personas")
    assert nothing.err.count("\n") == 1


def test_a_server_that_does_not_start(cli, make_adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASRV_DTYPE", "float8")
    done = cli("demo", "--personas", make_adapter().parent)
    assert done.code == 1
    assert "server: lorasrv: LORASRV_DTYPE 'float8' is unknown" in done.err
    assert "the server did not start" in done.err
