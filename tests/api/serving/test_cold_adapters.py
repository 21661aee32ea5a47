"""Requests that would not wait for their adapter (`on_cold`), salted prefixes, and what the answer says of both."""

import json
from typing import Any

import pytest
from fake_engine import cold, say

from lorasrv.outputs import AdapterTier
from lorasrv.request import OnCold

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(autouse=True)
def digest(server, make_adapter) -> str:
    return str(server.upload(make_adapter(), "mia").json()["digest"])


def usage_of(response: Any) -> dict[str, Any]:
    """Of a whole answer, or of a stream's last chunk."""
    if response.headers["content-type"] == "application/json":
        return response.json()["usage"]
    return json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["usage"]


class TestReject:
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("n", [1, 2])
    @pytest.mark.parametrize(("seconds", "header"), [(0.01, "1"), (1.0, "1"), (1.2, "2"), (7.0, "7")])
    def test_says_when_to_come_back(self, server, engine, stream: bool, n: int, seconds: float, header: str) -> None:
        engine.script = cold(seconds)
        response = server.chat(model="mia", on_cold="reject", stream=stream, n=n)
        assert (response.status_code, response.headers["retry-after"]) == (503, header)
        assert response.headers["content-type"] == "application/json"
        assert "x-should-retry" not in response.headers
        error = response.json()["error"]
        assert (error["code"], error["type"], error["param"]) == ("adapter_cold", "server_error", "on_cold")

    def test_a_resident_adapter_answers(self, server, engine, digest: str) -> None:
        response = server.chat(model="mia", on_cold="reject")
        assert (response.status_code, response.headers["x-adapter-digest"]) == (200, digest)
        assert engine.added[0].on_cold is OnCold.REJECT


class TestFallback:
    @pytest.mark.parametrize("fields", [{}, {"n": 2}, USAGE])
    def test_the_answer_says_so(self, server, engine, digest: str, fields: dict[str, Any]) -> None:
        engine.script = cold(1.0)
        response = server.chat(model="mia", on_cold="fallback_base", **fields)
        assert response.headers["x-adapter-fallback"] == "base"
        assert (response.headers["x-adapter-id"], response.headers["x-adapter-digest"]) == ("mia", digest)
        assert response.headers["x-adapter-tier"] == AdapterTier.DISK
        figures = usage_of(response)["lorasrv"]
        assert (figures["fallback"], figures["adapter_id"], figures["adapter_digest"]) == ("base", "mia", digest)

    @pytest.mark.parametrize("fields", [{}, USAGE])
    def test_the_adapter_itself_says_nothing(self, server, engine, fields: dict[str, Any]) -> None:
        response = server.chat(model="mia", on_cold="fallback_base", **fields)
        assert "x-adapter-fallback" not in response.headers
        assert usage_of(response)["lorasrv"]["fallback"] is None
        assert engine.added[0].on_cold is OnCold.FALLBACK_BASE

    def test_web_pages_may_read_it(self, make_server, engine) -> None:
        engine.script = cold(1.0)
        server = make_server(allowed_origins="https://app.example")
        headers = {"origin": "https://app.example"}
        body = {"model": "mia", "prompt": "x", "on_cold": "fallback_base"}
        response = server.http.post("/v1/completions", json=body, headers=headers)
        assert "x-adapter-fallback" in response.headers["access-control-expose-headers"]


@pytest.mark.parametrize("given", [{}, {"on_cold": None}, {"on_cold": "wait"}])
def test_waiting_is_the_default(server, engine, given: dict[str, Any]) -> None:
    engine.script = cold(1.0)
    response = server.complete(model="mia", **given)
    assert response.json()["choices"][0]["text"].startswith("I am ")
    assert engine.added[0].on_cold is OnCold.WAIT


@pytest.mark.parametrize("on_cold", list(OnCold))
def test_the_base_is_never_cold(server, engine, on_cold: str) -> None:
    engine.script = cold(1.0)
    response = server.chat(on_cold=on_cold)
    assert response.status_code == 200
    assert "x-adapter-fallback" not in response.headers
    assert response.json()["usage"]["lorasrv"]["fallback"] is None


class TestCachedTokens:
    @pytest.mark.parametrize("fields", [{}, USAGE])
    def test_always_there(self, server, engine, fields: dict[str, Any]) -> None:
        assert usage_of(server.chat(**fields))["prompt_tokens_details"] == {"cached_tokens": 0}
        engine.script = say(cached=5)
        assert usage_of(server.chat(**fields))["prompt_tokens_details"] == {"cached_tokens": 5}

    @pytest.mark.parametrize(
        ("salt", "given"), [("tenant 1", "salt:tenant 1"), ("ö" * 256, f"salt:{'ö' * 256}"), (None, ""), ("", "")]
    )
    def test_the_salt_reaches_the_engine(self, server, engine, salt: str | None, given: str) -> None:
        server.chat(cache_salt=salt)
        server.complete(cache_salt=salt)
        assert [added.cache_salt for added in engine.added] == [given, given]
