"""Commands defaults, import-card and import-modelfile, and what upload and show say of a persona."""

import json
from pathlib import Path
from typing import Any

import pytest
from answers import failed
from cards import EXPECTED, card, png

MIA: dict[str, Any] = {
    "name": "Mia",
    "system": {"text": "You are {{char}}.\nBe kind: grüße.", "mode": "lock"},
    "greetings": ["Come in."],
    "temperature": 0.5,
    "stop": ["x"],
    "response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": {"b": True, "a": None}}},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mia.json"
    # Fields of another order, and one that says nothing.
    path.write_text(json.dumps(dict(reversed(MIA.items())) | {"seed": None}), "utf-8")
    return path


def test_uploaded_shown_exported_and_imported_again(run, file: Path, make_adapter, tmp_path: Path) -> None:
    done = run("upload", make_adapter(), "--id", "mia", "--defaults", file)
    assert done.code == 0, done.err
    assert "tokens of prompt with a short turn" in done.out
    shown = run("show", "mia").out
    for line in ("persona Mia, defaults ", "system prompt (lock):", "Be kind: grüße.", "temperature 0.5", "Come in."):
        assert line in shown
    exported = run("defaults", "mia").out
    assert list(json.loads(exported)) == ["temperature", "stop", "name", "system", "greetings", "response_format"]
    assert list(json.loads(exported)["response_format"]["json_schema"]["schema"]) == ["b", "a"]
    copy = tmp_path / "copy.json"
    copy.write_text(exported, "utf-8")
    assert run("defaults", "mia", copy).out.startswith("unchanged: mia@1")
    assert run("defaults", "mia").out == exported
    assert run("defaults", "zoe", copy, "--new").out.startswith("registered zoe@1  no weights")
    assert run("defaults", "zoe").out == exported
    shown = run("show", "zoe")
    assert shown.code == 0, shown.err
    assert "zoe@1  no weights: the base answers\n" in shown.out
    assert "  version 1: no weights, defaults " in shown.out
    assert "lorasrv verify" not in shown.out
    assert "zoe\t1\tno weights\t-\t-\t-\n" in run("list").out


def test_a_sum(run, make_adapter) -> None:
    for name in ("mia", "tom"):
        run("upload", make_adapter(name), "--id", name)
    assert run("compose", "both", "mia", "0.5*tom").code == 0
    shown = run("show", "both")
    assert shown.code == 0, shown.err
    assert "both@1  a sum of adapters\n" in shown.out
    assert "deleted" not in shown.out
    assert "both\t1\tno weights\t-\t-\t-\n" in run("list").out
    run("rm", "tom")
    assert "  1 adapter of the sum deleted: it is refused until it is composed anew\n" in run("show", "both").out
    run("upload", make_adapter("another", seed=5), "--id", "tom")
    assert "1 adapter of the sum deleted" in run("show", "both").out, "it is another adapter"
    run("rm", "tom", "mia")
    assert "2 adapters of the sum deleted" in run("show", "both").out


def test_a_typo_is_told_before_anything_is_sent(cli, make_adapter, tmp_path: Path) -> None:
    path = tmp_path / "typo.json"
    path.write_text('{"sytem": {"text": "You are Mia."}}')
    done = cli("upload", make_adapter(), "--defaults", path)
    assert (done.code, done.err) == (1, f"lorasrv: {path}: unknown field sytem; did you mean system?\n")


@pytest.mark.parametrize(
    ("system", "says"),
    [
        ("3", "system: must be a text, or an object with text"),
        ('{"text": ""}', "system.text: must have at least 1 character"),
        ('{"text": "Mia", "mod": "lock"}', "unknown field system.mod"),
    ],
)
def test_a_wrong_system_prompt_is_named_as_it_was_written(
    cli, run, make_adapter, tmp_path: Path, system: str, says: str
) -> None:
    """By the check of the command, and by that of the server."""
    path = tmp_path / "wrong.json"
    path.write_text(f'{{"system": {system}}}')
    done = cli("upload", make_adapter(), "--defaults", path)
    assert (done.code, done.err) == (1, f"lorasrv: {path}: {says}\n")
    field, _, why = says.partition(": ")
    failed(run("defaults", "mia", path, "--new"), 1, f"{field.removeprefix('unknown field ')}: {why}")


def test_cleared(run, file: Path, make_adapter) -> None:
    run("upload", make_adapter(), "--id", "mia", "--defaults", file)
    assert run("defaults", "mia", "--clear").out.startswith("registered mia@2")
    printed, told = run("defaults", "mia"), run("defaults", "mia", "--json")
    assert (printed.code, told.code, json.loads(told.out)["defaults"]) == (0, 0, None)
    assert (printed.out, printed.err) == ("{}\n", "mia@2 has no defaults\n"), "what sets none, as a file"
    assert json.loads(run("defaults", "mia@1", "--json").out)["defaults"]["name"] == "Mia"


def test_every_fault_is_printed(run, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"temperature": -1, "top_p": 3, "colour": "red"}')
    failed(run("defaults", "mia", wrong, "--new"), 1, "temperature", "top_p", "colour")
    failed(run("defaults", "mia", tmp_path / "wrong.json"), 1, "'mia' does not exist")
    for text in ("[]", "{", '{"seed": NaN}'):
        wrong.write_text(text)
        failed(run("defaults", "mia", wrong, "--new"), 1, "JSON")


BROKEN: dict[str, tuple[bytes, str]] = {
    "import-card": (png(chara=card())[:-20], "the PNG ends early"),
    "import-modelfile": ("FROM x\nSYSTEM Grüße".encode("utf-16"), "is not UTF-8 (byte 0); save it as UTF-8 text"),
    "defaults": ('{"name": "Zoë"}'.encode("latin-1"), "is not UTF-8"),
}


@pytest.mark.parametrize("command", BROKEN)
def test_a_file_that_cannot_be_read_is_one_line_with_its_name(cli, tmp_path: Path, command: str) -> None:
    data, says = BROKEN[command]
    broken, closed = tmp_path / "broken", tmp_path / "closed"
    broken.write_bytes(data)
    closed.symlink_to(closed)
    for path in (broken, tmp_path / "nowhere", tmp_path, closed):
        arguments = (path, "--id", "ada", "--dry-run") if command != "defaults" else ("mia", path)
        done = cli(command, *arguments)
        if path == broken:
            failed(done, 1, f"{path}: ", says)
        else:
            failed(done, 2, "'FILE'", str(path))
        assert "unexpected" not in done.err
        assert done.err.count("\n") == 1


def test_cards(run, engine, tmp_path: Path) -> None:
    engine.max_model_len = 2048
    path = tmp_path / "ada.json"
    path.write_bytes(card())
    dry = run("import-card", path, "--id", "ada", "--dry-run")
    assert json.loads(dry.out) == EXPECTED
    [line] = run("import-card", path, "--id", "ada", "--dry-run", "--json").out.splitlines()
    assert json.loads(line) == EXPECTED
    done = run("import-card", path, "--id", "ada")
    assert done.out.startswith("registered ada@1")
    assert "left out of mes_example" in done.err
    exported = run("defaults", "ada").out
    assert json.loads(exported) == EXPECTED
    again = tmp_path / "ada2.json"
    again.write_text(exported, "utf-8")
    assert run("defaults", "ada", again).out.startswith("unchanged: ada@1")


def test_an_id_that_does_not_exist_can_be_made(run, file: Path) -> None:
    says = "--new makes a persona of the base with this id\n"
    failed(run("defaults", "nobody", file), 1, "'nobody' does not exist", says)
    assert "--new" not in run("defaults", "nobody@3", file).err
    assert "--new" not in run("defaults", "nobody").err


def test_modelfiles(run, tmp_path: Path, server) -> None:
    path = tmp_path / "Modelfile"
    base = server.http.get("/v1/models").json()["data"][0]["id"]
    path.write_text(f"FROM {base}\nSYSTEM Be brief.\nPARAMETER num_predict 5\nPARAMETER mirostat 1\n")
    done = run("import-modelfile", path, "--id", "mario")
    assert done.out.startswith("registered mario@1")
    assert done.err == "left out: PARAMETER mirostat\n"
    assert json.loads(run("defaults", "mario").out) == {"max_tokens": 5, "system": "Be brief."}
    path.write_text("FROM llama9\nSYSTEM Be brief.\n")
    failed(run("import-modelfile", path, "--id", "mario"), 1, "FROM llama9", base)
    assert run("import-modelfile", path, "--id", "mario", "--any-base").out.startswith("registered mario@2")
