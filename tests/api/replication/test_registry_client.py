"""Questions to a registry whose answers drip: each has a time for the whole answer, not for each piece of it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from types import SimpleNamespace

import pytest
from clock import Clock
from loop_time import LoopTime

from adapter_store.errors import OriginDenied, OriginUnreachable
from api.replication import registry_client
from api.replication.headers import CHANGES, LEASE, REVISION
from api.replication.registry_client import HttpOrigin, RegistryClient

pytestmark = pytest.mark.anyio
HEAD = f"HTTP/1.1 200 OK\r\n{REVISION}: 1\r\ncontent-length: 400\r\n\r\n".encode()
BODY = b'{"lease_s": 30}'.ljust(400)
TIMEOUT_S, PAUSE_S, HANGS_S = 5.0, 0.5, 300.0
ENDLESS_PIECES = 4096


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopTime:
    return LoopTime(monkeypatch)


@asynccontextmanager
async def dripping(
    pause: Callable[[], Awaitable[object]], at_once: bytes, drips: bytes, piece: int
) -> AsyncIterator[RegistryClient]:
    """Ask a server that sends the rest of its answer in pieces, with pauses between them."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with closing(writer):
            for data in (at_once, *(drips[at : at + piece] for at in range(0, len(drips), piece))):
                writer.write(data)
                try:
                    await writer.drain()
                except ConnectionError:
                    return
                await pause()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        origin = HttpOrigin(f"http://127.0.0.1:{port}", None)
        client = RegistryClient(origin, None)
        try:
            yield client
        finally:
            await client.close()
            origin.close()


def test_nothing_is_fetched_of_a_registry_that_gives_no_lease() -> None:
    """Who waits for it would take the threads that read this disk; what is half here goes on."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        origin = HttpOrigin(f"http://127.0.0.1:{nobody.getsockname()[1]}", None)
        origin.failed("it hangs")
        origin.is_cut_off = True
        with pytest.raises(OriginUnreachable, match="it hangs"), origin.fetch("a" * 64, 0):
            pass
        nobody.setblocking(False)
        with pytest.raises(BlockingIOError):
            nobody.accept()
        origin.close()


@pytest.mark.parametrize("at_once", [b"", HEAD], ids=["head", "body"])
async def test_an_answer_that_drips_is_given_up(at_once: bytes, clock: LoopTime) -> None:
    endless = (HEAD[:-4] + b"\r\nx-more: " if not at_once else b"") + BODY * 100
    async with dripping(partial(clock.let_pass, PAUSE_S), at_once, endless, 1) as client, asyncio.timeout(HANGS_S):
        with pytest.raises(OriginUnreachable, match=f"no whole answer within {TIMEOUT_S:g} s"):
            await client.post(LEASE, {}, TIMEOUT_S)
        with pytest.raises(OriginUnreachable, match="no whole answer within"):
            await client.get(CHANGES, {}, 0.1)


async def test_weights_that_drip_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, over = Clock(), asyncio.Event()
    monkeypatch.setattr(registry_client, "time", SimpleNamespace(monotonic=clock))

    def read(origin: HttpOrigin) -> None:
        with origin.fetch("0" * 64, 0) as (length, chunks):
            assert length == len(BODY)
            for _ in chunks:
                clock.now += registry_client.ANSWER_S + 1.0

    async with dripping(over.wait, HEAD + BODY[:1], BODY[1:], 1) as client:
        with pytest.raises(OriginUnreachable, match="sends weights at less than 64 KiB/s"):
            await asyncio.to_thread(read, client._origin)
        over.set()


async def test_a_long_answer_may_be_slow(clock: LoopTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "LEAST_BYTES_PER_S", 20)
    async with dripping(partial(clock.let_pass, PAUSE_S), HEAD, BODY, 20) as client:
        begun_s = clock.now
        assert await client.post(LEASE, {}, TIMEOUT_S) == {"lease_s": 30}
        assert clock.now - begun_s > TIMEOUT_S


@pytest.mark.parametrize(
    "head",
    [f"200 OK\r\n{REVISION}: 1", "200 OK", f"410 Gone\r\n{REVISION}: 1"],
    ids=["registry", "another", "refusal"],
)
async def test_an_answer_without_an_end_is_given_up(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it comes: it would take all memory."""
    monkeypatch.setattr(registry_client, "MAX_ANSWER_BYTES", 1 << 20)

    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {head}\r\n\r\n".encode())
        with closing(writer), suppress(ConnectionError):
            for sent in range(1, ENDLESS_PIECES + 1):  # noqa: B007
                writer.write(b" " * (16 << 10))
                await writer.drain()

    def fetch(origin: HttpOrigin) -> None:
        with origin.fetch("0" * 64, 0):
            pass

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        origin = HttpOrigin(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        client = RegistryClient(origin, None)
        for ask in (client.get(CHANGES, {}), asyncio.to_thread(fetch, origin)):
            with pytest.raises((OriginUnreachable, OriginDenied)):
                await ask
            assert sent < ENDLESS_PIECES
        await client.close()
        origin.close()
