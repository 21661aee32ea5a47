"""Bodies that are refused, slow clients and disconnects. Each bound by itself: tests/api/asgi/test_protocol.py."""

import gzip
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from raw_client import RawClient, head_of, json_request, pieces
from served import Served, serve

GB = 1 << 30
SLOTS, MAX_QUEUED = 4, 24
JSON = {"content-type": "application/json"}
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/v1/adapters", "/v1/batches", "/nowhere")
ASK = {"model": "mia", "prompt": "hi", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
WORDY = {"max_tokens": 400, "n": 2, "logprobs": 5, "stream": True, "stream_options": USAGE}
SCHEMA = {"type": "object", "properties": {f"p{i}": {"enum": [f"{i} {j}" for j in range(40)]} for i in range(60)}}


@pytest.fixture(scope="module")
def process(flags, adapter_dirs) -> Iterator[Served]:
    few = ("--max-num-seqs", SLOTS, "--max-num-batched-tokens", 16, "--max-queued", MAX_QUEUED)
    short = ("--header-timeout-s", 0.5, "--body-timeout-s", 0.5, "--write-timeout-s", 0.5, "--keep-alive-s", 30)
    with serve(*flags, *few, *short, adapters={"mia": adapter_dirs["two"]}) as served:
        yield served


def send(served: Served, *lines: str, buffer: int | None = None, **fields: Any) -> RawClient:
    """A connection on which a completion was asked for; `fields` of its body."""
    return RawClient(served.port, buffer=buffer).send(json_request("/v1/completions", *lines, **ASK | fields))


def test_refused_bodies_take_no_memory(served) -> None:
    peak = served.peak_bytes
    for path in PATHS:
        with RawClient(served.port) as client:
            begin = head_of(path, "Content-Type: application/json", f"Content-Length: {GB}")
            status, _, body = client.send(begin).answer()
        assert status == 413, path
        assert "8388608 bytes" in json.dumps(body)
    for path in ("/v1/completions", "/generate", "/v1/adapters"):
        assert served.http.post(path, content=pieces(GB), headers=JSON).status_code == 413, path
    assert served.http.request("GET", "/v1/models", content=pieces(1 << 20)).status_code in (200, 413)
    for body in (b"[" * 10**6, b'{"a":' * 10**6, b"[" * 10**6 + b"]" * 10**6, b"[" + b"[]," * 2_600_000 + b"[]]"):
        answer = served.http.post("/v1/completions", content=body, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    bomb, headers = gzip.compress(b" " * (64 << 20)), {**JSON, "content-encoding": "gzip"}
    for method, path in (("POST", "/v1/completions"), ("POST", "/v1/files"), ("PUT", "/v1/blobs/sha256:" + "0" * 64)):
        answer = served.http.request(method, path, content=bomb, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type"), path
    # Lists of eight million bytes are counted, not made; of a gigabyte a few megabytes are ever in memory.
    assert served.peak_bytes - peak < 128 << 20


@pytest.mark.long
def test_slow_clients(served) -> None:
    """All of them at once, while an ordinary stream goes on and other requests are answered."""
    port, aborted = served.port, served.finished("abort")
    said: list[str] = []

    def listen() -> None:
        with served.http.stream("POST", "/v1/completions", json={**ASK, "max_tokens": 120, "stream": True}) as answer:
            said.extend(line for line in answer.iter_lines() if line)

    listening = threading.Thread(target=listen)
    listening.start()
    upload = head_of("/v1/blobs/sha256:" + "0" * 64, "Content-Length: 100000", method="PUT")
    slow = [RawClient(port).send(begin) for begin in (b"POST /v1/completions HTTP/1.1\r\n", b"G", upload) * 8]
    slow += [RawClient(port).send(head_of("/v1/completions", "Content-Type: application/json", "Content-Length: 99"))]
    drips = [threading.Thread(target=client.drip, kwargs={"pause_s": 0.2}) for client in slow]
    never = send(served, buffer=4096, **WORDY)
    for drip in drips:
        drip.start()
    while any(drip.is_alive() for drip in drips):
        assert served.http.get("/health", timeout=10).status_code == 200
        assert served.post("/v1/completions", **ASK | {"max_tokens": 1}).status_code == 200
    for client in slow:
        assert client.answer()[0] == 408
        client.socket.close()
    # It is cut when all that the kernel holds for it is full, which takes a slow machine most of its 400 tokens.
    served.until(lambda: served.finished("abort") == aborted + 2, within_s=120)
    with never, pytest.raises(ConnectionResetError):
        never.read()
    listening.join()
    assert said[-1] == "data: [DONE]"
    assert len(said) > 60
    assert not any('"error"' in line for line in said)


LONG = {"prompt": [20 + i % 300 for i in range(400)], "max_tokens": 50}
# Name -> fields of the request, and what has come of its answer when the client disconnects.
DISCONNECTS: dict[str, tuple[dict[str, Any], bytes]] = {
    "while it is tokenized": ({"prompt": "Ahoy " * 80, "max_tokens": 50}, b""),
    "prefilling": (LONG, b""),
    "decoding": ({}, b""),
    "decoding a stream": ({"stream": True}, b"data: "),
    "between choices": ({"n": 4, "stream": True, "temperature": 1}, b'"index":2'),
    "best of": ({"n": 1, "best_of": 4, "temperature": 1}, b""),
    "beams": ({"use_beam_search": True, "n": 2, "best_of": 4}, b""),
    "compiling a grammar": ({"guided_json": SCHEMA}, b""),
    "several prompts": ({"prompt": ["hi", "ho", "hu"]}, b""),
}


def disconnect(served: Served, name: str, at_once: bool) -> None:
    fields, mark = DISCONNECTS[name]
    with send(served, **fields) as client:
        if mark:
            client.read_until(mark)
        elif not at_once:
            served.until(lambda: served.held()["requests"])


def test_disconnects(served) -> None:
    before = served.figure("lorasrv_generated_tokens_total")
    for name in DISCONNECTS:
        for at_once in (True, False):
            disconnect(served, name, at_once or name == "compiling a grammar")
    served.calm_down()
    # Of 18 requests for 300 tokens each, some with several choices.
    assert served.figure("lorasrv_generated_tokens_total") - before < 18 * 150

    # While four others have every request slot.
    runs = [send(served, max_tokens=120, stream=True) for _ in range(SLOTS)]
    for client in runs:
        client.read_until(b"data: ")
    for name, (_, mark) in DISCONNECTS.items():
        if not mark:
            disconnect(served, name, at_once=True)
    for client in runs:
        assert client.read_until(b"data: [DONE]")
        client.socket.close()
    served.calm_down()
    assert served.figure("lorasrv_requests_waiting") == 0


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_connections_that_open_ask_and_close(served, count: int) -> None:
    """In all ways in turn; files and pages are as before."""
    for number, (fields, _) in zip(range(count), itertools.cycle(DISCONNECTS.values()), strict=False):
        with RawClient(served.port) as client:
            request = json_request("/v1/completions", **ASK | fields)
            client.send(request[: len(request) // 2] if number % 5 == 4 else b"" if number % 5 == 3 else request)
    served.calm_down()
    served.until(lambda: served.figure("lorasrv_requests_running") == 0)


@pytest.mark.long
def test_disconnects_while_the_adapter_is_loading(flags, adapter_dirs) -> None:
    """The load ends with its requests; a later one loads anew, or continues."""
    slow = ("--testing", "--inject-faults", "slow-disk:2s")
    with serve(*flags, *slow, adapters=adapter_dirs) as served:
        waiting = "lorasrv_requests_waiting_for_adapter"
        files = None
        for way in ({}, {"stream": True}, {"n": 3}, {"prompt": ["hi", "ho"]}, {"use_beam_search": True, "best_of": 2}):
            for name in adapter_dirs:
                with send(served, **way, model=name):
                    served.until(lambda: served.figure(waiting))
                served.until(lambda: not served.figure(waiting))
                served.calm_down()
            files = files or served.open_files
        assert served.figure("lorasrv_generated_tokens_total") == 0
        assert [served.http.get(f"/v1/adapters/{name}").json()["tier"] for name in adapter_dirs] == ["disk"] * 3
        assert served.open_files <= files + 1

        # One of two disconnects: the other's load continues.
        short = {"model": "two", "max_tokens": 3, "stream": True}
        with send(served, **short) as stays:
            with send(served, **short):
                served.until(lambda: served.figure(waiting) == 2)
            served.until(lambda: served.figure(waiting) < 2)
            assert b'"error"' not in stays.read_until(b"data: [DONE]")
        answer = served.post("/v1/completions", **ASK | {"model": "one", "max_tokens": 3})
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
        served.calm_down()
