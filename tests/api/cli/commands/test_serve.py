"""`lorasrv serve`: refused options, and as a process: ready line, signals, a taken port or store, --lora-modules.

The engine of the processes is the fake one.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_serve
import httpx2
import pytest
from answers import failed

from api import early_stop
from tests.support.served import ROOT, serve

Start = Callable[..., "subprocess.Popen[str]"]


WRONG_OPTIONS = {
    "": (
        "--pool-bytes lots", "--port 70000", "--dtype float8", "--max-num-seqs 0", "--swap-bytes -1",
        "--adapter-pool-fraction 0", "--queue-timeout-s nan",
    ),
    ": ": ("--target-itl-ms none", "--max-queued 0", "--resident-bytes-per-key much"),
    ": must not be negative": ("--resident-bytes-per-adapter -1",),
    " must be positive": ("--max-wait-steps 0", "--queue-timeout-s -1"),
    " must be positive, not 0": ("--host-cache-bytes 0", "--target-itl-ms 0"),
    " must be above 0, not 0": ("--max-running-per-adapter 0",),
    " must be above 0": (
        "--max-queued-per-adapter -2", "--tokens-per-s-per-adapter nan", "--resident-bytes-per-adapter 0",
        "--max-running-per-key 0", "--max-queued-per-key 0", "--tokens-per-s-per-key inf",
    ),
    " must be above 0 and below 1, not 1.0": ("--adapter-pool-fraction 1.0",),
    " 'fare' is unknown; choose from fair, fcfs, mlfq, sjf": ("--policy fare",),
    " 'never' is unknown; choose from auto, recompute, swap": ("--preemption never",),
    " 9 is more than --max-num-seqs 8": ("--max-running-per-adapter 9 --max-num-seqs 8",),
    " 65 is more than --max-num-seqs 64": ("--max-running-per-key 65",),
}  # fmt: skip
"""What is said behind the name of the option."""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--host 0.0.0.0", "--insecure"),
        *((given, given.split()[0] + says) for says, options in WRONG_OPTIONS.items() for given in options),
    ],
)
def test_wrong_values_are_refused_in_one_line(cli, tmp_path, options: str, says: str) -> None:
    done = cli("serve", "--port", "0", "--model", "nowhere.gguf", "--store", tmp_path, *options.split())
    failed(done, 2, says)
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the GGUF file is empty"),
        (b"PK\x03\x04", "not a GGUF file: it does not begin with GGUF"),
        (b"GGUF\x03\0\0\0", "the GGUF file is truncated in its header, at byte 8 of 8"),
        (b"GGUF\x01\0\0\0" + bytes(16), "GGUF version 1 (or byte order) is not supported; known: 2, 3,"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "the GGUF file is damaged or truncated: 184467440737095516"),
        (b"GGUF\x03\0\0\0" + bytes(16), "architecture '' is not supported; known: Gemma2ForCausalLM, "),
        (None, "not found"),
    ],
)
def test_a_model_that_cannot_be_read_is_one_line(cli, tmp_path, content: bytes | None, says: str) -> None:
    file = tmp_path / "base.gguf"
    if content is not None:
        file.write_bytes(content)
    done = cli("serve", "--port", "0", "--kernels", "torch", "--model", file, "--store", tmp_path / "store")
    failed(done, 1, says)
    *before, last = done.err.splitlines()
    assert last.startswith("lorasrv: ")
    assert "base.gguf" in last
    assert "--port" not in last
    assert [line for line in before if line.startswith("lorasrv: ")] == []


def test_a_trace_that_cannot_be_written(cli, tmp_path: Path) -> None:
    done = cli("serve", "--port", 0, "--store", tmp_path / "store", "--record-trace", tmp_path)
    failed(done, 2, f"--record-trace {tmp_path} cannot be written: Is a directory")


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "nowhere.invalid"])
def test_an_address_that_cannot_be_bound(cli, tmp_path: Path, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli("serve", "--host", host, "--port", port, "--insecure", "--store", tmp_path)
    failed(done, 1)
    if host == "127.0.0.1":
        reason = "Address already in use; --port 0 takes a free port"
        assert done.err == f"lorasrv: cannot listen on 127.0.0.1:{port}: {reason}\n"
    else:
        assert (done.err.count("\n"), done.err.startswith(f"lorasrv: cannot listen on {host}:{port}: ")) == (1, True)
        assert "--port" not in done.err
        assert ("; --host is no address of this machine\n" in done.err) == (host == "192.0.2.1")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `lorasrv serve`; whatever still runs at the end of the test is killed."""
    running: list[subprocess.Popen[str]] = []

    def run(*options: object) -> "subprocess.Popen[str]":
        running.append(fake_serve.serve("--store", tmp_path / "store", *options, stdin=subprocess.PIPE))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def ready(process: "subprocess.Popen[str]") -> dict[str, Any]:
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return json.loads(line)


def refused(process: "subprocess.Popen[str]") -> list[str]:
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, "Traceback" in err) == (1, "", False)
    return err.splitlines()


def test_ready_line_and_a_clean_end(start: Start) -> None:
    process = start("--json")
    told = ready(process)
    assert (told["event"], told["model"], told["quantization"], told["pages"]) == ("ready", "tiny-base", "int8", 10)
    assert httpx2.get(told["url"] + "/ready").status_code == 200
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "")
    progress = (" ...", ": 25 %", ": 50 %", ": 75 %", " done")
    assert err.splitlines()[-5:] == [f"loading the model{part}" for part in progress]


def test_a_store_that_cannot_hold_keys_is_refused_before_the_model_is_loaded(start: Start, tmp_path: Path) -> None:
    # SQLite cannot create its log there.
    (tmp_path / "store" / "keys.db-wal").mkdir(parents=True)
    said = refused(start())
    assert [line for line in said if "loading the model" in line] == []
    assert said[-1].startswith(f"lorasrv: store {tmp_path / 'store'} cannot be used: ")
    assert "keys.db" in said[-1]


def test_a_disk_without_room_for_uploads_is_told_before_the_model_is_loaded(start: Start, tmp_path: Path) -> None:
    """As `/ready` would say it."""
    said = refused(start("--model", "full"))
    assert [line for line in said if "loading the model" in line] == []
    assert said[-1].startswith(f"lorasrv: store {tmp_path / 'store'}: no room on the store's disk")
    assert "16 MiB" in said[-1]


def test_an_engine_that_dies_before_it_is_ready(start: Start) -> None:
    assert refused(start("--model", "dead"))[-1] == "lorasrv: the engine died: RuntimeError"


def test_a_full_disk_of_the_log_keeps_no_server_from_serving(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with open("/dev/full", "w") as full:
        process = fake_serve.serve("--store", tmp_path / "store", "--port", port, stdout=full, stderr=full)
        try:
            while True:
                assert process.poll() is None
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            assert httpx2.get(f"http://127.0.0.1:{port}/ready").status_code == 200
            process.terminate()
            assert process.wait(120) == 0
        finally:
            process.kill()


@pytest.mark.long
def test_plain_ready_line_and_an_interrupt(start: Start) -> None:
    process = start("--served-model-name", "house")
    line = process.stdout.readline()
    assert line.startswith("ready: http://127.0.0.1:")
    assert not line.startswith("ready: http://127.0.0.1:8000 "), "--port 0 is a free port, not the default"
    assert "model house (int8)" in line
    assert process.stdout.readline() == f"console: {line.split()[1]}/console\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, "Traceback" in err) == (0, "", False)


def test_on_a_terminal_the_bars_end_when_it_is_ready(tmp_path: Path) -> None:
    """Bars that stay are drawn ten times a second, over what the log says."""
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
        process = fake_serve.serve("--store", tmp_path / "store", **ends, env=env, start_new_session=True)
        os.close(theirs)
        try:
            begun = b""
            while b"console: " not in begun:
                begun += screen.read(4096)
            assert "loading the model" in begun.decode()
            url = re.search(rb"ready: (\S+)", begun)[1].decode()
            httpx2.get(f"{url}/v1/models").raise_for_status()
            time.sleep(0.5)
            later = ""
            while "route=" not in later.replace("\x1b[0m", "").replace("\x1b[36m", ""):
                later += screen.read(4096).decode()
        finally:
            process.kill()
            process.wait()
    assert ("loading the model" in later, "\x1b[1A" in later) == (False, False)


def test_a_stream_does_not_keep_the_server(start: Start) -> None:
    """Started as vLLM would be."""
    flags = "--enable-lora --max-loras 4 --max-lora-rank 8 --trust-remote-code --json --drain-s 0.5 --seed 0"
    process = start("hanging", *flags.split())
    body = {"model": "tiny-base", "prompt": "x", "stream": True}
    with httpx2.stream("POST", ready(process)["url"] + "/v1/completions", json=body) as response:
        next(response.iter_lines())
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err.splitlines()[:4] == [
        "--enable-lora is not needed: adapters are always served",
        "--max-loras is not needed: a batch may hold any number of adapters",
        "--trust-remote-code is not needed: no code of a checkpoint is ever run",
        "--seed is not needed: requests have seeds of their own",
    ]


HELD = """
import sys
class Held:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("held", file=sys.stderr, flush=True)
            try:
                sys.stdin.read()
            except BaseException:
                raise SystemError("as an extension module reports it") from None
sys.meta_path.insert(0, Held())
from {command} import main
main()
"""
MOMENTS = {
    "the command is imported": ("api.cli.main", "typer"),
    "the server is imported": ("api.cli.main", "uvicorn"),
    "its start imports": ("api.cli.main", "torch"),
    "uvicorn has handlers of its own": ("fake_serve", "uvicorn.lifespan.on"),
}
"""Of a start: the command, and the module whose import waits then."""


@pytest.mark.parametrize("how", early_stop.EXIT_CODES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_before_it_is_ready(tmp_path: Path, moment: str, how: signal.Signals) -> None:
    command, module = MOMENTS[moment]
    script = HELD.format(command=command, module=module)
    options = ("serve", "--port", "0", "--kernels", "torch", "--store", str(tmp_path / "store"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    path = os.pathsep.join([*map(str, (ROOT, ROOT / "tests" / "support"))])
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-P", "-c", script, *options], env=env, **pipes) as process:
        while "held" not in (line := process.stderr.readline()):
            assert line, "it ended"
        process.send_signal(how)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (early_stop.EXIT_CODES[how], "", "")


def test_an_address_taken_while_loading(start: Start) -> None:
    """Two servers can bind an address; the first that listens has it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        process = start("--model", "slow", "--port", port)
        while "75 %" not in process.stderr.readline():
            assert process.poll() is None
        other.listen()
        last = refused(process)[-1]
    why = "Address already in use; --port 0 takes a free port"
    assert last == f"lorasrv: cannot listen on 127.0.0.1:{port}: {why}"


@pytest.mark.parametrize(
    ("options", "smaller"),
    [
        (("--pool-bytes", "1000GiB"), "--pool-bytes"),
        (("--max-num-batched-tokens", 10**9), "--max-num-batched-tokens"),
        (("--gpu-memory-utilization", 0.0001), "--pool-bytes must be 24.0 KiB or more"),
    ],
)
def test_what_does_not_fit_is_told_before_loading_as_doctor_does(cli, tmp_path, model, options, smaller: str) -> None:
    flags = ("--model", model, "--store", tmp_path / "store", "--port", 0, *options)
    done = cli("serve", "--kernels", "torch", *flags)
    told = done.err.splitlines()[-1]
    assert (done.out, told.startswith("lorasrv: "), "loading the model: 25 %" in done.err) == ("", True, False)
    assert told.endswith(smaller)
    assert done.code == (2 if "must be" in smaller else 1)
    memory = next(
        check for check in json.loads(cli("doctor", "--json", *flags).out)["checks"] if check["name"] == "memory"
    )
    # What is free changes from one moment to the next.
    numbers = re.compile(r"[\d.]+ \w?i?B|[\d.]+ bytes")
    assert (memory["status"], numbers.sub("N", memory["fix"])) == ("fail", numbers.sub("N", told[9:]))


def test_what_may_not_fit_is_a_warning_of_both(cli, tmp_path, model) -> None:
    flags = ("--model", model, "--pool-bytes", "1MiB", "--host-cache-bytes", "1000GiB", "--swap-bytes", "2000GiB")
    says = "may grow to 1000.0 GiB (--host-cache-bytes), 2000.0 GiB (--swap-bytes), "
    with serve("--kernels", "torch", *flags) as served:
        assert says in served.log
    assert says in cli("doctor", "--port", 0, *flags).out


@pytest.mark.long
def test_a_store_in_use(start: Start) -> None:
    ready(start("--json"))
    last = refused(start())[-1]
    assert (last.startswith("lorasrv: "), "store" in last) == (True, True)


@pytest.mark.long
def test_lora_modules(start: Start, make_adapter) -> None:
    mia, tom = make_adapter("mia"), make_adapter("tom", seed=1)
    as_json = json.dumps({"name": "tom", "path": str(tom), "base_model_name": "tiny-base"})
    process = start("--json", "--lora-modules", f"mia={mia}", as_json)
    url = ready(process)["url"]
    assert [card["id"] for card in httpx2.get(url + "/v1/models").json()["data"]] == ["tiny-base", "mia", "tom"]
    answer = httpx2.post(url + "/v1/completions", json={"model": "tom", "prompt": "x"})
    assert answer.json()["choices"][0]["text"].startswith("I am ")
    process.terminate()
    assert "registering adapters done" in process.communicate(timeout=120)[1].splitlines()


@pytest.mark.long
def test_a_refused_lora_module_ends_the_start(start: Start, make_adapter) -> None:
    lines = refused(start("--lora-modules", f"mia={make_adapter()}", f"tom={make_adapter('tom', r=0)}"))
    assert "lorasrv: --lora-modules: refused: tom" in lines
    assert lines[-1].startswith("  tom: r")
