"""Replicas whose answers a test controls byte by byte, and an edge in front of them."""

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedIOBase
from types import SimpleNamespace
from typing import Any

import httpx2
from server import listening

from api.asgi.limits import ConnectionLimits
from api.asgi.protocol import bounded
from api.cluster.chooser import ReplicaAddress, StaticChooser
from api.cluster.edge import Edge
from lorasrv.placement.kinds import make_placement


@dataclass
class Seen:
    """A request as it reached a replica."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    socket: socket.socket
    # The rest of the connection; it reads ahead of `socket`.
    file: BufferedIOBase

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.socket.sendall(piece)

    def answer(self, body: bytes, status: int = 200, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} OK", f"content-length: {len(body)}", *headers, "", ""]
        self.send("\r\n".join(lines).encode() + body)

    def begin_stream(self, *headers: str) -> None:
        lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream", "transfer-encoding: chunked", *headers, "", ""]
        self.send("\r\n".join(lines).encode())

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.send(b"0\r\n\r\n")

    def wait_until_gone(self) -> None:
        """Return once the other side has closed."""
        with suppress(ConnectionResetError):
            while self.file.read1(1 << 16):
                pass


Answer = Callable[[Seen], None]


@dataclass
class FakeReplica:
    """A replica that answers with `answer`; afterwards the connection stays open, unless `Dies` was raised."""

    answer: Answer = lambda seen: seen.answer(b"{}")
    # Requests, without an edge's own periodic ones.
    seen: list[Seen] = field(default_factory=list)
    # Whether it answers before it has read a body.
    answers_early: bool = False
    # Whether `answer` also answers an edge's own periodic requests; else they get an empty answer.
    is_surveyed: bool = False
    url: str = ""


class Dies(Exception):
    """The replica is killed: its connection is reset."""


def _handler(replica: FakeReplica) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                headers = []
                while header := self.rfile.readline().strip().decode("latin-1"):
                    name, _, value = header.partition(": ")
                    headers.append((name.lower(), value))
                lengths = (
                    [] if replica.answers_early else [int(value) for name, value in headers if name == "content-length"]
                )
                body = self.rfile.read(lengths[0]) if lengths else self._chunked(headers)
                seen = Seen(line.strip().decode(), headers, body, self.request, self.rfile)
                is_survey = seen.line.startswith("GET /v1/replica ")
                if not is_survey:
                    replica.seen.append(seen)
                try:
                    if is_survey and not replica.is_surveyed:
                        seen.answer(b"{}")
                    else:
                        replica.answer(seen)
                except (Dies, OSError):
                    return

        def _chunked(self, headers: list[tuple[str, str]]) -> bytes:
            body = b""
            if ("transfer-encoding", "chunked") in headers:
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            return body

    return Handler


@contextmanager
def fake_replica(answer: Answer | None = None) -> Iterator[FakeReplica]:
    replica = FakeReplica() if answer is None else FakeReplica(answer)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address, daemon_threads, block_on_close = True, True, False

    with Server(("127.0.0.1", 0), _handler(replica)) as server:
        replica.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield replica
        finally:
            server.shutdown()


@contextmanager
def edge_of(
    urls: Sequence[str], registry: str | None = None, chooser: StaticChooser | None = None, **options: Any
) -> Iterator[SimpleNamespace]:
    """Serve an edge that tries replicas in the order of `urls`, or as `chooser` decides.

    Yields:
        `http`, `url`, `port`, `edge`, `chooser`.
    """
    addresses = [ReplicaAddress(f"r{number}", url, kernels="same") for number, url in enumerate(urls)]
    chooser = chooser or InOrder(())
    chooser.set_addresses(addresses)
    edge = Edge(chooser, registry, **options)
    with ExitStack() as opened:
        running = opened.enter_context(listening(edge, http=bounded(ConnectionLimits()), lifespan="on"))
        url = f"http://127.0.0.1:{running.port}"
        http = opened.enter_context(httpx2.Client(base_url=url, trust_env=False, timeout=60))
        yield SimpleNamespace(http=http, port=running.port, url=url, edge=edge, chooser=chooser)


class InOrder(StaticChooser):
    """A chooser that tries addresses in their order."""

    def __init__(self, addresses: Sequence[ReplicaAddress]) -> None:
        placement = make_placement("hash")
        placement.by_affinity = lambda demand, accounts: sorted(accounts, key=lambda one: one.replica.id)  # type: ignore[method-assign]
        super().__init__(addresses, placement)
        self.placement = placement
