"""A real `lorasrv serve` process for tests and client scripts: start it, upload adapters, send requests."""

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
    """A running server: its `url`, a client `http` for it, and the contents of its pool."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
        self.url = url
        self.last_log = ""
        # Keep one connection for the next request; more would stay open until the server closes them.
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
        """Wait for its end; return the exit code."""
        return self._process.wait(60)

    @property
    def log(self) -> str:
        """Return its output so far."""
        return self.last_log or self._log.read_text("utf-8", errors="replace")

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def held(self) -> dict[str, Any]:
        """Return what requests hold in the pool now: pages, and adapters that they need."""
        pool = self.http.get("/v1/pool").json()
        pinned = [adapter["ids"] for adapter in pool["adapters"] if adapter["requests"]]
        return {"pages": pool["pages_kv"], "pinned": pinned, "requests": pool["requests"]}

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of the process so far."""
        return held_by(self.pid).peak_bytes

    @property
    def open_files(self) -> int:
        """Return the number of its open files, including connections."""
        return held_by(self.pid).fds

    def figure(self, name: str) -> float:
        """Return a figure of /metrics by its full name with labels; 0 if it is absent."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def finished(self, reason: str) -> float:
        """Return the number of requests that ended for this reason."""
        return self.figure(f'lorasrv_requests_finished_total{{reason="{reason}"}}')

    def until(self, condition: Callable[[], object], within_s: float = CALM_SECONDS) -> None:
        """Wait until a condition is true.

        Raises:
            AssertionError: it is not true in time.
        """
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"it did not happen; held: {self.held()}\n{self.log}"
            time.sleep(0.02)

    def calm_down(self) -> None:
        """Wait until no request holds anything in the pool.

        Raises:
            AssertionError: this does not happen in time.
        """
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
    """Run `lorasrv serve`, or another command that serves, with these arguments, this store or a new one, and these
    adapters (id -> PEFT folder).

    Args:
        ends: the expected exit code of a server that ends by itself; if not given, that is an error.
        root: the checkout whose server is started.
        program: the words of the command before `serve`.
        ready_s: longest time of a start.

    Raises:
        AssertionError: it does not start, or does not end as expected.
    """
    modules = [f"{name}={folder}" for name, folder in (adapters or {}).items()]
    with tempfile.TemporaryDirectory() as folder:
        log, where = Path(folder) / "log", str(store or f"{folder}/store")
        words = [*program, command, "--port", "0", "--store", where, *map(str, arguments)]
        words += ["--lora-modules", *modules] if modules else []
        environment = {**os.environ, "PYTHONPATH": str(root), "NO_COLOR": "1", "XDG_CONFIG_HOME": folder}
        with log.open("wb") as lines:
            # A separate session: Ctrl-C reaches only the starting process, which sends the signal.
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
    """Return the address of a started server, once it answers.

    Raises:
        AssertionError: it ends, or does not answer in time.
    """
    deadline = time.monotonic() + ready_s
    while True:
        text = log.read_text("utf-8", errors="replace")
        if found := re.search(r"http://127\.0\.0\.1:\d+", text):
            return found.group()
        assert process.poll() is None, f"the server did not start:\n{text}"
        assert time.monotonic() < deadline, f"the server is not ready:\n{text}"
        time.sleep(0.05)
