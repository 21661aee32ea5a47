"""Hosts and origins that a server without keys takes, request ids, and the answer for an unexpected exception."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from api.asgi.middleware import HeadRequests, host_name

BODY = {"model": "tiny-base", "prompt": "x"}


def get(server: Any, path: str = "/v1/models", **headers: str) -> Any:
    return server.http.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})


class TestHost:
    @pytest.mark.parametrize(
        "host", ["127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:80", "127.9.9.9"]
    )
    def test_loopback_names_are_served(self, server, host: str) -> None:
        assert get(server, host=host).status_code == 200

    @pytest.mark.parametrize(
        "host",
        [
            *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
            *("127.0.0.1@evil", "x/health?", "10.0.0.1", "0.0.0.0", "", "localhost:x", "[::2]"),
        ],
    )
    def test_others_are_refused_on_every_route(self, server, engine, host: str) -> None:
        for path in ("/v1/models", "/health", "/metrics", "/nowhere"):
            response = get(server, path, host=host)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")
        assert server.http.post("/v1/completions", json=BODY, headers={"host": host}).status_code == 403
        assert engine.added == []

    def test_two_hosts_are_refused(self, server) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n")
            assert connection.recv(10_000).split()[1] in (b"400", b"403")

    def test_insecure_serves_any_name(self, make_server) -> None:
        server = make_server(host="0.0.0.0", insecure=True)
        assert get(server, host="models.example").status_code == 200

    def test_host_name(self) -> None:
        assert host_name("[::1]:8000") == "::1"
        assert host_name("a b") == host_name("a:b:c") == host_name("localhost:123456") == ""


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/nowhere"])
def test_a_length_that_is_given_twice_ends_the_connection(server, engine, path: str) -> None:
    """A proxy may take what follows the chunks for the rest of the body."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {5 + len(hidden)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode() + hidden)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.split()[1] in (b"400", b"422")
    assert b"given twice" in answer


@pytest.mark.parametrize(
    ("begins", "status"),
    [
        ("GET /v1/models HTTP/1.0", 200),
        ("GET /v1/models HTTP/2.0", 400),
        ("GET /v1/models HTTP/0.9", 400),
        ("PRI * HTTP/2.0", 400),
    ],
)
def test_other_versions_of_http_are_refused_by_name(server, begins: str, status: int) -> None:
    """The last one begins HTTP/2 with prior knowledge; what follows it is no second request."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(f"{begins}\r\nHost: 127.0.0.1\r\n\r\nSM\r\n\r\n".encode())
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    assert int(answer.split()[1]) == status
    assert (b"is not served, only HTTP/1.1" in answer) == (status == 400)
    assert answer.count(b"HTTP/1.1 400") <= 1


class TestOrigin:
    def test_none_and_the_servers_own_are_served(self, server) -> None:
        assert get(server).status_code == get(server, origin=server.url).status_code == 200

    @pytest.mark.parametrize(
        "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost", "http://["]
    )
    def test_pages_are_refused(self, server, engine, origin: str) -> None:
        response = server.http.post("/v1/completions", json=BODY, headers={"origin": origin})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert engine.added == []

    def test_allowed_origins(self, make_server) -> None:
        server = make_server(allowed_origins="https://app.example/, http://localhost:3000")
        response = get(server, origin="https://app.example")
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        exposed = response.headers["access-control-expose-headers"]
        assert "x-adapter-id" in exposed
        assert "x-adapter-fallback" in exposed
        preflight = {"origin": "http://localhost:3000", "access-control-request-method": "PUT"}
        assert server.http.options("/v1/blobs/sha256:0", headers=preflight).status_code == 200
        assert get(server, origin="https://other.example").status_code == 403

    def test_preflights_are_refused_by_default(self, server) -> None:
        preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        response = server.http.options("/v1/completions", headers=preflight)
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers


class TestEnvelope:
    def test_a_valid_request_id_comes_back_also_with_a_refusal(self, server) -> None:
        for path, headers in (("/v1/models", {}), ("/nowhere", {}), ("/v1/models", {"host": "evil.example"})):
            answer = get(server, path, x_request_id="trace-1.2:A_b", **headers)
            assert answer.headers["x-request-id"] == "trace-1.2:A_b"

    @pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "é", "<script>"])
    def test_an_invalid_request_id_is_replaced(self, server, request_id: str) -> None:
        given = server.http.get("/health", headers={"x-request-id": request_id.encode()}).headers["x-request-id"]
        assert given.startswith("req-")
        assert given != get(server).headers["x-request-id"]

    def test_a_bug_is_a_bare_500(self, server, engine, caplog) -> None:
        engine.add_error = ZeroDivisionError("secret of /srv")
        response = server.chat()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        assert "Traceback" not in response.text
        assert response.headers["x-request-id"] in caplog.text
        engine.add_error = None
        assert server.chat().status_code == 200

    def test_a_bug_after_the_headers_closes_the_connection(self, server, engine, eventually) -> None:
        engine.breaks(2, ZeroDivisionError())
        with pytest.raises(Exception, match=r"incomplete|closed|disconnected"):
            server.chat(stream=True)
        eventually(lambda: engine.aborted)


def ask(answer: Callable[[Any], Awaitable[Response]], method: str) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    app = HeadRequests(Starlette(routes=[Route("/", answer, methods=["GET"])]))
    scope = {"type": "http", "method": method, "path": "/", "headers": [], "query_string": b"", "asgi": {}}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert scope["method"] == method
    return sent


@pytest.mark.parametrize(("method", "most_read", "length"), [("HEAD", 2, 0), ("GET", 1000, 10**6)])
def test_head_reads_a_body_no_further_than_its_first_piece(method: str, most_read: int, length: int) -> None:
    seen: list[str] = []

    async def pieces() -> AsyncIterator[bytes]:
        try:
            for _ in range(1000):
                seen.append("read")
                yield b"x" * 1000
        finally:
            seen.append("closed")

    async def answer(_: Any) -> Response:
        return StreamingResponse(pieces(), headers={"content-length": "1000000"})

    sent = ask(answer, method)
    assert seen.count("read") <= most_read
    assert seen[-1] == "closed"
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"content-length"]) == (200, b"1000000")
    assert (len(b"".join(message["body"] for message in sent[1:])), sent[-1]["more_body"]) == (length, False)


def test_head_of_a_small_answer_and_of_a_failure() -> None:
    async def answer(_: Any) -> Response:
        return JSONResponse({"a": 1})

    async def fails(_: Any) -> Response:
        raise ZeroDivisionError

    start, body = ask(answer, "HEAD")
    assert (start["status"], dict(start["headers"])[b"content-length"], body["body"]) == (200, b"7", b"")
    with pytest.raises(ZeroDivisionError):
        ask(fails, "HEAD")
