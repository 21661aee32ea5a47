"""Connections of the load client, to a server of this process on a real socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from api.cli.bench.client import BenchClient, BenchRequest
from api.cli.bench.connections import Address

USAGE = b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
EVENTS = 'data: {"choices": [{"text": "ä"}]}\r\n\r\ndata: {"choices": [{"text": "b"}]}\n\n'.encode()
STREAM = EVENTS + b"data: " + USAGE + b"\n\ndata: [DONE]\n\n"
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(STREAM), STREAM)
LAST = PLAIN.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\n" + STREAM
UNASKED = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"
EARLY = b"HTTP/1.1 103 Early Hints\r\n\r\n" + PLAIN


def chunked(size: int) -> bytes:
    """The same in chunks of so many bytes, which cut letters, lines and events."""
    parts = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body


class Counting:
    """Answer every request with the same bytes, and count.

    Args:
        unasked: sent behind each answer, when its client has most likely read that.
    """

    def __init__(self, answer: bytes, *, closes: bool, unasked: bytes) -> None:
        self.answer, self.closes, self.unasked = answer, closes, unasked
        self.connections, self.heads = 0, list[bytes]()
        self.tasks = list[asyncio.Task[None] | None]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.append(asyncio.current_task())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.lower())
                length = head.lower().partition(b"content-length:")[2].split()[0]
                await reader.readexactly(int(length))
                writer.write(self.answer)
                await writer.drain()
                if self.unasked:
                    await asyncio.sleep(0.02)
                    writer.write(self.unasked)
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        writer.close()


def url_of(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def answering(
    answer: bytes, *, closes: bool = False, unasked: bytes = b""
) -> AsyncIterator[tuple[Counting, str]]:
    counting = Counting(answer, closes=closes, unasked=unasked)
    server = await asyncio.start_server(counting.serve, "127.0.0.1", 0)
    async with server:
        yield counting, url_of(server)
        await asyncio.gather(*(task for task in counting.tasks if task is not None))


async def none_is_usable(client: BenchClient) -> None:
    """Wait until the client's connections have seen that they cannot be used again."""
    async with asyncio.timeout(30):
        while any(connection.can_be_used for connection in client._connections._idle):
            await asyncio.sleep(0.001)


def asked(
    answer: bytes,
    *,
    closes: bool = False,
    keeps: bool = True,
    unasked: bytes = b"",
    between: Callable[[BenchClient], Awaitable[None]] = lambda _: asyncio.sleep(0),
) -> Counting:
    """Three requests, one after the other, all of them answered."""

    async def run() -> Counting:
        async with (
            answering(answer, closes=closes, unasked=unasked) as (counting, url),
            BenchClient(url + "/at/", keeps=keeps, timeout_s=60) as client,
        ):
            for _ in range(3):
                outcome = await client.send(BenchRequest("m", "x", 2))
                assert (outcome.failure, outcome.prompt_tokens) == (None, 3), outcome.detail
                assert len(outcome.arrivals_s) == 2
                await between(client)
            return counting

    return asyncio.run(run())


@pytest.mark.parametrize("answer", [PLAIN, EARLY, chunked(1), chunked(7), chunked(10_000)])
def test_a_connection_is_used_again(answer: bytes) -> None:
    counting = asked(answer)
    assert counting.connections == 1
    [head] = {head.partition(b"\r\nhost:")[0] for head in counting.heads}
    assert head == b"post /at/v1/completions http/1.1"


@pytest.mark.parametrize(
    ("answer", "closes", "keeps"), [(LAST, True, True), (UNTIL_CLOSED, True, True), (PLAIN, False, False)]
)
def test_one_that_ends_with_its_answer_is_not(answer: bytes, closes: bool, keeps: bool) -> None:
    counting = asked(answer, closes=closes, keeps=keeps)
    assert counting.connections == 3
    assert all((b"connection: close" in head) is not keeps for head in counting.heads)


def test_one_that_the_server_has_closed_meanwhile_is_not() -> None:
    assert asked(PLAIN, closes=True, between=none_is_usable).connections == 3


@pytest.mark.parametrize(("answer", "unasked"), [(PLAIN + UNASKED, b""), (PLAIN, UNASKED)])
def test_what_comes_unasked_is_no_answer_to_the_next(answer: bytes, unasked: bytes) -> None:
    """As from a server that is tired of waiting for a request."""
    assert asked(answer, unasked=unasked, between=none_is_usable).connections == 3


class Deaf(asyncio.Protocol):
    """Read nothing until `transport.resume_reading`; `got` is the number of bytes that came in all."""

    def __init__(self) -> None:
        self.transport, self.count = asyncio.Transport(), 0
        self.got: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self.count += len(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.got.set_result(self.count)


def test_what_is_given_up_is_not_sent_on() -> None:
    """At a server that does not read: no socket waits for it."""
    prompt = "x" * 20_000_000

    async def run() -> int:
        made = list[Deaf]()

        def deaf() -> Deaf:
            made.append(Deaf())
            return made[-1]

        server = await asyncio.get_running_loop().create_server(deaf, "127.0.0.1", 0)
        async with server, BenchClient(url_of(server), timeout_s=1.0) as client:
            assert (await client.send(BenchRequest("m", prompt, 2))).failure == "timeout"
            [one] = made
            one.transport.resume_reading()
            return await asyncio.wait_for(one.got, 60)

    assert asyncio.run(run()) < len(prompt)


def test_many_at_a_time() -> None:
    async def run() -> None:
        async with answering(chunked(50)) as (counting, url), BenchClient(url) as client:
            for _ in range(2):
                outcomes = await asyncio.gather(*(client.send(BenchRequest("m", "x", 2)) for _ in range(40)))
                assert {outcome.failure for outcome in outcomes} == {None}
            assert counting.connections == 40

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer", [b"", b"what\r\n\r\n", PLAIN[:-60], b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz"]
)
def test_what_is_no_answer_is_a_cut_stream(answer: bytes) -> None:
    async def run() -> str | None:
        async with answering(answer, closes=True) as (_, url), BenchClient(url) as client:
            outcome = await client.send(BenchRequest("m", "x", 2))
            assert outcome.detail
            assert "role=" not in outcome.detail, "only h11's authors know what this means"
            return outcome.failure

    assert asyncio.run(run()) == "cut stream"


def test_addresses() -> None:
    assert Address.of("http://[::1]:8000").name == "[::1]:8000"
    one = Address.of("https://example.org/models/")
    assert (one.host, one.port, one.path, one.tls is not None) == ("example.org", 443, "/models", True)
    # As the other clients send them.
    assert Address.of("http://localhost/ä b%20c").path == "/%C3%A4%20b%20c"
