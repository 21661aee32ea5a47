"""Clients that HTTP libraries do not support: partial requests, slow single bytes, and clients that never read."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

PATIENCE_S = 30.0


class RawClient:
    """A raw connection. `buffer`: size of its receive buffer in the kernel."""

    def __init__(self, port: int, *, buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(("127.0.0.1", port))

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *pieces: bytes, pause_s: float = 0.0) -> "RawClient":
        for piece in pieces:
            self.socket.sendall(piece)
            time.sleep(pause_s)
        return self

    def drip(self, *, pause_s: float, drop: bytes = b"a") -> "RawClient":
        """Send `drop` repeatedly, until the server closes the connection or sends data."""
        self.socket.settimeout(pause_s)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    if len(self.socket.recv(1, socket.MSG_PEEK)) < 2:
                        return self
                self.socket.sendall(drop)
        except (BrokenPipeError, ConnectionResetError):
            return self
        finally:
            self.socket.settimeout(PATIENCE_S)

    def read(self, most: int = 1 << 30) -> bytes:
        """Read until the server closes the connection, or `most` bytes have arrived."""
        got = bytearray()
        while len(got) < most and (piece := self.socket.recv(min(1 << 16, most - len(got)))):
            got += piece
        return bytes(got)

    def read_until(self, mark: bytes) -> bytes:
        got = b""
        while mark not in got:
            piece = self.socket.recv(1 << 16)
            assert piece, f"it ended before {mark!r}: {got[-300:]!r}"
            got += piece
        return got

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and JSON of the only answer before the server closes the connection."""
        head, _, body = self.read().partition(b"\r\n\r\n")
        assert head, "the server closed without an answer"
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split()[1]), headers, json.loads(body) if body else None


def head_of(path: str, *lines: str, method: str = "POST") -> bytes:
    """Return a complete request head."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode()


def json_request(path: str, *lines: str, **fields: Any) -> bytes:
    """Return a complete request. `lines`: further lines of its head."""
    body = json.dumps(fields).encode()
    return head_of(path, "Content-Type: application/json", f"Content-Length: {len(body)}", *lines) + body


def pieces(num_bytes: int, size: int = 1 << 16) -> Iterator[bytes]:
    """Yield blanks, for a body that is sent in chunks."""
    for _ in range(num_bytes // size):
        yield b" " * size
