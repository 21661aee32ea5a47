"""Log lines: JSON or text, one a request, with its id, and never a prompt, an answer or a secret."""

import asyncio
import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import HANG

from api.observability import logs
from api.observability.access_log import MAX_SHOWN, facts
from api.observability.access_middleware import AccessMiddleware, RequestInfo
from lorasrv.errors import AdapterDeleted, AdapterLoadFailed, EngineOverloaded, RequestTimeout, ServerStopping, name_of
from lorasrv.metrics.request_stats import REQUEST_LISTENER, RequestStats
from lorasrv.outputs import RequestId
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams

SECRET = "sk-never-in-a-log"
PROMPT = "never a prompt"
STREAM = {"model": "tiny-base", "prompt": "x", "stream": True}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is written, as JSON from info on; logging is as it was afterwards."""
    out = io.StringIO()
    with logs.written("json", "info", out):
        yield out


def parsed(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def requests(out: io.StringIO, eventually: Any, count: int = 1) -> list[dict[str, Any]]:
    """Lines of requests; the last is written after its client has its answer."""
    eventually(lambda: out.getvalue().count('"event": "request"') >= count)
    return [line for line in parsed(out) if line["event"] == "request"]


class TestRequestLines:
    def test_a_request_line(self, server, make_adapter, lines, eventually) -> None:
        digest = server.upload(make_adapter(), "mia").json()["digest"]
        headers = {"x-request-id": "my-id", "authorization": f"Bearer {SECRET}"}
        body = {"model": "mia", "messages": [{"role": "user", "content": PROMPT}], "n": 2}
        answer = server.http.post("/v1/chat/completions", json=body, headers=headers)
        said = answer.json()["choices"][0]["message"]["content"]
        line = requests(lines, eventually, 3)[-1]
        usage = answer.json()["usage"]
        expected = {
            "request_id": "my-id",
            "level": "info",
            "logger": "api.observability.access_log",
            "method": "POST",
            "route": "/v1/chat/completions",
            "status": 200,
            "principal": "anonymous",
            "finish_reason": "stop",
            "adapter_id": "mia",
            "adapter_version": "1",
            "adapter_digest": digest,
            "adapter_tier": "disk",
            "queue_ms": 1.5,
            "load_ms": 2.5,
            **{name: usage[name] for name in ("prompt_tokens", "completion_tokens")},
        }
        assert {name: line[name] for name in expected} == expected
        assert line["ms"] >= 0
        assert line["timestamp"].endswith("Z")
        assert not [secret for secret in (PROMPT, said, SECRET) if secret in lines.getvalue()]

    def test_a_stream_is_logged_at_its_end(self, server, lines, eventually) -> None:
        with server.http.stream("POST", "/v1/completions", json=STREAM) as answer:
            answer.read()
        [line] = requests(lines, eventually)
        assert (line["status"], line["finish_reason"], line["completion_tokens"]) == (200, "stop", 11)

    def test_failures_and_probes(self, server, engine, lines, eventually) -> None:
        for path in ("/health", "/metrics", "/ready"):
            server.http.get(path)
        server.http.get("/v1/adapters/nobody")
        engine.breaks(0, AdapterLoadFailed("reading the adapter failed"))
        server.chat()
        told = requests(lines, eventually, 2)
        assert [(line["route"], line["status"], line["level"]) for line in told] == [
            ("/v1/adapters/{adapter_id}", 404, "info"),
            ("/v1/chat/completions", 503, "warning"),
        ]

    def test_what_is_refused_before_the_engine_has_a_reason(
        self, server, engine, dispatcher, lines, eventually
    ) -> None:
        server.complete(prompt="")
        server.complete(max_tokens="many")
        engine.add_error = EngineOverloaded("full", retry_after_s=1.0)
        server.complete()
        server.http.post("/generate", json={"inputs": "x", "parameters": {"adapter_id": "nobody"}})
        server.http.get("/v1/models", headers={"host": "elsewhere.example"})
        server.http.delete("/v1/models")
        dispatcher[0].app.state.services.draining.begin(60)
        server.complete()
        told = requests(lines, eventually, 7)
        assert [(line["status"], line["why"]) for line in told] == [
            (400, "invalid_value"),
            (400, "invalid_value"),
            (429, "server_overloaded"),
            (404, "model_not_found"),
            (403, "host_not_allowed"),
            (405, "method_not_allowed"),
            (503, "server_stopping"),
        ]

    def test_what_is_refused_before_it_has_a_route_is_told_by_its_path(
        self, server, dispatcher, lines, eventually
    ) -> None:
        server.http.get("/nowhere%0a%1b[31m?key=secret")
        server.http.get("/v1/models", headers={"host": "elsewhere.example"})
        dispatcher[0].app.state.services.draining.begin(60)
        server.http.post(f"/v1/{'x' * 5000}")
        told = requests(lines, eventually, 3)
        assert [(line.get("route"), line["path"], line["status"]) for line in told] == [
            (None, "/nowhere%0a%1b[31m", 404),
            (None, "/v1/models", 403),
            (None, f"/v1/{'x' * 196}", 503),
        ]
        raw = RequestInfo({"method": "GET", "headers": [], "raw_path": "/a\n\x1b\u2028é".encode()})
        assert facts(raw)["path"] == "/a\\n\\x1b\\xe2\\x80\\xa8\\xc3\\xa9"

    def test_an_unexpected_exception_has_the_request_id_and_no_variables(
        self, server, engine, lines, eventually
    ) -> None:
        engine.breaks(0, ZeroDivisionError())
        body, headers = {"model": "tiny-base", "prompt": PROMPT}, {"x-request-id": "broken-1"}
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 500
        requests(lines, eventually)
        [error] = [line for line in parsed(lines) if line["level"] == "error"]
        assert error["request_id"] == "broken-1"
        assert "ZeroDivisionError" in error["exception"]
        assert PROMPT not in lines.getvalue()

    def test_prompts_with_log_prompts(self, make_server, lines, eventually) -> None:
        server = make_server(log_prompts=True)
        server.chat(PROMPT, user="x" * 5000)
        server.http.get("/v1/adapters")
        told = requests(lines, eventually, 2)
        assert PROMPT in told[0]["request_text"]
        assert "Hello w" in told[0]["answer_text"]
        assert len(told[0]["request_text"]) == MAX_SHOWN
        assert "request_text" not in told[1]

    def test_a_change_of_an_adapter_names_it(self, server, make_adapter, lines, eventually) -> None:
        server.upload(make_adapter(), "mia")
        server.http.patch("/v1/adapters/mia", json={"aliases": {"prod": 1}})
        server.http.delete("/v1/adapters/mia@1?force=true")
        _, *told = requests(lines, eventually, 4)
        named = [
            (line["method"], line.get("adapter_id"), line.get("adapter_version"), line.get("path")) for line in told
        ]
        assert named == [
            ("POST", "mia", "1", None),
            ("PATCH", None, None, "/v1/adapters/mia"),
            ("DELETE", None, None, "/v1/adapters/mia@1"),
        ]

    def test_a_disconnect(self, server, engine, lines, eventually) -> None:
        engine.breaks(1, HANG)
        with server.http.stream("POST", "/v1/completions", json=STREAM):
            pass
        [line] = requests(lines, eventually)
        assert (line["finish_reason"], line["why"], line["level"]) == ("abort", "client", "info")
        assert "broken" not in line

    @pytest.mark.parametrize("error", [ServerStopping("over"), RequestTimeout("late"), AdapterDeleted("by force")])
    def test_a_stream_that_fails_behind_its_first_token(self, server, engine, lines, eventually, error) -> None:
        engine.breaks(1, error)
        assert server.http.post("/v1/completions", json=STREAM).status_code == 200
        [line] = requests(lines, eventually)
        why = name_of(type(error))
        assert (line["status"], line["why"], line["broken"], line["level"]) == (200, why, True, "warning")


class TestForm:
    def test_text_in_a_terminal(self) -> None:
        out, plain = Terminal(), io.StringIO()
        with logs.written("auto", "info", out):
            logging.getLogger("lorasrv.x").warning("disk %s", "slow", extra={"n": 1})
        assert "disk slow" in out.getvalue()
        assert not out.getvalue().startswith("{")
        with logs.written("text", "info", plain):
            logging.getLogger("lorasrv.x").warning("disk slow")
        assert "disk slow" in plain.getvalue()
        assert "\x1b" not in plain.getvalue()

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_tracebacks_show_no_variables(self, form: str) -> None:
        out = Terminal()
        with logs.written(form, "info", out):
            try:
                secret = SECRET
                raise KeyError(len(secret))
            except KeyError:
                logging.getLogger("lorasrv.x").exception("failed")
        assert "KeyError" in out.getvalue()
        assert SECRET not in out.getvalue()

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_client_data_forges_no_line(self, form: str) -> None:
        out = io.StringIO()
        evil = "x\n2026-11-22T09:00:00 [info     ] forged\r\x1b[2J\u2028\x85"
        with logs.written(form, "info", out):
            logging.getLogger("lorasrv.x").warning("adapter %s is bad", evil, extra={"who": evil})
            try:
                raise ValueError(evil)
            except ValueError:
                logging.getLogger("lorasrv.x").exception("failed")
        assert not [line for line in out.getvalue().splitlines() if line.startswith(("2026-11-22T09:00:00", "\x1b"))]
        assert not {"\r", "\x1b"} & set(out.getvalue())
        assert "ValueError: x" in out.getvalue()
        assert form == "text" or len(out.getvalue().splitlines()) == 2

    def test_levels(self) -> None:
        out = io.StringIO()
        with logs.written("json", "warning", out):
            logging.getLogger("api.x").info("no")
        with logs.written("json", "debug", out):
            logging.getLogger("api.x").debug("ours")
            logging.getLogger("uvicorn.error").info("theirs")
            logging.getLogger("uvicorn.error").warning("theirs, loud")
        assert [line["event"] for line in parsed(out)] == ["ours", "theirs, loud"]

    def test_warnings_are_lines_too(self) -> None:
        out = io.StringIO()
        with warnings.catch_warnings(), logs.written("json", "info", out):
            warnings.simplefilter("always")
            warnings.warn("old", UserWarning, stacklevel=1)
        [line] = parsed(out)
        assert (line["logger"], line["level"]) == ("py.warnings", "warning")
        assert line["event"].startswith("UserWarning: old (")

    def test_logging_is_restored(self) -> None:
        root = logging.getLogger()
        before = list(root.handlers), root.level, logging.getLogger("api").level, warnings.showwarning
        with logs.written("json", "debug", io.StringIO()):
            assert root.handlers != before[0]
        assert (root.handlers, root.level, logging.getLogger("api").level, warnings.showwarning) == before


def test_an_observer_that_raises_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[RequestInfo] = []

    def broken(_: RequestInfo) -> None:
        raise ZeroDivisionError

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def send(_: Any) -> None: ...

    scope = {"type": "http", "method": "BREW", "headers": []}
    asyncio.run(AccessMiddleware(app, [broken, seen.append])(scope, send, send))  # type: ignore[arg-type]
    assert (seen[0].status, seen[0].method, seen[0].route) == (204, "other", "none")
    assert "observing request" in caplog.text


def test_a_request_is_over_when_its_last_answer_is() -> None:
    """The engine ends the answers for a client that has left within a step."""
    seen, told = RequestInfo({"method": "POST", "headers": []}), list[list[str]]()
    token = REQUEST_LISTENER.set(seen)
    traffic = RequestStats()
    for number in range(2):
        traffic.on_accepted([EngineCoreRequest(RequestId(f"r{number}"), (1,), 1, SamplingParams())], 0.0)
    REQUEST_LISTENER.reset(token)
    traffic.on_finished(RequestId("r0"), "client")
    seen.on_response_ended(lambda: told.append([answer.request_id for answer in seen.answers]))
    assert not told
    traffic.on_finished(RequestId("r1"), "client")
    assert told == [["r0", "r1"]]
