"""Fetch prefix pages from another server of the cluster, in a thread, within a bounded time.

After a failure, the rest of the prompt is computed here; pages that arrived complete before it are used.
"""

import io
import json
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from api.replication.page_frames import CHECK_BYTES, LAYOUT, PageOffer, check_of, frames
from lorasrv.errors import PeerFailed
from lorasrv.scheduler_output import PeerSnapshot

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_LOG = logging.getLogger(__name__)
POLL_S = 0.1
"""Interval at which a wait for bytes checks whether they are still wanted."""
MAX_ANSWER_BYTES = 64 << 10


class PageClient:
    """Read pages from peers with the secret of the cluster. Any thread may call."""

    def __init__(self, secret: str) -> None:
        self._headers = {"authorization": f"Bearer {secret}"}

    @classmethod
    def of(cls, secret: str | None) -> "PageClient | None":
        """Return a client with the secret of a cluster; None for a server outside a cluster."""
        return None if secret is None else cls(secret)

    def __call__(self, wanted: PeerSnapshot, page_bytes: int, is_wanted: Callable[[], bool]) -> npt.NDArray[np.uint8]:
        """Return the wanted pages that arrived, from the first one on, as `FetchPages` does.

        Raises:
            PeerFailed: no page arrived.
        """
        fetch = _Fetch(wanted.peer.url, self._headers, time.monotonic() + wanted.wait_s, is_wanted)
        try:
            return fetch.pages(wanted, page_bytes)
        except (OSError, HTTPException, ValueError) as error:
            why = "timeout" if isinstance(error, TimeoutError) else "unreachable"
            raise PeerFailed(why, f"{wanted.peer.url} gave no pages: {error or type(error).__name__}") from error
        finally:
            fetch.close()


class _Bytes(io.RawIOBase):
    """Read from a connection until a deadline, which a peer that sends slowly does not extend.

    Args:
        left_s: returns the time that is left, or raises TimeoutError.
    """

    def __init__(self, connection: socket.socket, left_s: Callable[[], float]) -> None:
        self._connection, self._left_s = connection, left_s
        # Keeps the connection open as long as this object is.
        self._held = connection.makefile("rb", buffering=0)

    def close(self) -> None:
        self._held.close()
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, target: "WriteableBuffer") -> int:
        while True:
            self._connection.settimeout(min(POLL_S, self._left_s()))
            try:
                return self._connection.recv_into(target)
            except TimeoutError:
                continue


class _Answer(HTTPResponse):
    """Read an answer through `_Bytes`."""

    def __init__(self, left_s: Callable[[], float], connection: socket.socket, **named: Any) -> None:
        super().__init__(connection, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Bytes(connection, left_s))


class _Fetch:
    """Hold one connection to a peer until a deadline."""

    def __init__(self, url: str, headers: dict[str, str], until_s: float, is_wanted: Callable[[], bool]) -> None:
        address = urlsplit(url)
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        self._url, self._headers = url, headers
        self._until_s, self._is_wanted = until_s, is_wanted
        self._connection = kind(address.hostname or "", address.port, timeout=self._left_s())
        self._connection.response_class = cast(type[HTTPResponse], partial(_Answer, self._left_s))

    def close(self) -> None:
        self._connection.close()

    def pages(self, wanted: PeerSnapshot, page_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the wanted pages that arrive.

        Raises:
            PeerFailed: the peer refuses, or has no pages.
            OSError, HTTPException, ValueError: the connection or the answer is broken, or too late.
        """
        answer = self._ask("POST", "/v1/pages/offer", _offer_of(wanted)).read(MAX_ANSWER_BYTES)
        offer = PageOffer.model_validate_json(answer)
        num_pages = min(offer.pages, wanted.num_pages)
        if offer.page_bytes != page_bytes:
            raise PeerFailed("refused", f"{self._url} sends pages of {offer.page_bytes} bytes, not {page_bytes}")
        if not num_pages:
            raise PeerFailed("missing", f"{self._url} has no pages of the prompt")
        return self._read(self._ask("GET", f"/v1/pages/{offer.lease}"), num_pages, page_bytes)

    def _read(self, answer: HTTPResponse, num_pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the pages of all complete frames."""
        data = np.empty(num_pages * page_bytes, np.uint8)
        view, check, done = memoryview(data.data), bytearray(CHECK_BYTES), 0
        try:
            for first, count in frames(num_pages, page_bytes):
                frame = view[first * page_bytes : (first + count) * page_bytes]
                if not (self._fill(answer, frame) and self._fill(answer, memoryview(check))):
                    raise ConnectionError("the pages were cut off")
                if check_of(frame) != check:
                    raise ConnectionError("pages were damaged on the way")
                done = first + count
        except (OSError, HTTPException) as error:
            if not done:
                raise
            _LOG.warning("%s sent %d of %d pages, the others are computed: %s", self._url, done, num_pages, error)
        return data[: done * page_bytes]

    def _fill(self, answer: HTTPResponse, target: memoryview) -> bool:
        """Fill `target`; return whether enough bytes came."""
        while target:
            count = answer.readinto(target)
            if not count:
                return False
            target = target[count:]
        return True

    def _ask(self, method: str, path: str, body: Any = None) -> HTTPResponse:
        """Return the answer to a request.

        Raises:
            PeerFailed: its status is not 200.
        """
        headers = self._headers if body is None else {**self._headers, "content-type": "application/json"}
        self._connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        answer = self._connection.getresponse()
        if answer.status != 200:
            why = answer.read(MAX_ANSWER_BYTES).decode("utf-8", "replace")
            raise PeerFailed("refused", f"{self._url} gave no pages: {answer.status} {_message(why)}")
        return answer

    def _left_s(self) -> float:
        """Return the time that is left.

        Raises:
            TimeoutError: no time is left, or the pages are no longer wanted.
        """
        left_s = self._until_s - time.monotonic()
        if left_s <= 0 or not self._is_wanted():
            raise TimeoutError("the pages came too late")
        return left_s


def _offer_of(wanted: PeerSnapshot) -> dict[str, Any]:
    """Return the body that asks for pages."""
    message, prefix = wanted.message, wanted.message.prefix
    prompt = {
        "token_ids": wanted.token_ids,
        "adapter": message.adapter_key,
        "adapter_id": message.adapter_id,
        "principal": message.principal,
        "salt": message.cache_salt,
        "priority": message.priority,
        "prefix": prefix and {"owner": prefix.owner, "salt": prefix.salt, "num_tokens": prefix.num_tokens},
    }
    return {
        "layout": LAYOUT,
        "facts": wanted.facts,
        "digests": [digest.hex() for digest in wanted.digests],
        "prompt": prompt if wanted.peer.computes else None,
        "wait_s": wanted.wait_s,
    }


def _message(body: str) -> str:
    """Return the message of an error's body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200]
