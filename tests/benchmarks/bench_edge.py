"""Measure what the edge adds to a request, and what a streamed token costs it, beside the server alone.

    python tests/benchmarks/bench_edge.py --streams 1,16,64 --rounds 3

The server behind it is a bare application at the server's own protocol, which says events of the size of a chat's, 50 a
second a stream: what is measured is the pipe. `resumable` is with the comments that another replica could go on from.
The last two lines are clients that read one stream after another from the bare server: the edge's own, and a library's.
"""

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import httpx2
import uvicorn
from harness import arguments, machine_line, row, table

from api.asgi.limits import ConnectionLimits
from api.asgi.protocol import bounded
from api.asgi.sse import CHUNKS
from api.cluster.chooser import ReplicaAddress, StaticChooser
from api.cluster.edge import Edge
from api.cluster.upstream import UpstreamRequest, Upstreams
from api.server import bind
from lorasrv.placement.kinds import make_placement

GAP_S, EVENTS, WHOLES = 0.02, 200, 300
CLIENT_STREAMS = 16
SECRET = "secret-of-the-bench"
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1795580403,'
    b'"model":"mia","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
OFFER = (b"x-lorasrv-resume", b'{"answer_id":"a","created_s":1,"seed":1,"digest":"d"}')
WHOLE = b'{"choices":[{"message":{"content":"word"}}],"usage":{"completion_tokens":1}}'


async def replica(scope: Any, receive: Any, send: Any) -> None:
    """Answer a stream with events, and all else with a small body."""
    body = b""
    while (message := await receive()).get("more_body", False):
        body += message["body"]
    body += message.get("body", b"")
    if b'"stream"' not in body:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(WHOLE)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": WHOLE, "more_body": False})
        return
    is_marked = any(name == OFFER[0] for name, _ in scope["headers"])
    headers = [(b"content-type", b"text/event-stream"), *([OFFER] if is_marked else [])]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    piece = EVENT + b": tokens 12345\n\n" if is_marked else EVENT
    for _ in range(EVENTS):
        await asyncio.sleep(GAP_S)
        await scope["extensions"][CHUNKS].send(piece)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def serve_edge(listener: Any, behind: str, secret: str | None) -> None:
    chooser = StaticChooser([ReplicaAddress("r0", behind, kernels="k")], make_placement("bounded"))
    serve_app(listener, Edge(chooser, None, secret))


def serve_app(listener: Any, app: Any) -> None:
    lifespan: Literal["on", "off"] = "on" if isinstance(app, Edge) else "off"
    config = uvicorn.Config(app, http=bounded(ConnectionLimits()), ws="none", log_level="error", lifespan=lifespan)
    asyncio.run(uvicorn.Server(config).serve([listener]))


@contextmanager
def running(*arguments: Any, target: Any) -> Iterator[tuple[BaseProcess, str]]:
    """Run a server in a process of its own."""
    listener = bind("127.0.0.1", 0)
    listener.listen()
    process = multiprocessing.get_context("fork").Process(target=target, args=(listener, *arguments), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        httpx2.post(f"{url}/v1/completions", json={"model": "mia"}, trust_env=False, timeout=30).raise_for_status()
        yield process, url
    finally:
        process.terminate()
        process.join()


def cpu_s(process: BaseProcess) -> float:
    with open(f"/proc/{process.pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def request_ms(url: str) -> float:
    """Return the median of requests one after another, on one connection."""
    times = []
    with httpx2.Client(base_url=url, trust_env=False) as http:
        for _ in range(WHOLES):
            begun = time.perf_counter()
            assert http.post("/v1/completions", json={"model": "mia", "prompt": "once upon"}).content == WHOLE
            times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


async def one_stream(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"model":"mia","prompt":"once upon","stream":true}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read(-1)
    writer.close()
    assert answer.count(b"data: {") == EVENTS
    assert b": tokens" not in answer
    return answer


def token_us(process: BaseProcess, url: str, streams: int) -> float:
    """Return the processor time of a server for an event, with so many streams at once."""

    async def all_streams() -> None:
        await asyncio.gather(*(one_stream(int(url.rpartition(":")[2])) for _ in range(streams)))

    before = cpu_s(process)
    asyncio.run(all_streams())
    return 1e6 * (cpu_s(process) - before) / (streams * EVENTS)


async def read_by_edge(url: str) -> int:
    """Read a stream as the edge does; its bytes."""
    upstreams, size = Upstreams(), 0
    body = b'{"model":"mia","stream":true}'
    headers = [(b"host", b"a"), (b"content-length", str(len(body)).encode())]
    reply = await upstreams.ask(url, UpstreamRequest("POST", b"/v1/completions", headers, body))
    while piece := await reply.read():
        size += len(piece)
    reply.close()
    upstreams.close()
    return size


async def read_by_library(url: str) -> int:
    """Read a stream with httpx2; its bytes."""
    body = {"model": "mia", "stream": True}
    async with (
        httpx2.AsyncClient(base_url=url, trust_env=False) as http,
        http.stream("POST", "/v1/completions", json=body) as reply,
    ):
        return sum([len(piece) async for piece in reply.aiter_raw()])


def client_us(read: Callable[[str], Coroutine[Any, Any, int]], url: str) -> float:
    """Return the processor time of this process for an event, with 16 streams at once."""

    async def all_streams() -> None:
        sizes = await asyncio.gather(*(read(url) for _ in range(CLIENT_STREAMS)))
        assert set(sizes) == {EVENTS * len(EVENT) + len(b"data: [DONE]\n\n")}

    begun = time.process_time()
    asyncio.run(all_streams())
    return 1e6 * (time.process_time() - begun) / (CLIENT_STREAMS * EVENTS)


def main() -> None:
    a = arguments(__doc__, streams=((1, 16, 64), "streams at once"), rounds=(3, "interleaved rounds"))
    print(machine_line(), f"{os.cpu_count()} CPUs", flush=True)
    with (
        running(replica, target=serve_app) as bare,
        running(bare[1], None, target=serve_edge) as pipe,
        running(bare[1], SECRET, target=serve_edge) as resumable,
    ):
        servers = {"bare": bare, "pipe": pipe, "resumable": resumable}
        found: dict[str, list[list[float]]] = {name: [] for name in servers}
        clients: dict[str, list[float]] = {"the edge's": [], "httpx2": []}
        for _ in range(a.rounds):
            clients["the edge's"].append(client_us(read_by_edge, bare[1]))
            clients["httpx2"].append(client_us(read_by_library, bare[1]))
            for name, server in servers.items():
                costs = [token_us(*server, count) for count in a.streams]
                found[name].append([request_ms(server[1]), *costs])
    table(("server", "request p50 ms", *(f"CPU µs an event, {count} streams" for count in a.streams)))
    for name, rounds in found.items():
        row(name, *(f"{statistics.median(values):.2f}" for values in zip(*rounds, strict=True)))
    for name, values in clients.items():
        print(f"client {name}: {statistics.median(values):.1f} µs an event, {CLIENT_STREAMS} streams")


if __name__ == "__main__":
    main()
