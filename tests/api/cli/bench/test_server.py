"""`lorasrv bench` that starts its own server: the real engine on a tiny model, adapters made for it, a clean end."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import cli_process
import httpx2
import pytest

from adapter_store.store import AdapterStore
from api.cli.bench import server as bench_server
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def flags(tiny_hf_checkpoints) -> tuple[str, ...]:
    """Of `serve`, for a model of 100,000 weights."""
    return ("--model", str(tiny_hf_checkpoints["llama"]()), "--pool-bytes", "16MiB", "--kernels", "torch")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts `lorasrv bench`; what still runs at the end of the test is interrupted, so that its server ends too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:

        def run(*arguments: object) -> "subprocess.Popen[str]":
            process = stack.enter_context(cli_process.started("bench", *arguments))
            stack.callback(interrupt, process)
            return process

        yield run


def interrupt(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def results(process: "subprocess.Popen[str]") -> tuple[list[dict[str, Any]], str]:
    """Its results, and what else it has printed, when it has ended."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    done = [json.loads(line) for line in out.splitlines()]
    assert {one["figures"]["failed"] for one in done} == {0}, done
    return done, err


LOAD = ("--requests", 6, "--prompt-tokens", 40, "--output-tokens", "uniform:3:6", "--rank", 4)


@pytest.mark.long
def test_a_sweep_on_a_server_of_its_own(start: Start, flags: tuple[str, ...]) -> None:
    options = ("--adapters", "0,3", "--concurrency", 3, "--law", "zipf:1.1", "--slo", "ttft=60000", "--json")
    (base, adapters), err = results(start(*LOAD, *options, "--", *flags))
    assert "making adapters done" in err
    assert "server ready at http://127.0.0.1:" in err
    assert "/v1/completions" not in err, "no line a request"
    for done in (base, adapters):
        figures = done["figures"]
        assert (figures["requests"], figures["good_share"]) == (6, 1.0)
        assert 3 <= figures["output_tokens_mean"] <= 6
        assert figures["prompt_tokens_mean"] == pytest.approx(40, rel=0.15)
        assert (done["settings"]["serve_flags"], done["settings"]["url"]) == (list(flags), None)
    assert base["figures"]["adapters"] == 0
    assert 1 <= adapters["figures"]["adapters"] <= 3


@pytest.mark.exhaustive
def test_the_machine_is_measured(start: Start, flags: tuple[str, ...]) -> None:
    [done], _ = results(start(*LOAD, "--json", "--measure-machine", "--", *flags))
    assert 0 < done["figures"]["mbu"] < 1
    assert 0 < done["figures"]["mfu"] < 1
    assert done["machine"]["measured"]["read_bytes_per_s"] > 1e8


@pytest.mark.exhaustive
def test_a_trace_gets_the_adapters_that_it_names(start: Start, flags: tuple[str, ...], tmp_path: Path) -> None:
    lines = [{"arrival_s": n / 20, "prompt_tokens": 30, "output_tokens": 3, "adapter": "mia"} for n in range(2)]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**lines[0], "adapter": None}]))
    [done], _ = results(start("--trace", file, "--rank", 4, "--json", "--", *flags))
    assert (done["figures"]["requests"], done["figures"]["adapters"]) == (3, 1)


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_an_interrupted_bench_leaves_no_server(start: Start, flags: tuple[str, ...], how: signal.Signals) -> None:
    process = start("--adapters", 1, "--rate", "0.001", "--requests", 4, "--output-tokens", 4, "--", *flags)
    url = next(line.split()[3] for line in process.stderr if line.startswith("server ready at "))
    # The first request is sent at once, the second would be in a quarter of an hour.
    assert any(line.startswith("0.001/s, 1 adapter ...") for line in process.stderr), "it ended before its load began"
    assert any(line.startswith("0.001/s, 1 adapter: 25 %") for line in process.stderr), "the first was not answered"
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (130, False), err
    assert "0.001/s, 1 adapter (interrupted)\t1 of 1\t" in out
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url + "/health")


@pytest.mark.long
def test_a_server_that_does_not_start(start: Start) -> None:
    process = start(*LOAD, "--adapters", 0, "--", "--policy", "none")
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (1, "")
    assert "server: lorasrv: --policy 'none' is unknown" in err
    assert err.splitlines()[-1] == "lorasrv: the server did not start; its last output is above"


def test_adapters_are_seeded(flags: tuple[str, ...], tmp_path: Path) -> None:
    with closing(open_checkpoint(flags[1])) as checkpoint:
        shapes = base_shapes(checkpoint.spec, checkpoint.name)

    def digests(folder: Path, seed: int) -> list[str]:
        bench_server.fill(folder, flags, bench_server.adapter_names(2), 4, seed)
        with AdapterStore(folder, shapes) as store:
            return [record.key for record in store.list_adapters()]

    one, same, other = (digests(tmp_path / str(n), seed) for n, seed in enumerate((5, 5, 9)))
    assert one == same
    assert len({*one, *other}) == 4


@pytest.mark.parametrize(
    ("flags", "variable", "model"),
    [
        (("--model", "x", "--policy", "sjf"), "y", "x"),
        (("--policy", "sjf", "--model=x"), "", "x"),
        ((), "y", "y"),
        ((), "", "smollm2-135m"),
    ],
)
def test_the_model_of_the_adapters(
    flags: tuple[str, ...], variable: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORASRV_MODEL", variable)
    assert bench_server._value(flags, "model", "smollm2-135m") == model
