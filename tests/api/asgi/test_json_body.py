"""Bodies that are refused for their size, shape or encoding."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from api.asgi.body_limits import MAX_JSON_BYTES
from api.asgi.json_body import INLINE_BYTES, MAX_DEPTH, parse_json
from api.errors import ApiError

GOOD = b'{"model": "tiny-base", "prompt": "x"}'
JSON = {"content-type": "application/json"}


def post(server: Any, content: Any, headers: dict[str, str] | None = None) -> Any:
    return server.http.post("/v1/completions", content=content, headers=JSON | (headers or {}))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "UTF-8"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"top_p": Infinity}', "Infinity"),
        (b'{"temperature": -Infinity}', "Infinity"),
        (b'{"temperature": 1e999}', "too large"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "an integer of more than 4300 digits is too large"),
        (b'{"model": "a", "model": "b"}', "'model' appears more than once"),
        (b'{"x": {"a": 1, "a": 2}}', "'a' appears more than once"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "more than once"),
        (b"[" * 100_000, "deep"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "deep"),
    ],
)
def test_malformed(server, body: bytes, says: str) -> None:
    response = post(server, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_json")
    assert says in error["message"]


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"7", b"null", b"{}"])
def test_json_of_another_type(server, body: bytes) -> None:
    response = post(server, body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")


@pytest.mark.parametrize("field", ["prompt", "model", "adapter_id", "stop"])
def test_lone_surrogates_are_no_text(server, engine, field: str) -> None:
    body = json.dumps({"model": "tiny-base", "prompt": "x", field: "a\ud800"}).encode()
    response = post(server, body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert "surrogate" in response.json()["error"]["message"]
    assert engine.added == []


def test_whole_characters_written_as_escapes_are_text(server, engine) -> None:
    assert post(server, b'{"model": "tiny-base", "prompt": "\\ud83d\\ude00"}').status_code == 200
    assert bytes(engine.added[0].prompt).decode() == "\N{GRINNING FACE}"


def test_depth_up_to_the_limit_is_read() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_json(deepest)
    assert parse_json(b"[" + b",".join([b"{}"] * 1000) + b"]")
    with pytest.raises(ApiError):
        parse_json(b"[" + deepest + b"]")


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/jsonp"],
)
def test_content_type(server, kind: str) -> None:
    response = post(server, GOOD, {"content-type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_content_type_with_charset(server) -> None:
    assert post(server, GOOD, {"content-type": "Application/JSON; charset=utf-8"}).status_code == 200


def test_a_body_at_the_limit_is_served_and_parsed_off_the_loop(server) -> None:
    body = GOOD[:-1] + b', "user": "' + b"u" * (INLINE_BYTES + 1) + b'"}'
    assert post(server, body).status_code == 200
    padded = GOOD + b" " * (MAX_JSON_BYTES - len(GOOD))
    assert post(server, padded).status_code == 200
    assert post(server, padded + b" ").status_code == 413


def test_large_bodies_are_parsed_one_at_a_time(server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take 26 times its bytes while it is parsed: sixty bodies of 1.5 MB took 2.3 GB."""
    running: list[int] = []
    counts: list[int] = []

    def parse(data: bytes) -> Any:
        running.append(1)
        counts.append(len(running))
        time.sleep(0.02)
        running.pop()
        return parse_json(data)

    monkeypatch.setattr("api.asgi.json_body.parse_json", parse)
    large = b'{"model": "tiny-base", "prompt": "x", "y": "' + b"z" * INLINE_BYTES + b'"}'
    with ThreadPoolExecutor(8) as clients:
        assert [answer.status_code for answer in clients.map(lambda _: post(server, large), range(16))] == [200] * 16
    assert counts == [1] * 16
