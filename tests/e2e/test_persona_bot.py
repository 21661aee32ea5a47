"""The example's backend as its README starts it: a real server, the command, and users who talk to all at once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from served import serve

BOT = Path(__file__).parents[2] / "examples" / "persona_bots" / "bot.py"
QUESTION = "What should I eat for breakfast?"


@contextmanager
def backend(url: str, memory: Path) -> Iterator[tuple[httpx2.Client, list[str]]]:
    """The backend's client, and what it printed about the personas."""
    command = [sys.executable, str(BOT), "--url", url, "--port", "0", "--memory", str(memory)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not (lines and lines[-1].startswith("talk at ")):
                line = process.stdout.readline()
                assert line, lines
                lines.append(line.strip())
            url = lines.pop().removeprefix("talk at ")
            with httpx2.Client(base_url=url, timeout=120, trust_env=False) as client:
                yield client, lines
        finally:
            process.terminate()


def say(client: httpx2.Client, character: str) -> tuple[str, int]:
    """An answer, and in how many pieces it came."""
    body = {"user": "Ann", "character": character, "text": QUESTION}
    with client.stream("POST", "/talk", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        pieces = list(answer.iter_text())
    return "".join(pieces), len(pieces)


@pytest.mark.slow
def test_all_characters_at_once_and_after_a_restart(tmp_path: Path) -> None:
    names = ["blackbeard", "basho", "wrench", "marooned"]
    with serve("--pool-bytes", "512MiB") as server:
        with backend(server.url, tmp_path / "memory.db") as (client, told):
            assert told == [f"{name}@1 uploaded" for name in names[:3]]
            assert BOT.parent.joinpath("page.html").read_text("utf-8") == client.get("/").text
            shown = client.get("/characters?user=Ann").json()
            assert [one["id"] for one in shown] == names
            assert all("Ann" in one["greeting"] for one in shown)
            with ThreadPoolExecutor(len(names)) as threads:
                said = dict(zip(names, threads.map(lambda name: say(client, name), names), strict=True))
            assert len({text for text, _ in said.values()}) == len(names), said
            assert any(count > 1 for _, count in said.values())
        with backend(server.url, tmp_path / "memory.db") as (client, told):
            assert told == [f"{name}@1 is there" for name in names[:3]]
            kept = client.get("/memory?user=Ann&character=wrench").json()
            assert [message["content"] for message in kept] == [QUESTION, said["wrench"][0]]
            say(client, "wrench")
            assert len(client.get("/memory?user=Ann&character=wrench").json()) == 4
