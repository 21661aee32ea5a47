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
from pathlib import Path

import pytest

PERSONA_BOTS = Path(__file__).parents[2] / "examples" / "persona_bots"
LORASRV = Path(sys.executable).parent / "lorasrv"
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


class ServerProcess:
    """`lorasrv serve` as a user starts it; its lines are read in the background."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self._found: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [str(LORASRV), "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "NO_COLOR": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        url = self._found.get(timeout=READY_SECONDS)
        assert url is not None, "the server ended before it was ready:\n" + "".join(self.lines)
        self.url = url

    def stop(self) -> int:
        """SIGTERM, and its exit code; again is harmless."""
        if self._process.poll() is None:
            self._process.terminate()
        code = self._process.wait(timeout=30)
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if match := re.search(r"http://127\.0\.0\.1:\d+", line):
                self._found.put(match.group())
        self._found.put(None)


def run_cli(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """The `lorasrv` command in a process of its own, output as lines without colours."""
    return subprocess.run(
        [str(LORASRV), *arguments],
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
        started.append(ServerProcess("--port", "0", "--store", str(store), *flags))
        return started[-1]

    yield start
    for server in started:
        server.stop()
