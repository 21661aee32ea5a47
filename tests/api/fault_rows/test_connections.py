"""Rows 35, 37 and 38 of the list of faults, through a real `lorasrv serve` process and raw sockets: bodies that are
none, clients that take their time, and clients that leave. Each bound by itself: tests/api/asgi/test_protocol.py."""

import gzip
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from raw_client import RawClient, head_of, json_request, pieces
from served import Served, serve

GB = 1 << 30
SEATS, MAX_QUEUED = 4, 24
JSON = {"content-type": "application/json"}
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/v1/adapters", "/v1/batches", "/nowhere")
ASK = {"model": "mia", "prompt": "hi", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
WORDY = {
    "max_tokens": 400,
    "n": 2,
    "logprobs": 5,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
SCHEMA = {"type": "object", "properties": {f"p{i}": {"enum": [f"{i} {j}" for j in range(40)]} for i in range(60)}}


@pytest.fixture(scope="module")
def process(flags, adapter_dirs) -> Iterator[Served]:
    few = ("--max-num-seqs", SEATS, "--max-num-batched-tokens", 16, "--max-queued", MAX_QUEUED)
    short = ("--header-timeout-s", 0.5, "--body-timeout-s", 0.5, "--write-timeout-s", 0.5, "--keep-alive-s", 30)
    with serve(*flags, *few, *short, adapters={"mia": adapter_dirs["two"]}) as served:
        yield served


@pytest.fixture
def served(process: Served) -> Iterator[Served]:
    """The process; at the end of every row it lives, answers, and holds nothing for requests that are over."""
    assert process.post("/v1/completions", **ASK | {"max_tokens": 1}).status_code == 200
    process.calm_down()
    files = process.open_files
    yield process
    process.calm_down()
    assert process.post("/v1/completions", **ASK | {"max_tokens": 1}).status_code == 200
    process.calm_down()
    # This one's own connection may have been made anew.
    process.until(lambda: process.open_files <= files + 1)


def port_of(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


def code_of(answer: httpx2.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"] if isinstance(error, dict) else ""


def test_row_35_bodies_that_are_none(served) -> None:
    port, peak = port_of(served), served.peak_bytes
    for path in PATHS:
        with RawClient(port) as client:
            status, _, body = client.send(
                head_of(path, "Content-Type: application/json", f"Content-Length: {GB}")
            ).answer()
        assert status == 413, path
        assert "8388608 bytes" in json.dumps(body)
    for path in ("/v1/completions", "/generate", "/v1/adapters"):
        answer = served.http.post(path, content=pieces(GB), headers=JSON)
        assert answer.status_code == 413, path
    assert served.http.request("GET", "/v1/models", content=pieces(1 << 20)).status_code in (200, 413)

    wanted = (400, "invalid_json")
    for body in (b"[" * 10**6, b'{"a":' * 10**6, b"[" * 10**6 + b"]" * 10**6, b"[" + b"[]," * 2_600_000 + b"[]]"):
        assert code_of(served.http.post("/v1/completions", content=body, headers=JSON)) == wanted
    for text in (
        '{"model": "mia", "prompt": "hi", "prompt": "ho"}',
        '{"model": "mia", "prompt": "hi", "logit_bias": {"1": 1, "1": 2}}',
        '{"model": "mia", "prompt": "hi", "temperature": NaN}',
        '{"model": "mia", "prompt": "hi", "temperature": -Infinity}',
        '{"model": "mia", "prompt": "hi", "temperature": 1e999}',
    ):
        assert code_of(served.http.post("/v1/completions", content=text.encode(), headers=JSON)) == wanted

    good = json.dumps(ASK | {"max_tokens": 1}).encode()
    unsupported = (415, "unsupported_media_type")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        answer = served.http.post("/v1/completions", content=good, headers={"content-type": kind})
        assert code_of(answer) == unsupported, kind
    bomb = gzip.compress(b" " * (64 << 20))
    for coding in ("gzip", "br", "deflate, gzip", "zstd"):
        for path in ("/v1/completions", "/v1/adapters", "/v1/files"):
            answer = served.http.post(path, content=bomb, headers={**JSON, "content-encoding": coding})
            assert code_of(answer) == unsupported, (coding, path)
    answer = served.http.put("/v1/blobs/sha256:" + "0" * 64, content=bomb, headers={"content-encoding": "gzip"})
    assert code_of(answer) == unsupported
    assert served.http.post("/v1/completions", content=good, headers=JSON).status_code == 200
    # Lists of eight million bytes are counted, not made; of a gigabyte a few megabytes are ever in memory.
    assert served.peak_bytes - peak < 128 << 20


@pytest.mark.long
def test_row_37_clients_that_take_their_time(served) -> None:
    """All of them at once, while an ordinary stream goes on and other requests are answered."""
    port, aborted = port_of(served), served.finished("abort")
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
    never = RawClient(port, buffer=4096)
    never.send(json_request("/v1/completions", **ASK | WORDY))
    for drip in drips:
        drip.start()
    while any(drip.is_alive() for drip in drips):
        assert served.http.get("/health", timeout=10).status_code == 200
        assert served.post("/v1/completions", **ASK | {"max_tokens": 1}).status_code == 200
    for client in slow:
        assert client.answer()[0] == 408
        client.socket.close()
    served.until(lambda: served.finished("abort") == aborted + 2)
    with never, pytest.raises(ConnectionResetError):
        never.read()
    listening.join(60)
    assert said[-1] == "data: [DONE]"
    assert len(said) > 60
    assert not any('"error"' in line for line in said)


def ways_to_leave() -> dict[str, tuple[dict[str, Any], bytes]]:
    """Name -> request, and what has come of its answer when the client goes."""
    long = {"prompt": [20 + i % 300 for i in range(400)], "max_tokens": 50}
    return {
        "while it is tokenized": ({"prompt": "Ahoy " * 80, "max_tokens": 50}, b""),
        "prefilling": (long, b""),
        "decoding": ({}, b""),
        "decoding a stream": ({"stream": True}, b"data: "),
        "between choices": ({"n": 4, "stream": True, "temperature": 1}, b'"index":2'),
        "best of": ({"n": 1, "best_of": 4, "temperature": 1}, b""),
        "beams": ({"use_beam_search": True, "n": 2, "best_of": 4}, b""),
        "compiling a grammar": ({"guided_json": SCHEMA}, b""),
        "several prompts": ({"prompt": ["hi", "ho", "hu"]}, b""),
    }


def leave(served: Served, name: str, at_once: bool) -> None:
    fields, mark = ways_to_leave()[name]
    with RawClient(port_of(served)) as client:
        client.send(json_request("/v1/completions", **ASK | fields))
        if mark:
            client.read_until(mark)
        elif not at_once:
            served.until(lambda: served.held()["requests"])


def test_row_38_clients_that_leave(served) -> None:
    before = served.figure("lorasrv_generated_tokens_total")
    for name in ways_to_leave():
        for at_once in (True, False):
            leave(served, name, at_once or name == "compiling a grammar")
    served.calm_down()
    # Of 18 requests for 300 tokens each, some with several choices.
    assert served.figure("lorasrv_generated_tokens_total") - before < 18 * 150

    # While four others have the seats.
    stream = json_request("/v1/completions", **ASK | {"max_tokens": 120, "stream": True})
    runs = [RawClient(port_of(served)).send(stream) for _ in range(SEATS)]
    for client in runs:
        client.read_until(b"data: ")
    for name, (_, mark) in ways_to_leave().items():
        if not mark:
            leave(served, name, at_once=True)
    for client in runs:
        assert client.read_until(b"data: [DONE]")
        client.socket.close()
    served.calm_down()
    assert served.figure("lorasrv_requests_waiting") == 0
    open_and_close(served, 100)


@pytest.mark.long
def test_row_38_clients_that_leave_while_their_adapter_is_loading(flags, adapter_dirs) -> None:
    """The load goes with them; who comes next has it begin anew, or go on."""
    slow = ("--testing", "--inject-faults", "slow-disk:2s")
    with serve(*flags, *slow, adapters=adapter_dirs) as served:
        waiting = "lorasrv_requests_waiting_for_adapter"
        files = None
        for way in ({}, {"stream": True}, {"n": 3}, {"prompt": ["hi", "ho"]}, {"use_beam_search": True, "best_of": 2}):
            for name in adapter_dirs:
                with RawClient(port_of(served)) as client:
                    client.send(json_request("/v1/completions", **ASK | way | {"model": name}))
                    served.until(lambda: served.figure(waiting))
                served.until(lambda: not served.figure(waiting))
                served.calm_down()
            files = files or served.open_files
        assert served.figure("lorasrv_generated_tokens_total") == 0
        assert [served.http.get(f"/v1/adapters/{name}").json()["tier"] for name in adapter_dirs] == ["disk"] * 3
        assert served.open_files <= files + 1

        # One of two leaves: the other's load is not its business.
        stays, leaves = (RawClient(port_of(served)) for _ in range(2))
        with stays:
            with leaves:
                for client in (stays, leaves):
                    client.send(
                        json_request("/v1/completions", **ASK | {"model": "two", "max_tokens": 3, "stream": True})
                    )
                served.until(lambda: served.figure(waiting) == 2)
            served.until(lambda: served.figure(waiting) < 2)
            assert b'"error"' not in stays.read_until(b"data: [DONE]")
        answer = served.post("/v1/completions", **ASK | {"model": "one", "max_tokens": 3})
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
        served.calm_down()


@pytest.mark.long
def test_row_38_a_thousand_opens_and_closes(served) -> None:
    open_and_close(served, 1000)


def open_and_close(served: Served, count: int) -> None:
    """Opened, asked and left in all ways in turn; memory, files and pages are as before."""
    names = list(ways_to_leave())
    for number in range(count):
        with RawClient(port_of(served)) as client:
            fields, _ = ways_to_leave()[names[number % len(names)]]
            request = json_request("/v1/completions", **ASK | fields)
            client.send(request[: len(request) // 2] if number % 5 == 4 else b"" if number % 5 == 3 else request)
    served.calm_down()
    served.until(lambda: served.figure("lorasrv_requests_running") == 0)


@pytest.mark.long
def test_a_full_queue_says_when_to_come_back(served) -> None:
    """Who was let in is answered; see tests/lorasrv/engine/test_backpressure.py for how the time is
    found.
    """
    clients = [RawClient(port_of(served)) for _ in range(SEATS + MAX_QUEUED + 30)]
    for client in clients:
        client.send(json_request("/v1/completions", "Connection: close", **ASK | {"max_tokens": 3}))
    answers = []
    for client in clients:
        with client:
            answers.append(client.answer())
    statuses = [status for status, *_ in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= SEATS + MAX_QUEUED
    for status, headers, body in answers:
        if status == 429:
            assert 1 <= int(headers["retry-after"]) <= 60
            assert (body["error"]["type"], body["error"]["code"]) == ("rate_limit_error", "server_overloaded")
            assert f"max-num-queued-seqs is {MAX_QUEUED}" in body["error"]["message"]
