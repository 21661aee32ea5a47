"""The built-in base and the three trained personas, offline and behind a real server process."""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PERSONA_BOTS = Path(__file__).parents[2] / "examples" / "persona_bots"
READY_SECONDS = 120.0


@pytest.fixture(scope="session")
def personas() -> dict[str, Path]:
    """Id -> PEFT directory of each committed persona."""
    listed = tomllib.loads((PERSONA_BOTS / "personas.toml").read_text("utf-8"))["persona"]
    return {p["id"]: PERSONA_BOTS / p["adapter"] for p in listed}


@pytest.fixture(scope="session")
def heldout() -> list[str]:
    """Questions that no persona was trained on."""
    lines = (PERSONA_BOTS / "data" / "heldout.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


@dataclass
class ServerProcess:
    """`lorasrv serve` as a user starts it."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=30)


def run_cli(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """The `lorasrv` command in a process of its own, output as lines without colours."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "api.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
    )


@pytest.fixture(scope="session")
def cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    return run_cli


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """start_server(store, *flags) -> a server that is ready; all are stopped at the end."""
    started: list[ServerProcess] = []

    def start(store: Path, *flags: str) -> ServerProcess:
        command = [sys.executable, "-P", "-m", "api.cli.main", "serve", "--port", "0", "--store", str(store), *flags]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "NO_COLOR": "1"}
        )
        server = ServerProcess(process, "", [])
        server.url = _wait_until_ready(server)
        started.append(server)
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()


def _wait_until_ready(server: ServerProcess) -> str:
    """Read the process's lines until one says where it listens; go on reading in the background."""
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert server.process.stdout is not None
        for line in server.process.stdout:
            server.lines.append(line)
            if match := re.search(r"http://127\.0\.0\.1:\d+", line):
                found.put(match.group())
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    url = found.get(timeout=READY_SECONDS)
    assert url is not None, "the server ended before it was ready:\n" + "".join(server.lines)
    return url
