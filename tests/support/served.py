"""A real `lorasrv serve` process, as tests and scripts of clients need one: started, filled with adapters, asked."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from process_watch import held_by

ROOT = Path(__file__).parents[2]
READY_SECONDS = 180.0
CALM_SECONDS = 30.0
LORASRV = (sys.executable, "-P", "-c", "from api.cli.main import main; main()")


class Served:
    """A server that answers: `url`, a client `http` for it, and what it has in its pool."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
        self.url = url
        self.last_log = ""
        # One connection is kept for the next request: more would stay open until the server ends them.
        limits = httpx2.Limits(max_keepalive_connections=1)
        self.http = httpx2.Client(base_url=url, trust_env=False, timeout=180, limits=limits)
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> int:
        """Waits for its end; the exit code."""
        return self._process.wait(60)

    @property
    def log(self) -> str:
        """What it has printed."""
        return self.last_log or self._log.read_text("utf-8", errors="replace")

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def held(self) -> dict[str, Any]:
        """What requests have in the pool now: pages, and adapters that they need."""
        pool = self.http.get("/v1/pool").json()
        pinned = [adapter["ids"] for adapter in pool["adapters"] if adapter["requests"]]
        return {"pages": pool["pages_kv"], "pinned": pinned, "requests": pool["requests"]}

    @property
    def peak_bytes(self) -> int:
        """Most memory that the process has had so far."""
        return held_by(self.pid).peak_bytes

    @property
    def open_files(self) -> int:
        """Its open files, connections among them."""
        return held_by(self.pid).fds

    def figure(self, name: str) -> float:
        """Of /metrics, by its whole name with labels; 0 if it is not there."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def finished(self, reason: str) -> float:
        """Requests that have ended so."""
        return self.figure(f'lorasrv_requests_finished_total{{reason="{reason}"}}')

    def until(self, condition: Callable[[], object], within_s: float = CALM_SECONDS) -> None:
        """Raises: AssertionError: it does not come true."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"it did not happen; held: {self.held()}\n{self.log}"
            time.sleep(0.02)

    def calm_down(self) -> None:
        """Waits until no request has anything in the pool. Raises: AssertionError: that does not come."""
        deadline = time.monotonic() + CALM_SECONDS
        while any(self.held().values()):
            assert time.monotonic() < deadline, f"still held: {self.held()}\n{self.log}"
            time.sleep(0.02)


def lorasrv(*arguments: object, timeout: float = 400.0) -> "subprocess.CompletedProcess[str]":
    """Run another command of `lorasrv` to its end."""
    command, environment = [*LORASRV, *map(str, arguments)], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)


@contextmanager
def serve(
    *arguments: object,
    adapters: Mapping[str, Path] | None = None,
    store: Path | None = None,
    ends: int | None = None,
    root: Path = ROOT,
    program: Sequence[str] = LORASRV,
    command: str = "serve",
    ready_s: float = READY_SECONDS,
) -> Iterator[Served]:
    """Run `lorasrv serve`, or another command that serves, with these arguments, a store of its own or this one, and
    these adapters (id -> PEFT folder).

    Args:
        ends: the exit code of a server that ends by itself, which is an error otherwise.
        root: the checkout whose server is started.
        program: the words of the command before `serve`.
        ready_s: longest time of a start.

    Raises:
        AssertionError: it does not start, or does not end as it should.
    """
    modules = [f"{name}={folder}" for name, folder in (adapters or {}).items()]
    with tempfile.TemporaryDirectory() as folder:
        log, where = Path(folder) / "log", str(store or f"{folder}/store")
        words = [*program, command, "--port", "0", "--store", where, *map(str, arguments)]
        words += ["--lora-modules", *modules] if modules else []
        environment = {**os.environ, "PYTHONPATH": str(root), "NO_COLOR": "1", "XDG_CONFIG_HOME": folder}
        with log.open("wb") as lines:
            # A Ctrl-C is for the starting process, which sends the signal.
            process = subprocess.Popen(
                words, stdout=lines, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        served = None
        try:
            served = Served(process, url_of(process, log, ready_s), log)
            yield served
            assert ends is not None or served.lives, f"the server ended:\n{served.log}"
        finally:
            if served is not None:
                served.http.close()
            process.send_signal(signal.SIGTERM)
            code, text = process.wait(30), log.read_text("utf-8", errors="replace")
            if served is not None:
                served.last_log = text
        assert code == (ends or 0), f"exit code {code}:\n{text}"


def url_of(process: "subprocess.Popen[bytes]", log: Path, ready_s: float = READY_SECONDS) -> str:
    """Where a server that was started answers, once it does. Raises: AssertionError: it ends, or never does."""
    deadline = time.monotonic() + ready_s
    while True:
        text = log.read_text("utf-8", errors="replace")
        if found := re.search(r"http://127\.0\.0\.1:\d+", text):
            return found.group()
        assert process.poll() is None, f"the server did not start:\n{text}"
        assert time.monotonic() < deadline, f"the server is not ready:\n{text}"
        time.sleep(0.05)
