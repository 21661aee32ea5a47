"""A disk whose reads never return, as a network disk's may: weights are replaced by pipes that nobody writes to."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from answers import error_of
from safetensors.numpy import load_file, save_file
from served import Served, serve
from server import eventually, server

from lorasrv.engine.async_input_processor import NUM_READERS
from lorasrv.worker.disk_threads import MAX_REPLACED

MOST_HUNG = NUM_READERS + MAX_REPLACED
HUNG = [f"hung-{number}" for number in range(MOST_HUNG)]
WEIGHTS = "adapter_model.safetensors"


def block(store: Path, adapter: Path) -> Path:
    """Replace the stored weights of an adapter by a pipe, and return its path."""
    pipe = store / "blobs" / "sha256" / hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest()
    pipe.unlink()
    os.mkfifo(pipe, 0o600)
    return pipe


def let_return(pipe: Path) -> None:
    """Let whoever reads the pipe see its end."""
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


@pytest.fixture(scope="module")
def adapters(adapter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return PEFT folders of many adapters, all different."""
    folders = {}
    for number, name in enumerate([*HUNG, "amy", "zoe"]):
        folder = folders[name] = tmp_path_factory.mktemp(name)
        (folder / "adapter_config.json").write_bytes((adapter_dirs["one"] / "adapter_config.json").read_bytes())
        tensors = {key: value * (1 + number) for key, value in load_file(adapter_dirs["one"] / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS)
    return folders


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hung") / "store"


@pytest.fixture(scope="module")
def process(flags, adapters: dict[str, Path], store: Path) -> Iterator[Served]:
    with serve(*flags, "--load-timeout-s", "3", adapters=adapters, store=store, ends=0) as served:
        yield served


def ask(served: Any, model: str) -> httpx2.Response:
    return served.post("/v1/completions", model=model, prompt="a", max_tokens=1)


def refusal(answer: httpx2.Response) -> str:
    """Return why the adapter was not loaded."""
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (503, "adapter_load_failed")
    assert answer.headers["x-should-retry"] == "false", "each try would cost a thread"
    return str(error["message"])


def test_loads_that_hang_fail_and_cost_others_nothing_until_no_thread_is_left(
    process: Served, adapters: dict[str, Path], store: Path
) -> None:
    """The server then ends as always, with the reads left behind."""
    pipes = {name: block(store, adapters[name]) for name in HUNG}
    with ThreadPoolExecutor(MOST_HUNG) as clients:
        first = [clients.submit(ask, process, HUNG[0]) for _ in range(3)]
        assert ask(process, "amy").status_code == 200
        assert all("--load-timeout-s" in refusal(one.result()) for one in first)
        assert "an earlier read" in refusal(ask(process, HUNG[0]))
        others = [clients.submit(ask, process, name) for name in HUNG[1:]]
        assert all(refusal(one.result()) for one in others)
    assert (
        process.figure("lorasrv_disk_reads_hung") == process.figure("lorasrv_disk_reads_timed_out_total") == MOST_HUNG
    )
    assert "none is read until it does" in refusal(ask(process, "zoe"))
    assert [ask(process, name).status_code for name in ("amy", "tiny")] == [200, 200]
    let_return(pipes[HUNG[0]])
    process.until(lambda: process.figure("lorasrv_disk_reads_hung") == MOST_HUNG - 1)
    assert ask(process, "zoe").status_code == 200


def test_weights_that_hang_behind_a_header_that_is_known(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    with server(model, tmp_path, {"mia": adapters["amy"]}, served_model_name="tiny", load_timeout_s=0.2) as served:
        served.engine.input_processor.processor.layout(served.store.resolve("mia").key)
        pipe = block(tmp_path, adapters["amy"])
        assert "--load-timeout-s" in refusal(ask(served, "mia"))
        shown = served.http.get("/metrics").text
        assert 'lorasrv_adapter_load_failures_total{reason="adapter_load_timeout"} 1.0' in shown
        let_return(pipe)
        eventually(lambda: served.engine.disk_reads().num_hung == 0)
