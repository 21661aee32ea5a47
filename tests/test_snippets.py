"""What README.md and docs/ tell a reader to type is run: every curl command, and every piece of Python.

Of `lorasrv` commands, that there are such commands and options is checked: what they do stands in tests of their own.
The server has a tiny model under the built-in base's name, and adapters of the names that the pages use. A block whose
line before is `<!-- not run: why -->` is left out, and so is a transcript (`$ curl …`): its answers are a moment's own.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from cli_reference import parameters
from server import server
from tiny_checkpoints import adapter_dirs, model, tiny_hf_checkpoints  # noqa: F401
from typer.main import get_command

from api.cli.program import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*\Z")
PLACES = ("http://127.0.0.1:8000", "http://localhost:8000", "localhost:8000")
ADAPTERS = {"blackbeard": "one", "basho": "three", "mia": "two"}
FOLDER = "wrench"


def blocks() -> Iterator[tuple[str, str, str]]:
    """(where, language, text) of every block that is to be run."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for found in BLOCK.finditer(text):
            if not NOT_RUN.search(text, 0, found.start()):
                line = text.count("\n", 0, found.start()) + 2
                yield f"{page.relative_to(ROOT)}:{line}", found[1], found[2]


def curl_commands() -> dict[str, list[tuple[str, list[str]]]]:
    """Page -> its curl commands, in order: where, and their words."""
    pages: dict[str, list[tuple[str, list[str]]]] = {}
    for where, language, text in blocks():
        if language in ("", "sh", "bash", "shell"):
            for found in re.finditer(r"^curl ", text, re.M):
                words = _words(text[found.start() :].split("\n"))
                pages.setdefault(where.partition(":")[0], []).append((where, words))
    return pages


def _words(lines: list[str]) -> list[str]:
    """The first command; a backslash or an open quote continues it on the next line."""
    for end in range(1, len(lines) + 1):
        command = "\n".join(lines[:end])
        if command.endswith("\\"):
            continue
        try:
            return shlex.split(command.replace("\\\n", " "), comments=True)
        except ValueError:
            continue
    raise AssertionError(f"a command without an end: {lines[0]}")


CURLS = curl_commands()
PYTHONS = [(where, text) for where, language, text in blocks() if language == "python"]
OF_SERVERS = [pytest.param(text, id=where) for where, text in PYTHONS if "OpenAI(" in text]
OFFLINE = [pytest.param(text, id=where) for where, text in PYTHONS if "OpenAI(" not in text]


def lorasrv_commands() -> Iterator[tuple[str, list[str]]]:
    """(where, words after `lorasrv`) of every command; without what the shell reads itself."""
    for where, language, text in blocks():
        if language in ("", "sh", "bash", "shell"):
            for found in re.finditer(r"^(?:\$ )?(?:\.venv/bin/)?lorasrv ", text, re.M):
                words = _words(text[found.start() :].removeprefix("$ ").split("\n"))[1:]
                ends = [number for number, word in enumerate(words) if word in ("|", "&", "&&", ">", "--")]
                yield where, words[: min(ends, default=len(words))]


COMMANDS = list(lorasrv_commands())


@pytest.fixture(scope="module")
def served(model, adapter_dirs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:  # noqa: F811
    folder = tmp_path_factory.mktemp("snippets")
    shutil.copytree(adapter_dirs["three"], folder / "import" / FOLDER)
    adapters = {name: adapter_dirs[of] for name, of in ADAPTERS.items()}
    named = {"served_model_name": "smollm2-135m", "lora_import_root": str(folder / "import")}
    with server(model, folder / "store", adapters, **named) as served:
        # What a page's later commands build on.
        ready = {"deadline_ms": 60_000}
        assert served.http.post("/v1/adapters/blackbeard:warm", json=ready).status_code == 200
        yield served


def request_of(words: list[str], url: str) -> httpx2.Request:
    """A curl command as a request to `url`. Raises: AssertionError: an option that is not known here."""
    method, target, headers, body = None, "", {}, None
    rest = iter(words[1:])
    for word in rest:
        if word in ("-H", "--header"):
            name, _, value = next(rest).partition(":")
            headers[name] = value.strip()
        elif word in ("-d", "--data", "--data-binary"):
            body = next(rest)
        elif word in ("-X", "--request"):
            method = next(rest)
        elif word in ("-s", "-N", "-sN", "-i", "-si"):
            pass
        else:
            assert not word.startswith("-"), f"teach this test curl's {word}"
            target = word
    for place in PLACES:
        target = target.replace(place, url)
    assert target.startswith(url), f"{target} is not at {PLACES[0]}"
    if body is not None:
        assert any(name.lower() == "content-type" for name in headers), "without a JSON content type it is refused"
        assert not body.startswith("@"), "a file that the test does not have"
    return httpx2.Request(method or ("GET" if body is None else "POST"), target, headers=headers, content=body)


def test_there_are_some() -> None:
    assert sum(map(len, CURLS.values())) >= 10
    assert OF_SERVERS
    assert OFFLINE


@pytest.mark.parametrize("page", CURLS)
def test_curl(served, page: str) -> None:
    """All of a page, in order: later ones may need what earlier ones did."""
    for where, words in CURLS[page]:
        answer = served.http.send(request_of(words, served.url))
        assert 200 <= answer.status_code < 300, f"{where}: {answer.text[:500]}"


def test_an_upload_by_curl(served, adapter_dirs) -> None:  # noqa: F811
    texts = [text for _, text in BLOCK.findall((ROOT / "docs/adapters.md").read_text("utf-8"))]
    [script] = [text for text in texts if "sha256sum" in text]
    lines = script.replace(PLACES[0], served.url).splitlines()
    assert lines[0] == "cd examples/persona_bots/adapters/blackbeard"
    command = ["bash", "-ec", "\n".join([f"cd {adapter_dirs['two']}", *lines[1:]])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout[done.stdout.rindex('{"object":"adapter"') :])["id"] == "blackbeard", done.stdout


def unknown_words(words: list[str]) -> list[str]:
    """Options that the command does not have, or the command itself."""
    command: Any = get_command(app)
    for word in words:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    if getattr(command, "commands", None) and not words[0].startswith("-"):
        return words[:2]
    known = {spelled for option in parameters(command) for spelled in (*option.opts, *option.secondary_opts)}
    given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [word for word in given if word not in known | {"--help", "--install-completion"}]


def test_commands_and_options_are_there() -> None:
    assert len(COMMANDS) >= 30
    assert {where: bad for where, words in COMMANDS if (bad := unknown_words(words))} == {}
    assert unknown_words(["serve", "--no-such-flag", "1"]) == ["--no-such-flag"]
    assert unknown_words(["sevre", "--port", "1"]) == ["sevre", "--port"]


def script_commands(page: Path) -> Iterator[list[str]]:
    """Words of every command of a page that runs a script of the benchmarks, up to the end of its line or quotation."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    text = re.sub(r"(?<!`)`[^`]+`(?!`)", lambda quoted: quoted[0].replace("\n", " "), text)
    for found in re.finditer(r"\b((?:bench|gpu)_\w+\.py|soak\.py|tune_triton\.py)( [^`\n]*)?", text):
        yield shlex.split("".join(part or "" for part in found.groups()), comments=True)


def unknown_options(words: list[str]) -> list[str]:
    """Options that the script does not declare, nor hands on to `serve`; the script itself if there is none."""
    script = ROOT / "tests" / "benchmarks" / words[0]
    if not script.is_file():
        return words[:1]
    source = script.read_text("utf-8")
    given = [word.partition("=")[0] for word in words if re.match(r"--[a-z-]+(=|$)", word)]
    own = [word for word in given if not re.search(rf'"{word}"|\b{word[2:].replace("-", "_")}=\(', source)]
    return own if "parse_known_args" not in source else unknown_words(["serve", *own])


def test_options_of_scripts_are_there() -> None:
    commands = [(str(page.relative_to(ROOT)), words) for page in PAGES for words in script_commands(page)]
    assert len(commands) >= 60
    gone = {"bench_isolation.py"}  # the page says up to which commit it was there
    assert [(name, bad) for name, words in commands if (bad := unknown_options(words)) and {*bad} != gone] == []
    assert unknown_options(["bench_step.py", "--work", "1/0", "--no-such-flag"]) == ["--no-such-flag"]
    assert unknown_options(["bench_snapshots.py", "--quantization", "int4", "--no-such-flag"]) == ["--no-such-flag"]
    assert unknown_options(["bench_nothing.py"]) == ["bench_nothing.py"]


@pytest.mark.parametrize("code", OF_SERVERS)
def test_python_of_a_server(served, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path, code: str) -> None:
    assert PLACES[0] in code
    monkeypatch.chdir(tmp_path)
    run(code.replace(PLACES[0], served.url))
    assert capsys.readouterr().out.strip()


@pytest.mark.long
@pytest.mark.parametrize("code", OFFLINE)
def test_python_offline(capsys: pytest.CaptureFixture[str], monkeypatch, code: str) -> None:
    """With the built-in base, from the repository's root, as the page says."""
    monkeypatch.chdir(ROOT)
    run(code)
    assert capsys.readouterr().out.strip()


def run(code: str) -> None:
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})


def test_a_broken_snippet_is_noticed(served) -> None:
    words = _words([f"curl {PLACES[0]}/v1/completions -H 'content-type: application/json' \\", "  -d '{", "}'", "more"])
    assert words[-1] == "{\n}"
    assert served.http.send(request_of(words, served.url)).status_code == 400
    for bad, why in ((["-d", "{}"], "content type"), (["--upload", "x"], "--upload")):
        with pytest.raises(AssertionError, match=why):
            request_of(["curl", PLACES[0] + "/v1/pool", *bad], served.url)
