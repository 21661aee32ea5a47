"""Frames: plain data between ranks, as JSON and arrays. A frame contains no code, and reading one runs none.

A frame is a line of JSON, which lists the arrays, followed by their bytes. `Link` sends frames over a socket, each
preceded by its length.
"""

import contextlib
import json
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
DTYPES = ("int64", "int32", "int8", "uint8", "uint16", "float16", "float32", "float64")
"""Dtypes of arrays in frames."""
MAX_BYTES = 1 << 40
_LENGTH_BYTES = 8
_PIECE = 1 << 20
_SKIPPED = 1 << 14
"""Bytes that are skipped at a time."""


class LinkClosed(Exception):
    """Report that the other end of a link has closed."""


class RankLost(Exception):
    """Report a rank that has ended or does not answer."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Hold a message: a kind, fields that JSON can express, and arrays."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Sequence[Array] = ()

    def encode(self) -> list[bytes | memoryview]:
        """Return the frame's bytes, in pieces."""
        arrays = [np.ascontiguousarray(array) for array in self.arrays]
        listed = [[array.dtype.name, *array.shape] for array in arrays]
        assert all(dtype in DTYPES for dtype, *_ in listed), f"a frame cannot carry {listed}"
        head = json.dumps({"kind": self.kind, "fields": dict(self.fields), "arrays": listed}).encode() + b"\n"
        return [head, *(array.reshape(-1).view(np.uint8).data for array in arrays)]

    @classmethod
    def decode(cls, data: bytearray) -> "Frame":
        """Return the frame in these bytes; its arrays share their memory.

        Raises:
            ValueError: the bytes are not a frame.
        """
        end = data.index(b"\n") + 1
        head = json.loads(data[:end])
        arrays, at = [], end
        for dtype, *shape in head["arrays"]:
            if dtype not in DTYPES or any(type(size) is not int or size < 0 for size in shape):
                raise ValueError(f"a frame lists an array of {dtype} {shape}")
            count = math.prod(shape)
            size = count * np.dtype(dtype).itemsize
            if at + size > len(data):
                raise ValueError("a frame is shorter than its arrays")
            # The arrays' bytes after the line of JSON need not be aligned.
            own = np.frombuffer(memoryview(data)[at : at + size], dtype=np.uint8)
            arrays.append(_aligned(own, dtype).reshape(shape))
            at += size
        return cls(head["kind"], head["fields"], arrays)


class Link:
    """Send and receive frames over a connected socket. Each direction may be used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, frame: Frame) -> None:
        """Send a frame.

        Raises:
            LinkClosed: the other end has gone.
        """
        self.send_pieces(frame.encode())

    def send_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send an encoded frame.

        Raises:
            LinkClosed: the other end has gone.
        """
        length = sum(len(piece) for piece in pieces)
        try:
            self._socket.sendall(length.to_bytes(_LENGTH_BYTES, "little") + pieces[0])
            for piece in pieces[1:]:
                self._socket.sendall(piece)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> Frame:
        """Wait for a frame, for any time, and return it.

        Raises:
            LinkClosed: the other end has gone.
            MemoryError: there is too little memory for the frame; it is skipped, so that the next can be received.
        """
        length = int.from_bytes(self._fill(bytearray(_LENGTH_BYTES)), "little")
        if length > MAX_BYTES:
            raise LinkClosed(f"a frame of {length} bytes is none")
        try:
            data = bytearray(length)
        except MemoryError:
            self._skip(length)
            raise
        return Frame.decode(self._fill(data))

    def close(self) -> None:
        """End the connection; the other end's `receive` raises."""
        # The other end may have closed first.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, data: bytearray) -> bytearray:
        at = 0
        with memoryview(data) as view:
            while at < len(data):
                at += self._receive_into(view[at : at + _PIECE])
        return data

    def _skip(self, length: int) -> None:
        with memoryview(bytearray(min(length, _SKIPPED))) as view:
            while length:
                length -= self._receive_into(view[:length])

    def _receive_into(self, view: memoryview) -> int:
        try:
            count = self._socket.recv_into(view)
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not count:
            raise LinkClosed("the other end has closed the link")
        return count


def _aligned(data: npt.NDArray[np.uint8], dtype: str) -> Array:
    view: Array = data.view(dtype)
    return view if view.flags.aligned else view.copy()
