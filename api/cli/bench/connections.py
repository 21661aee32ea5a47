"""HTTP/1.1 connections of the load client: h11 over asyncio's transports.

A client on the server's machine takes processor time from the server. httpx takes some 140 µs for each event of a
stream, more than the HTTP code of a server. This client takes half of that, and supports only what a load needs: POST,
TLS, streamed answers and reused connections.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote, urlsplit

import h11

Header = tuple[str, str]


class NotConnected(Exception):
    """Report that no connection could be made."""


class Cut(Exception):
    """Report that a connection ended within an answer, or did not speak HTTP."""


@dataclass(frozen=True, slots=True)
class Address:
    """Hold a server's host and port, and the prefix of its paths."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str) -> Self:
        """Split http://HOST[:PORT][/PATH], or https."""
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        tls = ssl.create_default_context() if is_tls else None
        path = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        return cls(parts.hostname or "", parts.port or (443 if is_tls else 80), path, tls)

    @property
    def name(self) -> str:
        """Return the value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Connection(asyncio.Protocol):
    """Send requests one after another, each after the previous answer."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._transport = asyncio.Transport()
        # Set when data has arrived or the connection has ended.
        self._news = asyncio.Event()
        # Why no more data will come, if h11 cannot tell.
        self._error: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._error = _text_of(error)
        elif self._http.their_state is h11.SEND_RESPONSE and not self._http.trailing_data[0]:
            self._error = "the server closed the connection without an answer"
        else:
            # Some answers are delimited by the end of the connection.
            self._http.receive_data(b"")
        self._news.set()

    @property
    def can_be_used(self) -> bool:
        """Return whether another request can be sent: the connection is open, and no unread data is left on it."""
        has_unasked = self._http.trailing_data != (b"", False)
        return self._http.our_state is h11.IDLE and not has_unasked and not self._transport.is_closing()

    def send(self, path: str, headers: Sequence[Header], body: bytes) -> None:
        """Send a POST request."""
        head = h11.Request(method="POST", target=path, headers=[*headers, ("content-length", str(len(body)))])
        sent = [self._http.send(event) for event in (head, h11.Data(data=body), h11.EndOfMessage())]
        self._transport.write(b"".join(part for part in sent if part))

    async def status(self) -> int:
        """Wait for the status of the answer.

        Raises:
            Cut: the connection ended without an answer.
        """
        while not isinstance(event := await self._next(), h11.Response):
            pass  # an informational one
        return event.status_code

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the answer's body as it arrives.

        Raises:
            Cut: the connection ended before the body did.
        """
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        if self._http.our_state is self._http.their_state is h11.DONE:
            self._http.start_next_cycle()

    def close(self) -> None:
        """Close the connection at once, even if data is still to be sent."""
        self._transport.abort()

    async def _next(self) -> object:
        """Return h11's next event of the answer."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                if self._error is not None:
                    raise Cut(self._error)
                self._news.clear()
                await self._news.wait()
        except h11.RemoteProtocolError as error:
            raise Cut(_text_of(error)) from error
        return event


@dataclass
class Connections:
    """Lend connections to one server, without a limit on their number.

    Args:
        connect_s: longest time for connecting.
    """

    address: Address
    connect_s: float
    _idle: list[Connection] = field(default_factory=list)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Connection]:
        """Lend a connection; afterwards it is kept, or closed if its answer was not read to the end.

        Raises:
            NotConnected: no connection can be made in time.
        """
        connection = await self._connection()
        try:
            yield connection
        finally:
            if connection.can_be_used:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close the connections that are not lent."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).can_be_used:
                return connection
            connection.close()
        host, port, tls = self.address.host, self.address.port, self.address.tls
        try:
            async with asyncio.timeout(self.connect_s):
                loop = asyncio.get_running_loop()
                return (await loop.create_connection(Connection, host, port, ssl=tls))[1]
        except TimeoutError:
            raise NotConnected(f"no connection within {self.connect_s:g} s") from None
        except OSError as error:
            raise NotConnected(_text_of(error)) from error


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__
