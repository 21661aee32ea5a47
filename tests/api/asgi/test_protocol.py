"""The protocol and the bounds of bodies around a small application: time, bytes, and how connections end."""

import asyncio
import errno
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fastapi.routing import APIRoute
from raw_client import RawClient, head_of, json_request, pieces
from server import listening
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from api.app import _ROUTES
from api.asgi import body_limits, protocol
from api.asgi.body_limits import MAX_BARE_BYTES, MAX_JSON_BYTES, BodyLimitMiddleware
from api.asgi.json_body import MAX_VALUES, JsonRoute, parse_json
from api.asgi.limits import ConnectionLimits, no_cuts
from api.asgi.protocol import LINGER_S, MAX_HEAD_BYTES, WRITE_BUFFER_BYTES, _Waiting, bounded
from api.asgi.response_limits import LARGE_BYTES, ResponseLimitMiddleware
from api.auth.principal import ANYBODY, Caller
from api.errors import describe
from lorasrv.errors import EngineOverloaded

pytestmark = pytest.mark.anyio
BOUNDS = ConnectionLimits(
    max_connections=8, header_timeout_s=3.0, body_timeout_s=3.0, write_timeout_s=3.0, keep_alive_s=3.0
)
MAX_HELD = 9 << 20
LARGE = b"0123456789" * 400_000
MESSAGES = [{"role": "user", "content": "hi"}]


class App:
    """An application of a method a path; `gone`: what became of requests."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.hold = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await getattr(self, scope["path"].rpartition("/")[2])(scope, receive, send)

    async def length(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except HTTPException as error:
            await describe(error).response()(scope, receive, send)
        except ClientDisconnect:
            self.gone.append("reading")
        else:
            await PlainTextResponse(str(len(body)))(scope, receive, send)

    async def held(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        self.gone.append("waiting")
        await self.hold.wait()
        await PlainTextResponse("done")(scope, receive, send)

    async def large(self, scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(LARGE)(scope, receive, send)

    async def unread(self, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({"unread": True}, 404)(scope, receive, send)

    async def endless(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stream() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
                await asyncio.sleep(0)

        await send({"type": "http.response.start", "status": 200, "headers": []})
        sending = asyncio.create_task(stream())
        while (await receive())["type"] != "http.disconnect":
            pass
        sending.cancel()
        self.gone.append("streaming")


class DrivenTimers:
    """The event loop, as connections see it: their timers are due once a test has let their time pass."""

    def __init__(self) -> None:
        self._now, self._timers = 0.0, list[tuple[float, asyncio.Handle]]()
        self.loop: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loop, name)

    def call_later(self, seconds: float, callback: Callable[..., object], *given: object) -> asyncio.Handle:
        handle = asyncio.Handle(callback, given, self.loop)
        self._timers.append((self._now + seconds, handle))
        return handle

    def let_pass(self, seconds: float) -> None:
        asyncio.run_coroutine_threadsafe(self._run_until(self._now + seconds), self.loop).result(30)

    async def _run_until(self, end: float) -> None:
        self._timers = [timer for timer in self._timers if not timer[1].cancelled()]
        while self._timers and (first := min(self._timers, key=lambda timer: timer[0]))[0] <= end:
            self._timers.remove(first)
            self._now, handle = first
            if not handle.cancelled():
                handle._run()
        self._now = end


@pytest.fixture(scope="module")
def edge() -> Iterator[SimpleNamespace]:
    app, cuts, timers = App(), no_cuts(), DrivenTimers()
    layers = ResponseLimitMiddleware(BodyLimitMiddleware(app, MAX_HELD))

    class Driven(bounded(BOUNDS, cuts)):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            timers.loop, self.loop = self.loop, timers

    with (
        listening(layers, http=Driven, lifespan="off") as running,
        httpx2.Client(base_url=f"http://127.0.0.1:{running.port}", trust_env=False, timeout=120) as http,
    ):
        edge = SimpleNamespace(app=app, port=running.port, http=http, state=running.state, cuts=cuts)
        edge.let_pass = timers.let_pass
        yield edge


@pytest.fixture(autouse=True)
def _all_gone(edge: SimpleNamespace, eventually: Callable[..., None]) -> Iterator[None]:
    """Whatever a test does, no connection and no task stays behind."""
    edge.app.gone.clear()
    edge.cuts.clear()
    yield
    edge.http._transport._pool.close()
    if edge.state.connections:
        edge.let_pass(60.0)
    eventually(lambda: not edge.state.connections and not edge.state.tasks, 20)


@pytest.fixture
def connected(edge: SimpleNamespace, eventually: Callable[..., None]) -> Callable[..., Any]:
    """The only connection at the edge, once so many bytes of what it waits for have arrived."""

    def find(received: int = 0, waiting: _Waiting = _Waiting.FOR_HEAD) -> Any:
        eventually(lambda: [(c._waiting, c._num_received) for c in edge.state.connections] == [(waiting, received)])
        return next(iter(edge.state.connections))

    return find


def exchange(edge: SimpleNamespace, *sent: bytes, pause_s: float = 0.0) -> tuple[int, dict[str, str], Any]:
    """Send this on a new connection; return the one answer before the server closes it."""
    with RawClient(edge.port) as client:
        return client.send(*sent, pause_s=pause_s).answer()


class TestTime:
    def test_a_silent_connection_is_closed(self, edge, connected) -> None:
        with RawClient(edge.port) as client:
            connected()
            edge.let_pass(3.0)
            assert client.read() == b""

    @pytest.mark.parametrize("begin", [b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
    def test_half_a_head(self, edge, connected, begin: bytes) -> None:
        with RawClient(edge.port) as client:
            client.send(begin)
            connected(len(begin))
            edge.let_pass(3.0)
            status, headers, body = client.answer()
        assert (status, headers["connection"], body["error"]["code"]) == (408, "close", "header_timeout")
        assert edge.cuts == {"header_timeout": 1}

    def test_bytes_now_and_then_do_not_prolong_a_head(self, edge, connected) -> None:
        begin, drop = b"GET / HTTP/1.1\r\n", b"A: b\r\n"
        with RawClient(edge.port) as client:
            client.send(begin)
            for number in range(1, 4):
                client.send(drop)
                connected(len(begin) + number * len(drop))
                edge.let_pass(1.0)
            assert client.answer()[0] == 408

    def test_a_reset_at_the_end_of_the_time_is_no_error(self, edge, connected, eventually, monkeypatch, caplog) -> None:
        def reset() -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

        with RawClient(edge.port) as client:
            client.send(b"GET / HT")
            monkeypatch.setattr(connected(8)._real, "write_eof", reset)
            edge.let_pass(3.0)
            assert edge.cuts == {"header_timeout": 1}
        eventually(lambda: not edge.state.connections)
        assert caplog.text == ""

    def test_a_body_that_stops_and_one_that_drips(self, edge, connected, eventually) -> None:
        for drops in (0, 1):
            with RawClient(edge.port) as client:
                client.send(head_of("/length", "Content-Length: 100000"))
                connected(0, _Waiting.FOR_BODY)
                for number in range(1, 4):
                    client.send(b"a" * drops)
                    connected(number * drops, _Waiting.FOR_BODY)
                    edge.let_pass(1.0)
                status, _, body = client.answer()
            assert (status, body["error"]["code"]) == (408, "body_timeout")
            assert "1024 bytes per second" in body["error"]["message"]
        eventually(lambda: edge.app.gone == ["reading"] * 2)
        assert edge.cuts == {"body_timeout": 2}

    def test_a_slow_body_that_advances_is_read(self, edge, connected) -> None:
        with RawClient(edge.port) as client:
            client.send(head_of("/length", "Content-Length: 12400", "Connection: close"))
            for _ in range(3):
                connected(0, _Waiting.FOR_BODY)
                client.send(b"x" * 3100)
                connected(3100, _Waiting.FOR_BODY)
                edge.let_pass(3.0)
            assert client.send(b"x" * 3100).read().endswith(b"\r\n\r\n12400")

    def test_an_idle_connection_may_be_used_until_it_is_closed(self, edge, connected) -> None:
        for begin in (b"", b"GET / HT"):
            with RawClient(edge.port) as client:
                for _ in range(3):
                    client.send(head_of("/length", method="GET")).read_until(b"\r\n\r\n0")
                    edge.let_pass(2.0)
                if begin:
                    client.send(begin)
                    connected()
                    edge.let_pass(3.0)
                    status, _, body = client.answer()
                    assert (status, body["error"]["code"]) == (408, "header_timeout")
                else:
                    edge.let_pass(1.0)
                    assert client.read() == b""


class TestReaders:
    def test_a_client_that_never_reads_is_disconnected(self, edge, eventually) -> None:
        with RawClient(edge.port, buffer=4096) as client:
            client.send(head_of("/endless", method="GET"))
            eventually(lambda: any(c.flow.write_paused for c in edge.state.connections))
            edge.let_pass(3.0)
            eventually(lambda: edge.app.gone == ["streaming"])
            assert edge.cuts == {"slow_reader": 1}
            with pytest.raises(ConnectionResetError):
                client.read()

    def test_a_client_that_reads_slowly_is_not(self, edge, connected, eventually) -> None:
        with RawClient(edge.port, buffer=4096) as client:
            connection = connected()
            # Else the kernel would take all that waits at once.
            connection._real.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.send(head_of("/endless", method="GET"))
            for _ in range(8):
                eventually(lambda: connection._write_timer)
                timer, size = connection._write_timer, connection._real.get_write_buffer_size()
                while connection._write_timer is timer and size - connection._real.get_write_buffer_size() < 3072:
                    assert len(client.read(1000)) == 1000
                edge.let_pass(2.0)
            assert edge.app.gone == []
            assert not edge.cuts

    def test_an_answer_in_one_piece_waits_as_a_stream_does(self, edge, eventually) -> None:
        clients = [RawClient(edge.port, buffer=4096).send(head_of("/large", method="GET")) for _ in range(4)]
        eventually(
            lambda: len(edge.state.connections) == 4 and all(c.flow.write_paused for c in edge.state.connections)
        )
        unsent = [c._real.get_write_buffer_size() for c in edge.state.connections]
        assert max(unsent) <= WRITE_BUFFER_BYTES
        edge.let_pass(3.0)
        eventually(lambda: not edge.state.connections)
        assert edge.cuts == {"slow_reader": 4}
        for client in clients:
            client.socket.close()
        answer = edge.http.get("/large")
        assert (answer.content == LARGE, answer.headers["content-length"]) == (True, str(len(LARGE)))
        assert edge.http.head("/large").headers["content-length"] == str(len(LARGE))


def scope_of(name: str | None, **fields: Any) -> Scope:
    """The scope of a request of this key, or of none."""
    caller = ANYBODY if name is None else Caller(name, frozenset())
    return {"type": "http", "method": "POST", "path": "/x", "headers": [], "state": {"caller": caller}, **fields}


class TestLargeAnswers:
    """Answers that their clients do not read."""

    async def test_all_together_are_bounded_and_one_key_has_half(self) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await PlainTextResponse(b"x" * scope["size"])(scope, receive, send)

        most = 10 * LARGE_BYTES
        bounds, read, half = ResponseLimitMiddleware(app, most), asyncio.Event(), most // 2

        async def ask(name: str | None, size: int, *, reads: bool = True) -> tuple[int, int]:
            async def send(message: Message) -> None:
                if not reads:
                    await read.wait()
                sent.append(message)

            sent: list[Message] = []
            await bounds(scope_of(name, size=size), None, send)
            assert [m.get("more_body", False) for m in sent[1:]] == [True] * (len(sent) - 2) + [False]
            return sent[0]["status"], sum(len(m["body"]) for m in sent[1:])

        slow = asyncio.create_task(ask("ann", half, reads=False))
        await asyncio.sleep(0)
        assert (await ask("ann", LARGE_BYTES + 1))[0] == 503
        assert await ask("ann", LARGE_BYTES) == (200, LARGE_BYTES), "small ones are not counted"
        assert await ask("bob", half) == (200, half)
        assert (await ask("bob", half + 1))[0] == 503
        read.set()
        assert await slow == (200, half)
        assert await ask(None, 2 * most) == (200, 2 * most), "alone, an answer may be larger than all may be"
        assert not bounds._unsent_by

    async def test_what_is_read_as_it_is_sent_is_not_counted(self) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(b"content-length", str(3 * LARGE_BYTES).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for left in (2, 1, 0):
                assert not bounds._unsent_by
                await send({"type": "http.response.body", "body": b"x" * LARGE_BYTES, "more_body": bool(left)})

        async def send(message: Message) -> None:
            sent.append(message)

        bounds, sent = ResponseLimitMiddleware(app, 1), []
        await bounds(scope_of(None), None, send)
        assert sent[0]["status"] == 200
        assert sum(len(message.get("body", b"")) for message in sent) == 3 * LARGE_BYTES


class TestHeads:
    def test_connections_above_the_bound_are_refused(self, edge, eventually) -> None:
        clients = [RawClient(edge.port).send(b"GET ") for _ in range(BOUNDS.max_connections)]
        eventually(lambda: len(edge.state.connections) == BOUNDS.max_connections)
        status, headers, body = exchange(edge, head_of("/length", method="GET"))
        assert (status, headers["retry-after"]) == (503, "1")
        assert (body["error"]["code"], body["error"]["type"]) == ("too_many_connections", "server_error")
        assert edge.cuts == {"too_many_connections": 1}
        for client in clients:
            client.socket.close()
        eventually(lambda: not edge.state.connections)
        assert edge.http.get("/length").text == "0"

    @pytest.mark.parametrize("pause_s", [0.0, 0.01])
    def test_a_long_head(self, edge, pause_s: float) -> None:
        begin, line = b"GET /length HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", b"A: " + b"b" * 4000 + b"\r\n"
        with RawClient(edge.port) as client:
            client.send(begin, *[line] * 4, b"\r\n", pause_s=pause_s)
            assert client.read().endswith(b"\r\n\r\n0")
        status, _, body = exchange(edge, begin, *[line] * 5, pause_s=pause_s)
        assert (status, body["error"]["code"]) == (431, "headers_too_large")
        assert edge.cuts == {"headers_too_large": 1}
        assert str(MAX_HEAD_BYTES) in body["error"]["message"]

    @pytest.mark.parametrize(
        "sent", [b"\x16\x03\x01\x02\r\n\r\n", head_of("/length", "Transfer-Encoding: chunked") + b"zz\r\n"]
    )
    def test_other_protocols(self, edge, sent: bytes) -> None:
        status, _, body = exchange(edge, sent)
        assert (status, body["error"]["code"]) == (400, "invalid_http")
        assert edge.cuts == {"invalid_http": 1}


class TestBodies:
    def test_a_client_that_is_still_sending_reads_why_its_body_is_refused(self, edge) -> None:
        for body in (b" " * (3 * MAX_JSON_BYTES), pieces(3 * MAX_JSON_BYTES)):
            answer = edge.http.post("/length", content=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert str(MAX_JSON_BYTES) in answer.json()["error"]["message"]

    def test_an_unread_body_is_dropped_and_the_connection_stays(self, edge) -> None:
        assert edge.http.post("/unread", content=b" " * MAX_JSON_BYTES).status_code == 404
        with RawClient(edge.port) as client:
            client.send(head_of("/unread", "Content-Length: 200000")).read_until(b"}")
            client.send(b" " * 200_000, head_of("/length", method="GET")).read_until(b"\r\n\r\n0")

    def test_an_unread_body_that_drips_ends(self, edge, connected) -> None:
        with RawClient(edge.port) as client:
            client.send(head_of("/unread", "Content-Length: 200000")).read_until(b"}")
            for number in range(1, 6):
                client.send(b"a")
                connected(number, _Waiting.FOR_REST)
                edge.let_pass(LINGER_S / 5)
            assert client.read() == b""

    def test_an_endless_unread_body_ends(self, edge, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("api.asgi.protocol.LINGER_BYTES", 1 << 20)
        for path in ("/unread", "/length"):
            with RawClient(edge.port) as client:
                client.send(head_of(path, "Content-Length: 1000000000"))
                with pytest.raises((BrokenPipeError, ConnectionResetError)):
                    client.send(*[b" " * (1 << 16)] * 200)

    @pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
    def test_bodies_of_methods_without_one(self, edge, method: str) -> None:
        assert edge.http.request(method, "/length", content=b" " * MAX_BARE_BYTES).status_code == 200
        assert edge.http.request(method, "/length", content=b" " * (MAX_BARE_BYTES + 1)).status_code == 413

    @pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/blobs/length"), ("POST", "/length")])
    def test_only_uploads_may_be_long_and_only_with_their_length(self, edge, method: str, path: str) -> None:
        answer = edge.http.request(method, path, content=b" " * (MAX_JSON_BYTES + 1))
        assert answer.status_code == (413 if method == "POST" else 200)
        assert answer.text == str(MAX_JSON_BYTES + 1) or method == "POST"
        unsaid = edge.http.request(method, path, content=pieces(1 << 16))
        assert unsaid.status_code == (413 if method == "PUT" else 200)

    @pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
    def test_compressed_bodies(self, edge, method: str) -> None:
        for coding in ("gzip", "br", "deflate, gzip", "zstd"):
            answer = edge.http.request(method, "/length", content=b"x", headers={"content-encoding": coding})
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")

    def test_all_bodies_together_are_bounded(self, edge, eventually) -> None:
        first = threading.Thread(target=lambda: edge.http.post("/held", content=b" " * MAX_JSON_BYTES))
        first.start()
        eventually(lambda: edge.app.gone == ["waiting"])
        answer = edge.http.post("/length", content=b" " * (2 << 20))
        assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("server_busy", "1")
        assert edge.http.post("/length", content=b" " * (1 << 19)).status_code == 200
        edge.app.hold._loop.call_soon_threadsafe(edge.app.hold.set)
        first.join(20)
        assert edge.http.post("/length", content=b" " * MAX_JSON_BYTES).status_code == 200

    async def test_one_key_leaves_room_for_others(self) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive())["more_body"]:
                pass
            await PlainTextResponse("whole")(scope, receive, send)

        edge, end = BodyLimitMiddleware(app, 1000), asyncio.Event()

        async def ask(name: str | None, *sizes: int) -> int:
            """The status for a body in pieces of these sizes, which ends with one of 0."""

            async def receive() -> Message:
                if not left:
                    await end.wait()
                size = left.pop(0) if left else 0
                return {"type": "http.request", "body": b"x" * size, "more_body": bool(size)}

            async def send(message: Message) -> None:
                sent.append(message.get("status"))

            left, sent = list(sizes), []
            try:
                await edge(scope_of(name), receive, send)
            except HTTPException as error:
                return error.status_code
            return sent[0]

        slow = [asyncio.create_task(ask("ann", 200)) for _ in range(2)]
        await asyncio.sleep(0)
        assert await ask("ann", 200) == 503
        assert await ask("bob", 500, 0) == 200
        assert await ask("bob", 501, 0) == 503
        assert await ask(None, 600, 0) == 200, "without keys there is nobody to share with"
        assert await ask(None, 601, 0) == 503
        end.set()
        assert await asyncio.gather(*slow) == [200, 200]
        assert not edge._held_by

    async def test_memory_of_large_bodies_is_released_once_for_all(self, monkeypatch) -> None:
        monkeypatch.setattr(body_limits, "RELEASE_AFTER_S", 0.0)
        loop, released, count = asyncio.get_running_loop(), asyncio.Event(), []

        def release() -> None:
            count.append(1)
            loop.call_soon_threadsafe(released.set)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()

        async def send(_: Message) -> None: ...

        async def ask(size: int) -> None:
            body = asyncio.Future[Message]()
            body.set_result({"type": "http.request", "body": b"x" * size, "more_body": False})
            await edge(scope_of(None), lambda: body, send)  # type: ignore[arg-type]

        edge = BodyLimitMiddleware(app, release=release)
        await ask(body_limits.LARGE_BYTES)
        assert edge._releasing is None
        for total in (1, 2):
            for _ in range(3):
                await ask(body_limits.LARGE_BYTES + 1)
            await released.wait()
            released.clear()
            assert len(count) == total

    def test_a_million_values(self) -> None:
        most = b"[" + b",".join([b"0"] * (MAX_VALUES - 1)) + b"]"
        assert len(parse_json(most)) == MAX_VALUES - 1
        with pytest.raises(HTTPException, match="more than 1048576 values"):
            parse_json(b"[" + most[:-1] + b"]]")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream"])
def test_a_disconnect_cancels_the_compilation_of_a_grammar(server, engine, eventually, monkeypatch, path: str) -> None:
    seen: list[str] = []

    async def compile_(*_: object) -> None:
        seen.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    monkeypatch.setattr(engine.grammars, "compile", compile_)
    monkeypatch.setattr(engine, "tokenizer", SimpleNamespace(encode=lambda text: list(text.encode())))
    body = {"inputs": "hi", "parameters": {"grammar": {"type": "regex", "value": "a+"}}}
    if path.startswith("/v1"):
        body = {"model": "tiny-base", "guided_regex": "a+", "prompt": "hi", "messages": MESSAGES}
        del body["messages" if path == "/v1/completions" else "prompt"]
    with RawClient(server.port) as client:
        client.send(json_request(path, **body))
        eventually(lambda: seen == ["begun"])
    eventually(lambda: seen == ["begun", "ended"])
    assert engine.added == []


@pytest.mark.parametrize(
    ("soft", "hard", "most", "raised"),
    [
        (1024, resource.RLIM_INFINITY, 2048, 2624),
        (1 << 20, 1 << 20, 2048, None),
        (1024, 4096, 2048, 2624),
        (256, 1024, 448, 1024),
        (48, 48, 12, None),
    ],
)
def test_as_many_connections_as_the_system_has_files_for(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int, raised: int | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(protocol.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(protocol.resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert protocol.allow_connections(ConnectionLimits()) == ConnectionLimits(max_connections=most)
    assert limits == ([] if raised is None else [(raised, hard)])


def test_every_route_reads_its_body_strictly() -> None:
    routes = [route for module in _ROUTES for route in module.router.routes if isinstance(route, APIRoute)]
    assert [route.path for route in routes if route.body_field and not isinstance(route, JsonRoute)] == []
    assert len([route for route in routes if route.body_field]) > 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "x"}),
        ("/generate", {"inputs": "x"}),
    ],
)
def test_a_full_queue_refuses_before_anything_of_the_body_is_used(
    server, engine, monkeypatch, path: str, body: dict[str, Any]
) -> None:
    def full(principal: str) -> None:
        assert principal == ANYBODY.principal
        raise EngineOverloaded("4 requests are queued already, and 4 may be", retry_after_s=7.2)

    monkeypatch.setattr(engine, "check_admission", full)
    monkeypatch.setattr(engine, "chat_template", None)
    answer = server.http.post(path, json={"model": "tiny-base", **body})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "8")
    assert "4 may be" in answer.text


async def test_the_applications_own_answers_go_in_pieces(server, dispatcher) -> None:
    whole = server.http.get("/openapi.json").content
    assert len(whole) > LARGE_BYTES
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    address, path = ("127.0.0.1", server.port), "/openapi.json"
    headers = [(b"host", f"127.0.0.1:{server.port}".encode())]
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}
    await dispatcher[0].app(scope | {"client": address, "server": address}, receive, send)
    bodies = [message["body"] for message in sent[1:]]
    assert b"".join(bodies) == whole
    assert max(map(len, bodies)) < LARGE_BYTES
