"""`lorasrv serve` as a process: ready line, signals, a taken address, a taken store. The engine is the fake one."""

import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_serve
import httpx2
import pytest

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `lorasrv serve`; whatever still runs at the end of the test is killed."""
    running: list[subprocess.Popen[str]] = []

    def run(*options: object) -> "subprocess.Popen[str]":
        running.append(fake_serve.serve("--store", tmp_path / "store", *options))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def ready(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return json.loads(line)


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_ready_line_and_a_clean_end(start: Start, how: signal.Signals) -> None:
    process = start("--json")
    told = ready(process)
    assert (told["event"], told["model"], told["quantization"], told["pages"]) == ("ready", "tiny-base", "int8", 10)
    assert httpx2.get(told["url"] + "/ready").status_code == 200
    process.send_signal(how)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines()[-5:] == [
        "loading the model ...",
        "loading the model: 25 %",
        "loading the model: 50 %",
        "loading the model: 75 %",
        "loading the model done",
    ]


@pytest.mark.long
def test_plain_ready_line(start: Start) -> None:
    process = start("--served-model-name", "house")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready: http://127.0.0.1:")
    assert not line.startswith("ready: http://127.0.0.1:8000 "), "--port 0 is a free port, not the default"
    assert "model house (int8)" in line
    assert process.stdout.readline() == f"console: {line.split()[1]}/console\n"


def test_a_stream_does_not_keep_the_server(start: Start) -> None:
    """Started as vLLM would be."""
    process = start("hanging", "--enable-lora", "--max-loras", 4, "--max-lora-rank", 8, "--json", "--drain-s", 0.5)
    url = ready(process)["url"]
    body = {"model": "tiny-base", "prompt": "x", "stream": True}
    with httpx2.stream("POST", url + "/v1/completions", json=body) as response:
        next(response.iter_lines())
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert err.splitlines()[:2] == [
        "--enable-lora is not needed: adapters are always served",
        "--max-loras is not needed: a batch may hold any number of adapters",
    ]


@pytest.mark.long
def test_told_to_stop_while_loading(start: Start) -> None:
    process = start("--model", "slow")
    assert process.stderr is not None
    while "75 %" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0


@pytest.fixture
def _own_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` in this process leaves pytest's signal handlers alone."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.mark.usefixtures("_own_signals")
def test_port_in_use(cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli("serve", "--port", port, "--store", tmp_path)
    assert (done.code, done.out) == (1, "")
    assert (
        done.err == f"lorasrv: cannot listen on 127.0.0.1:{port}: Address already in use; --port 0 takes a free port\n"
    )


@pytest.mark.usefixtures("_own_signals")
@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_an_address_of_another_machine(cli, tmp_path: Path, host: str) -> None:
    done = cli("serve", "--host", host, "--insecure", "--store", tmp_path)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.startswith(f"lorasrv: cannot listen on {host}:8000: ")


@pytest.mark.usefixtures("_own_signals")
def test_a_model_that_is_not_there_is_not_blamed_on_the_port(cli, tmp_path: Path) -> None:
    done = cli("serve", "--port", 0, "--model", tmp_path / "nothing", "--store", tmp_path / "store")
    assert (done.code, done.out) == (1, "")
    told = done.err.splitlines()[-1]
    assert told.startswith("lorasrv: model ")
    assert "nothing" in told
    assert "listen" not in told
    assert "--port" not in told


@pytest.mark.long
def test_a_store_in_use(start: Start) -> None:
    ready(start("--json"))
    second = start()
    out, err = second.communicate(timeout=20)
    assert (second.returncode, out) == (1, "")
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("lorasrv: ")
    assert "store" in err.splitlines()[-1]


@pytest.mark.long
def test_lora_modules_are_served(start: Start, make_adapter) -> None:
    mia, tom = make_adapter("mia"), make_adapter("tom", seed=1)
    spelled = json.dumps({"name": "tom", "path": str(tom), "base_model_name": "tiny-base"})
    process = start("--json", "--lora-modules", f"mia={mia}", spelled)
    url = ready(process)["url"]
    assert [card["id"] for card in httpx2.get(url + "/v1/models").json()["data"]] == ["tiny-base", "mia", "tom"]
    answer = httpx2.post(url + "/v1/completions", json={"model": "tom", "prompt": "x"})
    assert answer.json()["choices"][0]["text"].startswith("I am ")
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert "registering adapters done" in err.splitlines()


@pytest.mark.long
def test_a_refused_lora_module_ends_the_start(start: Start, make_adapter) -> None:
    process = start("--lora-modules", f"mia={make_adapter()}", f"tom={make_adapter('tom', r=0)}")
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (1, "")
    assert "lorasrv: --lora-modules: refused: tom" in err.splitlines()
    assert err.splitlines()[-1].startswith("  tom: r")
