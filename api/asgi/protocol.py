"""Speak HTTP/1.1 at the socket: uvicorn's protocol, with limits on the time and memory that a client may take.

uvicorn itself bounds only the time between two requests. Here, a head and a body must also arrive in time, responses
must be read in time, and the number of connections is bounded. If the rest of a body is no longer needed, it is read
and dropped for a while before the connection is closed (nginx's lingering close). After an immediate close, a client
that is still sending would see a reset in place of the response.
"""

import asyncio
import contextlib
import enum
import json
import logging
import re
import resource
import socket
import struct
from collections import Counter
from dataclasses import replace
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from api.asgi.limits import ConnectionLimits, no_cuts
from api.asgi.response_limits import PIECE_BYTES
from api.asgi.sse import CHUNKS
from api.errors import INVALID, SERVER, error_body

MAX_HEAD_BYTES = 16 << 10
WRITE_BUFFER_BYTES = 64 << 10
"""Per connection, in our memory and again in the kernel's. Ours includes the last piece of a response; the events of
one step of a stream may exceed it."""
MIN_BYTES_PER_S = 1024
"""A client that sends or reads more slowly than this during a whole timeout is treated as gone."""
LINGER_S = 5.0
LINGER_BYTES = 64 << 20
_LOG = logging.getLogger(__name__)
MAX_TURNED_AWAY = 64
"""Connections above the bound that get a 503; further ones are closed without one."""
OTHER_FILES = 512
ACCEPTED_AT_ONCE = OTHER_FILES // 4
"""Most connections accepted at once. Those above the bound still take a file each for two iterations of the event
loop, until they are closed."""
_END_OF_HEAD = re.compile(rb"\n\r?\n")


class _Waiting(enum.Enum):
    """Name what the connection waits for."""

    FOR_NOTHING = enum.auto()
    FOR_HEAD = enum.auto()
    FOR_BODY = enum.auto()
    FOR_REST = enum.auto()
    """The rest of a body whose response has been sent."""
    FOR_CLOSE = enum.auto()


def bounded(bounds: ConnectionLimits, cuts: Counter[str] | None = None) -> type[asyncio.Protocol]:
    """Return the protocol class with these limits, for `uvicorn.Config(http=...)`; `cuts` counts connections closed,
    by cause.
    """
    own = {"bounds": bounds, "cuts": no_cuts() if cuts is None else cuts}
    return type("BoundedProtocol", (LimitedProtocol,), own)


def allow_connections(bounds: ConnectionLimits) -> ConnectionLimits:
    """Raise the process's limit of open files as far as needed and allowed: it is usually 1024, and each connection
    takes a file.

    Returns: the limits, with at most as many connections as there are files for: beyond that, asyncio would retry to
        accept and log each failure.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = bounds.max_connections + MAX_TURNED_AWAY + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    most = max(wanted // 4, wanted - MAX_TURNED_AWAY - OTHER_FILES)
    if most >= bounds.max_connections:
        return bounds
    _LOG.warning("at most %d connections: this process may open %d files (ulimit -Hn)", most, wanted)
    return replace(bounds, max_connections=most)


class LimitedProtocol(H11Protocol):
    """Handle one connection."""

    bounds: ClassVar[ConnectionLimits]
    cuts: ClassVar[Counter[str]]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.timeout_keep_alive = self.bounds.keep_alive_s  # type: ignore[assignment]
        self._waiting = _Waiting.FOR_NOTHING
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_received = 0
        self._real: asyncio.Transport
        self._application = self.app
        self.app = self._offer_chunks

    # asyncio callbacks.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._real = transport
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES - PIECE_BYTES)
        _bound_kernel_buffer(transport.get_extra_info("socket"))
        super().connection_made(_PoliteTransport(transport, self))
        num_more = len(self.connections) - self.bounds.max_connections
        if num_more > MAX_TURNED_AWAY:
            self.cuts["too_many_connections"] += 1
            transport.abort()
        elif num_more > 0:
            self._refuse(503, "too_many_connections", "there are too many connections; try again", retry_after_s=1)
        else:
            self._wait(_Waiting.FOR_HEAD, self.bounds.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        self._num_received += len(data)
        if self._waiting is _Waiting.FOR_CLOSE:
            self._drop()
        elif self._is_head_too_long(data):
            self._refuse(431, "headers_too_large", f"the headers have more than {MAX_HEAD_BYTES} bytes")
        else:
            super().data_received(data)
            self._follow(_Waiting.FOR_HEAD)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def eof_received(self) -> None:
        self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        self._waiting = _Waiting.FOR_NOTHING
        super().connection_lost(exc)

    # Overrides of uvicorn.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._follow(_Waiting.FOR_NOTHING)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", msg)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: any client could fill the log with this warning."""

    def close(self) -> None:
        """Close the connection; if a body is still arriving, leave the client time to read the response first."""
        if self._waiting is _Waiting.FOR_CLOSE or self.conn.their_state is not h11.SEND_BODY:
            self._close()
        else:
            self._linger()

    # Reading.

    def _follow(self, when_idle: _Waiting) -> None:
        """Start waiting for the next part of a request, according to the state of reading."""
        if self._waiting is _Waiting.FOR_CLOSE or self._real.is_closing():
            return
        state = self.conn.their_state
        if state is h11.IDLE:
            wanted, seconds = when_idle, self.bounds.header_timeout_s
        elif state is not h11.SEND_BODY:
            wanted, seconds = _Waiting.FOR_NOTHING, 0.0
        elif self.cycle.response_complete:
            wanted, seconds = _Waiting.FOR_REST, LINGER_S
        else:
            wanted, seconds = _Waiting.FOR_BODY, self.bounds.body_timeout_s
        if wanted is not self._waiting:
            self._wait(wanted, seconds)
        elif wanted is _Waiting.FOR_REST:
            self._drop()

    def _wait(self, wanted: _Waiting, seconds: float) -> None:
        self._stop_timer()
        self._waiting, self._num_received = wanted, 0
        if wanted is not _Waiting.FOR_NOTHING:
            self._timer = self.loop.call_later(seconds, self._time_is_over)

    def _time_is_over(self) -> None:
        seconds, self._timer = self.bounds.body_timeout_s, None
        match self._waiting:
            case _Waiting.FOR_HEAD if not self.conn.trailing_data[0]:
                self._close()
            case _Waiting.FOR_HEAD:
                self._refuse(408, "header_timeout", "the headers did not arrive in time")
            case _Waiting.FOR_BODY if self.flow.read_paused or self._num_received >= seconds * MIN_BYTES_PER_S:
                # Paused by our own flow control: the client is not to blame.
                self._wait(_Waiting.FOR_BODY, seconds)
            case _Waiting.FOR_BODY:
                why = f"the body arrived with less than {MIN_BYTES_PER_S} bytes per second for {seconds:g} s"
                self._refuse(408, "body_timeout", why)
            case _:
                self._close()

    def _drop(self) -> None:
        if self._num_received > LINGER_BYTES:
            self._close()

    def _is_head_too_long(self, data: bytes) -> bool:
        if self.conn.their_state is not h11.IDLE:
            return False
        begun = self.conn.trailing_data[0]
        most = MAX_HEAD_BYTES + 4
        return len(begun) + len(data) > most and _END_OF_HEAD.search((begun + data[:most])[:most]) is None

    # Writing.

    async def _offer_chunks(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and let it send chunks past the middleware, which only needs the response's head."""
        if scope["http_version"] == "1.1":
            scope = {**scope, "extensions": {CHUNKS: _Chunks(self)}}
        await self._application(scope, receive, send)

    def _watch_writing(self) -> None:
        size = self._real.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.bounds.write_timeout_s, self._check_writing, size)

    def _check_writing(self, size_before: int) -> None:
        """Abort a reader that is too slow. Nothing is written while the buffer is full, so the buffer only shrinks."""
        if size_before - self._real.get_write_buffer_size() >= MIN_BYTES_PER_S * self.bounds.write_timeout_s:
            self._watch_writing()
        else:
            self.cuts["slow_reader"] += 1
            self._abort()

    # Closing.

    def _refuse(self, status: int, code: str, message: str, *, retry_after_s: int | None = None) -> None:
        """Respond in place of the application, which sees a disconnect, and close the connection."""
        self.cuts[code] += 1
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self._abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._real.write(_answer(status, code, message, retry_after_s))
        self._linger()

    def _linger(self) -> None:
        self._wait(_Waiting.FOR_CLOSE, LINGER_S)
        if self.cycle is not None:
            self.cycle.body.clear()
        if self._real.can_write_eof():
            # A client may have reset the connection just now.
            with contextlib.suppress(OSError):
                self._real.write_eof()
        self.flow.resume_reading()

    def _close(self) -> None:
        self._stop_timer()
        self._real.close()
        if self._real.get_write_buffer_size():
            # Otherwise asyncio would wait forever for a client that does not read.
            self._timer = self.loop.call_later(self.bounds.write_timeout_s, self._abort)

    def _abort(self) -> None:
        """Close with a reset, so that the kernel keeps no data for a client that does not read."""
        connection = self._real.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._real.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class _Chunks:
    """Send parts of a body (`ChunkSender`); do nothing once the client has left."""

    def __init__(self, protocol: LimitedProtocol) -> None:
        self._transport, self._flow = protocol.transport, protocol.flow

    @property
    def can_write(self) -> bool:
        return not self._flow.write_paused

    def write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def send(self, data: bytes) -> None:
        for begin in range(0, len(data), PIECE_BYTES):
            if not self.can_write:
                await self._flow.drain()
            self.write(data[begin : begin + PIECE_BYTES])


class _PoliteTransport(asyncio.Transport):
    """Wrap the transport given to uvicorn, so that `close` lingers."""

    def __init__(self, real: asyncio.Transport, protocol: LimitedProtocol) -> None:
        super().__init__()
        self._real = real
        self._protocol = protocol

    def close(self) -> None:
        self._protocol.close()

    def is_closing(self) -> bool:
        return self._protocol._waiting is _Waiting.FOR_CLOSE or self._real.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._real.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closing():
            self._real.write(data)

    def abort(self) -> None:
        self._real.abort()

    def pause_reading(self) -> None:
        self._real.pause_reading()

    def resume_reading(self) -> None:
        self._real.resume_reading()


def _answer(status: int, code: str, message: str, retry_after_s: int | None) -> bytes:
    body = json.dumps(error_body(message, INVALID if status < 500 else SERVER, None, code)).encode()
    retry = f"retry-after: {retry_after_s}\r\n" if retry_after_s is not None else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body


def _bound_kernel_buffer(connection: socket.socket | None) -> None:
    """Limit unsent data in the kernel, which would otherwise hold megabytes; the rest stays in our buffer and is
    counted there.
    """
    if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):  # not each socket is a TCP socket
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_BUFFER_BYTES)
