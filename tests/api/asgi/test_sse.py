"""Streams byte by byte, as snapshots: clients parse them with less care than JSON.

A missing snapshot is written, and the test fails once; look at the file before it is committed. Request ids and times,
which differ from run to run, are zeros there.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from spelled_engine import spelled, tiny_tokenizer

from lorasrv.errors import EngineDead

DATA = Path(__file__).parents[1] / "data"
VARYING = (
    (rb"sha256:[0-9a-f]{64}", b"sha256:" + b"0" * 64),
    (rb"-[0-9a-f]{24}", b"-" + b"0" * 24),
    (rb'"created":\d+', b'"created":0'),
    (rb'"lorasrv-[0-9.]+-', b'"lorasrv-0.1.0-'),
    (rb'"(first_token_ms|total_ms)":[\d.]+', rb'"\1":0'),
)

CHAT: dict[str, Any] = {"model": "mia", "messages": [{"role": "user", "content": "hi"}], "stream": True}
PLAIN: dict[str, Any] = {"model": "tiny-base", "prompt": "hi", "stream": True}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TGI: dict[str, Any] = {"inputs": "hi", "parameters": {"adapter_id": "mia", "details": True, "top_n_tokens": 2}}

STREAMS = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat-usage": ("/v1/chat/completions", {**CHAT, **USAGE}),
    "chat-continuous-usage": ("/v1/chat/completions", {**CHAT, **CONTINUOUS}),
    "completion": ("/v1/completions", {**PLAIN, "stop": ["rl"]}),
    "completion-usage": ("/v1/completions", {**PLAIN, **USAGE, "max_tokens": 3}),
    "completion-continuous-usage": ("/v1/completions", {**PLAIN, **CONTINUOUS, "max_tokens": 3}),
    "generate-stream": ("/generate_stream", TGI),
    "generate-stream-stop": ("/", {"inputs": "hi", "parameters": {"stop": ["rl"]}, "stream": True}),
}


@pytest.fixture(autouse=True)
def speaking(server: Any, engine: Any, make_adapter: Any) -> None:
    engine.tokenizer = tiny_tokenizer()
    engine.script = spelled(engine.tokenizer, "a wörld")
    server.upload(make_adapter(), "mia")


def without_varying(stream: bytes) -> bytes:
    for pattern, constant in VARYING:
        stream = re.sub(pattern, constant, stream)
    return stream


def check(name: str, stream: bytes) -> None:
    file = DATA / f"{name}.sse"
    if not file.exists():
        file.write_bytes(without_varying(stream))
        pytest.fail(f"{file.name} was not there and has been written; look at it")
    assert without_varying(stream).decode() == file.read_bytes().decode()


@pytest.mark.parametrize("name", STREAMS)
def test_snapshots(server, name) -> None:
    path, body = STREAMS[name]
    response = server.http.post(path, json=body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
    check(name, response.content)


@pytest.mark.parametrize("name", ["chat", "completion", "generate-stream"])
def test_ends_of_lines_in_the_text(server, engine, name) -> None:
    """Those of Unicode, at which most clients in Python split a stream, are escapes."""
    engine.script = spelled(engine.tokenizer, "a\u2028b\u2029c\u0085d\n\x0be")
    path, body = STREAMS[name]
    response = server.http.post(path, json=body)
    lines = [line for line in response.text.splitlines() if line]
    assert len(lines) == response.content.count(b"\n\n")
    assert {line[:6] for line in lines} <= {"data: ", "data:{"}
    check(f"{name}-line-ends", response.content)


@pytest.mark.parametrize("name", ["chat", "completion", "generate-stream"])
def test_a_failure_in_the_middle(server, engine, name) -> None:
    engine.breaks(2, EngineDead("the engine died"))
    path, body = STREAMS[name]
    check(f"{name}-failed", server.http.post(path, json=body).content)
