"""`lorasrv bench` that starts its own server: the real engine on a tiny model, adapters made for it, a clean end."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from adapter_store.store import AdapterStore
from api.cli.bench import server as bench_server

_SPEC = importlib.util.spec_from_file_location("engine_fixtures", Path(__file__).parents[3] / "lorasrv" / "conftest.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_FIXTURES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_FIXTURES)
# The engine's tests make tiny checkpoints.
corpus, tiny_tokenizer_file = _FIXTURES.corpus, _FIXTURES.tiny_tokenizer_file
tiny_hf_checkpoints = _FIXTURES.tiny_hf_checkpoints


@pytest.fixture(scope="module")
def flags(tiny_hf_checkpoints) -> tuple[str, ...]:
    """Of `serve`, for a model of 100,000 weights."""
    return ("--model", str(tiny_hf_checkpoints["llama"]()), "--pool-bytes", "16MiB", "--kernels", "torch")


@pytest.fixture
def run() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts `lorasrv bench`; what still runs at the end of the test is interrupted, so that its server ends too."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", "from api.cli.main import main; main()", "bench", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


LOAD = ("--requests", 6, "--prompt-tokens", 40, "--output-tokens", "uniform:3:6", "--rank", 4)


@pytest.mark.long
def test_a_sweep_on_a_server_of_its_own(run, flags: tuple[str, ...]) -> None:
    options = ("--adapters", "0,3", "--concurrency", 3, "--law", "zipf:1.1", "--slo", "ttft=60000", "--json")
    out, err = (process := run(*LOAD, *options, "--", *flags)).communicate(timeout=200)
    assert process.returncode == 0, err
    assert "making adapters done" in err
    assert "server ready at http://127.0.0.1:" in err
    assert "/v1/completions" not in err, "no line a request"
    base, adapters = (json.loads(line) for line in out.splitlines())
    for done in (base, adapters):
        figures = done["figures"]
        assert (figures["requests"], figures["failed"], figures["good_share"]) == (6, 0, 1.0), figures["first_error"]
        assert 3 <= figures["output_tokens_mean"] <= 6
        assert figures["prompt_tokens_mean"] == pytest.approx(40, rel=0.15)
        assert done["settings"]["serve_flags"] == list(flags)
        assert done["settings"]["url"] is None
    assert base["figures"]["adapters"] == 0
    assert 1 <= adapters["figures"]["adapters"] <= 3


@pytest.mark.exhaustive
def test_the_machine_is_measured(run, flags: tuple[str, ...]) -> None:
    out, err = (process := run(*LOAD, "--json", "--measure-machine", "--", *flags)).communicate(timeout=200)
    assert process.returncode == 0, err
    done = json.loads(out)
    assert 0 < done["figures"]["mbu"] < 1
    assert 0 < done["figures"]["mfu"] < 1
    assert done["machine"]["measured"]["read_bytes_per_s"] > 1e8


@pytest.mark.exhaustive
def test_a_trace_gets_the_adapters_that_it_names(run, flags: tuple[str, ...], tmp_path: Path) -> None:
    lines = [{"arrival_s": n / 20, "prompt_tokens": 30, "output_tokens": 3, "adapter": "mia"} for n in range(2)]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**lines[0], "adapter": None}]))
    out, err = (process := run("--trace", file, "--rank", 4, "--json", "--", *flags)).communicate(timeout=200)
    assert process.returncode == 0, err
    figures = json.loads(out)["figures"]
    assert (figures["requests"], figures["failed"], figures["adapters"]) == (3, 0, 1), figures["first_error"]


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_an_interrupted_bench_leaves_no_server(run, flags: tuple[str, ...], how: signal.Signals) -> None:
    process = run("--adapters", 1, "--rate", "0.001", "--requests", 9, "--output-tokens", 4, "--", *flags)
    assert process.stderr is not None
    url, begun = "", False
    for line in process.stderr:
        if line.startswith("server ready at "):
            url = line.split()[3]
        # The first request is sent at once, the second would be in a quarter of an hour.
        begun = begun or line.startswith("0.001/s, 1 adapter ...")
        if begun:
            break
    assert url
    assert begun, "it ended before its load began"
    _until_answered(url)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "0.001/s, 1 adapter (interrupted)\t1 of 1\t" in out
    assert "Traceback" not in err
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url + "/health")


def _until_answered(url: str) -> None:
    """Two requests to measure tokens, two to warm up, one of the load."""
    deadline = time.monotonic() + 60
    while 'requests_finished_total{reason="length"} 5.0' not in httpx2.get(url + "/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)


@pytest.mark.long
def test_a_server_that_does_not_start(run) -> None:
    out, err = (process := run(*LOAD, "--adapters", 0, "--", "--policy", "none")).communicate(timeout=100)
    assert (process.returncode, out) == (1, "")
    assert "server: lorasrv: --policy 'none' is unknown" in err
    assert err.splitlines()[-1] == "lorasrv: the server did not start; its last output is above"


def test_adapters_are_seeded(flags: tuple[str, ...], tmp_path: Path) -> None:
    def digests(folder: Path, seed: int) -> list[str]:
        bench_server._fill(folder, flags, bench_server.adapter_names(2), 4, seed)
        with AdapterStore(folder, _shapes(flags[1])) as store:
            return [record.key for record in store.list_adapters()]

    one, same, other = (digests(tmp_path / str(n), seed) for n, seed in enumerate((5, 5, 9)))
    assert one == same
    assert len({*one, *other}) == 4


def _shapes(model: str):
    from contextlib import closing

    from lorasrv.models.loader import open_checkpoint
    from lorasrv.models.lora_sites import base_shapes

    with closing(open_checkpoint(model)) as checkpoint:
        return base_shapes(checkpoint.spec, checkpoint.name)


@pytest.mark.parametrize(
    ("flags", "variable", "model"),
    [
        (("--model", "x", "--policy", "sjf"), "y", "x"),
        (("--policy", "sjf", "--model=x"), "", "x"),
        ((), "y", "y"),
        ((), "", "smollm2-135m"),
    ],
)
def test_whose_adapters(flags: tuple[str, ...], variable: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASRV_MODEL", variable)
    assert bench_server._value(flags, "model", "smollm2-135m") == model
