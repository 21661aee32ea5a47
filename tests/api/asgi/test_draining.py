"""A server that is about to end: who is told what, and that what it has begun goes on. The engine is the fake one."""

import asyncio
import signal

import pytest
from clock import Clock
from fake_engine import say
from starlette.testclient import TestClient

from api.asgi.draining import Draining, DrainMiddleware
from api.asgi.limits import ConnectionLimits
from api.server import GRACE_S, _Uvicorn
from lorasrv.engine.watchdog import Watchdog


def test_time_is_shortened_never_lengthened() -> None:
    clock = Clock()
    draining = Draining(clock)
    assert not draining.is_on
    assert not draining.is_over
    draining.begin(25.0)
    assert draining.is_on
    assert not draining.is_over
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


def test_new_requests_are_refused_and_whoever_watches_is_told(server, draining, engine) -> None:
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


def test_what_has_begun_goes_on(server, draining, engine) -> None:
    engine.script = say("x" * 40)
    body = {"model": "tiny-base", "prompt": "hi", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        draining.begin(25.0)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert "error" not in "".join(rest)


def test_other_messages_pass() -> None:
    passed = []

    async def app(scope, receive, send) -> None:
        passed.append(scope["type"])
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})

    draining = Draining()
    draining.begin(1.0)
    with TestClient(DrainMiddleware(app, draining)):
        pass
    assert passed == ["lifespan"]


class _Batches:
    closed = 0

    async def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(("first", "seconds"), [(signal.SIGTERM, 25.0), (signal.SIGINT, GRACE_S)])
def test_signals(make_server, dispatcher, engine, first: signal.Signals, seconds: float) -> None:
    """The first drains, batches stand still meanwhile; the second ends; the third does not even wait for the engine."""
    make_server()
    app = dispatcher[0].app
    clock = Clock()
    draining = app.state.services.draining
    draining._clock = clock
    app.state.batches = batches = _Batches()
    server = _Uvicorn(app, ConnectionLimits(), lambda: None, Watchdog(engine, 0.0))

    async def main() -> None:
        busy = asyncio.create_task(asyncio.sleep(60))
        server.server_state.tasks.add(busy)
        assert not await server.on_tick(1)
        server.handle_exit(first, None)
        assert draining.is_on
        for _ in range(3):
            assert not await server.on_tick(1), "somebody still has an answer to come"
            await asyncio.sleep(0)
        assert batches.closed == 1
        clock.now += seconds - 0.1
        assert not await server.on_tick(1)
        server.server_state.tasks.clear()
        assert await server.on_tick(1), "nobody has"
        server.server_state.tasks.add(busy)
        assert not await server.on_tick(1)
        server.handle_exit(signal.SIGTERM, None)
        assert await server.on_tick(1)
        assert not server.force_exit
        server.handle_exit(signal.SIGTERM, None)
        assert server.force_exit
        busy.cancel()

    asyncio.run(main())
    assert server._captured_signals == [first, signal.SIGTERM, signal.SIGTERM]
