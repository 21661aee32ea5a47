"""A server that is about to end: what it refuses and what it still answers. The engine is the fake one.

That a stream continues to its end: tests/api/process/test_failures.py.
"""

import asyncio
import signal
from types import SimpleNamespace

import pytest
from clock import Clock
from starlette.types import Message, Receive, Scope, Send

from api.asgi.draining import Draining, DrainMiddleware
from api.asgi.draining_server import GRACE_S
from api.engine_server import _EngineServer
from lorasrv.engine.watchdog import Watchdog

pytestmark = pytest.mark.anyio


def test_time_is_shortened_never_lengthened() -> None:
    clock = Clock()
    draining = Draining(clock)
    assert (draining.is_on, draining.is_over) == (False, False)
    draining.begin(25.0)
    assert (draining.is_on, draining.is_over) == (True, False)
    clock.now += 10
    draining.begin(25.0)
    clock.now += 15
    assert draining.is_over
    hurried = Draining(clock)
    hurried.begin(25.0)
    hurried.begin(0.0)
    assert hurried.is_over


@pytest.fixture
def draining(server, dispatcher) -> Draining:
    """Of the running application."""
    found = dispatcher[0].app.state.services.draining
    assert isinstance(found, Draining)
    return found


def test_new_requests_are_refused_and_monitoring_is_answered(server, draining, engine) -> None:
    assert server.http.get("/ready").status_code == 200
    draining.begin(25.0)
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json(), ready.headers["connection"]) == (503, {"status": "draining"}, "close")
    for path in ("/health", "/ping", "/metrics"):
        assert server.http.get(path).status_code == 200, f"{path}: the process lives"
    for answer in (server.chat(), server.complete(), server.http.get("/v1/models"), server.http.post("/v1/batches")):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_stopping"
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["connection"] == "close"
        assert "x-request-id" in answer.headers
    tgi = server.http.post("/generate", json={"inputs": "hi"})
    assert (tgi.status_code, tgi.json()["error_type"]) == (503, "generation")
    assert not engine.added


@pytest.mark.parametrize("has_begun", [False, True])
async def test_what_is_cancelled_at_the_end(has_begun: bool) -> None:
    """A body that still arrives, or an answer that goes on for longer: the first is refused, the other is cut."""
    clock, sent = Clock(0.0), list[Message]()
    draining = Draining(clock)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/completions", "headers": [], "method": "POST"}
    answering = asyncio.create_task(DrainMiddleware(app, draining)(scope, anext, send))
    await asyncio.sleep(0)
    draining.begin(5.0)
    clock.now += 5.0
    answering.cancel()
    await answering
    assert [message.get("status") for message in sent] == ([200] if has_begun else [503, None])
    if not has_begun:
        assert b"server_stopping" in sent[1]["body"]


async def test_lifespan_messages_pass() -> None:
    passed = []

    async def app(scope, receive, send) -> None:
        passed.append(scope["type"])

    draining = Draining()
    draining.begin(1.0)
    await DrainMiddleware(app, draining)({"type": "lifespan"}, None, None)
    assert passed == ["lifespan"]


@pytest.mark.parametrize(("first", "seconds"), [(signal.SIGTERM, 25.0), (signal.SIGINT, GRACE_S)])
async def test_signals(make_server, dispatcher, engine, first: signal.Signals, seconds: float) -> None:
    """The first drains and pauses batches; the second ends; the third does not even wait for the engine."""
    make_server()
    app, clock, closed = dispatcher[0].app, Clock(), []
    draining = app.state.services.draining
    draining._clock = clock

    async def close() -> None:
        closed.append(clock.now)

    app.state.batches = SimpleNamespace(close=close)
    server = _EngineServer(app, lambda: None, Watchdog(engine, 0.0))
    busy = asyncio.create_task(asyncio.sleep(60))
    server.server_state.tasks.add(busy)
    assert not await server.on_tick(1)
    server.handle_exit(first, None)
    assert draining.is_on
    for _ in range(3):
        assert not await server.on_tick(1), "a request still runs"
        await asyncio.sleep(0)
    assert len(closed) == 1
    clock.now += seconds - 0.1
    assert not await server.on_tick(1)
    server.server_state.tasks.clear()
    assert await server.on_tick(1), "no request runs"
    server.server_state.tasks.add(busy)
    assert not await server.on_tick(1)
    server.handle_exit(signal.SIGTERM, None)
    assert await server.on_tick(1)
    assert not server.force_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit
    busy.cancel()
