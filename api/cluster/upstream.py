"""Ask replicas over HTTP/1.1, on connections that are kept for the next request.

h11 implements the protocol, as in `api.asgi.protocol`; with a client library around it (httpx2), a streamed token costs
several times the processor time (docs/benchmarks/cluster.md#what-the-edge-costs). A slow client pauses the reading from
the replica, so the bytes that a connection holds are bounded.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterable, Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast
from urllib.parse import urlsplit

import h11

CONNECT_S = 1.0
IDLE_S = 15.0
"""Less than the time for which servers keep an idle connection: half of `ConnectionLimits.keep_alive_s`."""
MAX_IDLE = 64
"""Most idle connections kept per replica."""
MAX_HEAD_BYTES = 64 << 10
READ_BYTES = 64 << 10
"""The kernel's buffer of a connection, which bounds the memory used for a client that does not read."""
Headers = Sequence[tuple[bytes, bytes]]
_T = TypeVar("_T")


class Unreachable(Exception):
    """Report that no connection could be made: the replica has received nothing of the request."""


class Broken(Exception):
    """Report that a connection ended, or broke the protocol, before its answer was complete."""


class Silent(Exception):
    """Report that a replica received at least a part of a request but does not answer; it may still execute it."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """Hold a request to a replica."""

    method: str
    # Path and query, as the client wrote them.
    target: bytes
    headers: Headers
    # Bytes can be sent again, a stream cannot.
    body: bytes | AsyncIterable[bytes] = b""
    # Longest time for which the replica may read nothing of the body, or then send nothing; None: no limit.
    silent_s: float | None = None


class UpstreamReply:
    """Hold the head of an answer, and read its body. Must be closed."""

    def __init__(self, connection: "_Connection", head: h11.Response) -> None:
        self._connection = connection
        self._is_closed = False
        self.status = head.status_code
        self.headers: list[tuple[bytes, bytes]] = list(head.headers)

    def header(self, name: bytes) -> bytes:
        """Return a header's value, empty if there is none."""
        return next((value for key, value in self.headers if key == name), b"")

    async def read(self) -> bytes:
        """Return the next bytes of the body, empty at its end.

        Raises:
            Broken: the connection ended before the body did.
        """
        return await self._connection.read()

    async def read_all(self) -> bytes:
        """Return the whole body.

        Raises:
            Broken.
        """
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Keep the connection if the answer was read to its end; else cut it, which tells the replica to abort.

        Only the first call has an effect, because another answer may use the kept connection afterwards.
        """
        if not self._is_closed:
            self._is_closed = True
            self._connection.release()


class Upstreams:
    """Keep the connections of one event loop to all replicas."""

    def __init__(self) -> None:
        self._idle: dict[str, list[_Connection]] = {}

    async def ask(self, url: str, request: UpstreamRequest) -> UpstreamReply:
        """Send a request and wait for the head of its answer.

        A kept connection may end just as it is used; a body of bytes is then sent again on another connection.

        Raises:
            Unreachable, Broken, Silent.
        """
        if isinstance(request.body, bytes):
            while (kept := self._take(url)) is not None:
                with contextlib.suppress(Broken):
                    return await kept.ask(request)
        return await (await self._connect(url)).ask(request)

    async def fetch(self, url: str, request: UpstreamRequest) -> tuple[int, bytes]:
        """Return the status and the whole body of a short answer.

        Raises:
            Unreachable, Broken, Silent.
        """
        reply = await self.ask(url, request)
        try:
            return reply.status, await reply.read_all()
        finally:
            reply.close()

    def close(self) -> None:
        """Cut all connections that are not in use."""
        for kept in [one for some in self._idle.values() for one in some]:
            kept.cut()

    def keep(self, connection: "_Connection") -> None:
        """Keep a connection whose answer was read to its end."""
        idle = self._idle.setdefault(connection.url, [])
        idle.append(connection)
        if len(idle) > MAX_IDLE:
            idle[0].cut()

    def forget(self, connection: "_Connection") -> None:
        """Drop a connection that has ended."""
        idle = self._idle.get(connection.url, [])
        if connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.url]

    def _take(self, url: str) -> "_Connection | None":
        idle = self._idle.get(url)
        if not idle:
            return None
        connection = idle[-1]
        self.forget(connection)
        return connection

    async def _connect(self, url: str) -> "_Connection":
        address, loop = urlsplit(url), asyncio.get_running_loop()
        is_tls = address.scheme == "https"
        host, port = address.hostname or "", address.port or (443 if is_tls else 80)
        make = loop.create_connection(lambda: _Connection(self, url), host, port, ssl=is_tls or None)
        try:
            async with asyncio.timeout(CONNECT_S):
                return (await make)[1]
        except OSError as error:
            raise Unreachable(f"{url} does not answer: {error.strerror or error or 'timed out'}") from None


class _Connection(asyncio.Protocol):
    """Carry one request at a time."""

    def __init__(self, owner: Upstreams, url: str) -> None:
        self.url = url
        self._owner = owner
        self._http = h11.Connection(h11.CLIENT, MAX_HEAD_BYTES)
        self._is_lost = self._is_paused = False
        # State of the current request.
        self._is_head = self._is_over = False
        self._silent_s: float | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    # asyncio callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _watch_peer(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._idle_timer is not None:
            self.cut()
            return
        self._http.receive_data(data)
        if self._reader is None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if not self._is_lost:
            self._http.receive_data(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._stop_idling()
        self._owner.forget(self)
        self._wake()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writer = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
        self._writer = None

    # One request.

    async def ask(self, request: UpstreamRequest) -> UpstreamReply:
        self._stop_idling()
        self._is_over = False
        try:
            self._is_head = request.method == "HEAD"
            head = h11.Request(method=request.method, target=request.target, headers=list(request.headers))
            self._write(head)
            self._silent_s = request.silent_s
            reply = await (
                self._send_whole(request.body) if isinstance(request.body, bytes) else self._upload(request.body)
            )
            self._check_framed(reply)
            return UpstreamReply(self, reply)
        except BaseException:
            self.cut()
            raise

    async def read(self) -> bytes:
        event: h11.Event | None = None if self._is_over else await self._event()
        pieces: list[bytes] = []
        size = 0
        # Read all that has arrived: for a slow client, several tokens become one write.
        while isinstance(event, h11.Data):
            pieces.append(bytes(event.data))
            size += len(pieces[-1])
            if size >= READ_BYTES:
                break
            # If the connection broke, the next read raises.
            with contextlib.suppress(Broken):
                event = self._next_event()
                continue
            break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def release(self) -> None:
        http = self._http
        if self._is_lost or http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            self.cut()
            return
        http.start_next_cycle()
        self._resume_reading()
        self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self.cut)
        self._owner.keep(self)

    def cut(self) -> None:
        self._stop_idling()
        self._owner.forget(self)
        self._transport.abort()

    async def _send_whole(self, body: bytes) -> h11.Response:
        if body:
            self._write(h11.Data(data=body))
        self._write(h11.EndOfMessage())
        return await self._in_time(self._head())

    async def _upload(self, body: AsyncIterable[bytes]) -> h11.Response:
        """Send a body until it ends or an answer arrives; the rest is then not needed."""
        sending, answering = asyncio.ensure_future(self._send(body)), asyncio.ensure_future(self._head())
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            return await self._in_time(answering)
        finally:
            sending.cancel()
            answering.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _send(self, body: AsyncIterable[bytes]) -> None:
        async for piece in body:
            self._write(h11.Data(data=piece))
            if self._writer is not None:
                await self._in_time(self._writer)
        self._write(h11.EndOfMessage())

    async def _in_time(self, step: Awaitable[_T]) -> _T:
        """Wait for the replica to read or answer.

        Raises:
            Silent: it takes too long.
        """
        try:
            async with asyncio.timeout(self._silent_s):
                return await step
        except TimeoutError:
            raise Silent(f"{self.url} has not answered for {self._silent_s:g} s") from None

    async def _head(self) -> h11.Response:
        while isinstance(reply := await self._event(), h11.InformationalResponse):
            pass
        if not isinstance(reply, h11.Response):
            raise Broken(f"{self.url} sent no answer")
        return reply

    def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._transport.write(data)

    async def _event(self) -> h11.Event:
        while (event := self._next_event()) is None:
            if self._is_lost:
                raise Broken(f"{self.url} closed the connection")
            self._resume_reading()
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return event

    def _next_event(self) -> h11.Event | None:
        """Return the next event; None if more bytes must arrive first."""
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise Broken(f"{self.url} broke off: {error}") from None
        if event is h11.NEED_DATA:
            return None
        self._is_over = isinstance(event, h11.EndOfMessage)
        if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
            raise Broken(f"{self.url} closed the connection")
        return cast(h11.Event, event)

    def _check_framed(self, reply: h11.Response) -> None:
        """Refuse an answer that only the end of the connection delimits: a truncated one would look complete."""
        names = {name for name, _ in reply.headers}
        has_body = not self._is_head and reply.status_code not in (204, 304)
        if has_body and names.isdisjoint({b"content-length", b"transfer-encoding"}):
            raise Broken(f"{self.url} sent an answer without a length")

    def _resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _stop_idling(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _watch_peer(connection: socket.socket | None) -> None:
    """Bound the kernel's buffer, and detect within seconds a machine that is gone and closes no connection."""
    if connection is None:
        return
    options = [
        (socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *((socket.IPPROTO_TCP, getattr(socket, name, None), value) for name, value in _TCP.items()),
    ]
    for level, option, value in options:
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(level, option, value)


_TCP = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
