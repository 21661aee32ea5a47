"""Ask the registry over HTTP: changes and leases from the event loop, weights from the threads that load them."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
from starlette.concurrency import run_in_threadpool

from adapter_store.errors import BlobNotFound, OriginDenied, OriginRefused, OriginUnreachable
from api.asgi.address import connection_options
from api.asgi.json_body import INLINE_BYTES
from api.replication.headers import BLOBS, REVISION

CONNECT_S, ANSWER_S = 2.0, 10.0
LEAST_BYTES_PER_S = 64 << 10
"""Least rate of an answer: each received byte extends its time limit accordingly, so long answers may take longer."""
MAX_ANSWER_BYTES = 1 << 30
"""Longest answer. A page of changes is far shorter, unless one id has thousands of versions with long defaults."""
MAX_REFUSAL_BYTES = 64 << 10
"""Most bytes read of an answer that is not a success, or not the registry's."""
SHOWN_CHARS = 300
"""Most characters of an answer that an error shows."""
_DENIED = frozenset({401, 403})
_INVALID = frozenset({400, 413, 422})


class HttpOrigin:
    """Fetch weights, and remember whether the last attempt reached the registry. Any thread may call."""

    def __init__(self, address: str, key: str | None) -> None:
        self.address = address.rstrip("/")
        self._client = httpx2.Client(**_options(self.address, key))
        self._why: str | None = None
        # Whether the last question for a lease failed.
        self.is_cut_off = False

    def check(self) -> None:
        if self._why is not None:
            raise OriginUnreachable(self._why)

    def check_answer(self, status: int, headers: Mapping[str, str], body: bytes | bytearray = b"") -> None:
        """Note that an answer came, and raise the error that it means, unless it is a success.

        Raises:
            OriginRefused: the registry finds this request invalid; other requests may be answered.
            OriginDenied: the key is refused, or the server is not a registry; waiting does not help.
            OriginUnreachable: the registry cannot answer now, or another server answered in its place.
        """
        if status >= 500 or status == 429:
            why = f": {_said(body)}" if body and REVISION in headers else ""
            raise self.failed(f"it answers {status} now{why}")
        if REVISION not in headers:
            # Every answer of lorasrv has this header.
            target = f" to {headers['location']:.200}" if "location" in headers else ""
            raise self.is_another(f"it answers {status}{target} without {REVISION}")
        if status in _DENIED:
            raise OriginDenied(
                f"the registry at {self.address} refuses this server's key ({status}, {_said(body)}); give it one of "
                "scope replicate (--registry-key, --cluster-secret)"
            )
        if status in _INVALID:
            self._why = None
            raise OriginRefused(f"the registry at {self.address} answers {status}: {_said(body)}")
        if status >= 400:
            raise OriginDenied(
                f"the server at {self.address} (--registry) is none that this version of lorasrv can follow: it "
                f"answers {status}, {_said(body)}"
            )
        self._why = None

    def parsed(self, body: bytes | bytearray) -> dict[str, Any]:
        """Return the JSON object of an answer.

        Raises:
            OriginUnreachable: the answer is not a JSON object.
        """
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self.is_another("its answer is no JSON object")
        return found

    def is_another(self, why: str) -> OriginUnreachable:
        """Note that another server answers in the registry's place, and return the error that says so."""
        self._why = (
            f"what answers at {self.address} is no registry of lorasrv: {why}; check --registry, and the proxies "
            "before the registry"
        )
        return OriginUnreachable(self._why)

    def failed(self, error: object) -> OriginUnreachable:
        """Note that the registry was not reached, and return the error that says so."""
        self._why = f"the registry at {self.address} cannot be reached: {error or type(error).__name__}"
        return OriginUnreachable(self._why)

    @contextlib.contextmanager
    def fetch(self, digest: str, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        # A thread that waits for an absent registry could not load blobs of this disk; the lease notices its return.
        if self.is_cut_off and not start:
            self.check()
        headers = {"range": f"bytes={start}-"} if start else {}
        try:
            with self._client.stream("GET", BLOBS + digest, headers=headers) as answer:
                if answer.status_code == 404 and REVISION in answer.headers:
                    raise BlobNotFound(digest)
                why = self._beginning(answer) if answer.is_client_error else b""
                self.check_answer(answer.status_code, answer.headers, why)
                length = _length(answer.headers, answer.status_code, start)
                if length is None:
                    raise self.is_another("its answer is not the part of the weights that was asked for")
                yield length, self._chunks(answer)
        except httpx2.HTTPError as error:
            raise self.failed(error) from None

    def _beginning(self, answer: httpx2.Response) -> bytes:
        body = bytearray()
        for piece in self._chunks(answer):
            body += piece
            if len(body) >= MAX_REFUSAL_BYTES:
                break
        return bytes(body)

    def _chunks(self, answer: httpx2.Response) -> Iterator[bytes]:
        ends_s, received = time.monotonic() + ANSWER_S, 0
        try:
            for piece in answer.iter_raw():
                yield piece
                received += len(piece)
                if time.monotonic() > ends_s + received / LEAST_BYTES_PER_S:
                    raise self.failed(f"it sends weights at less than {LEAST_BYTES_PER_S >> 10} KiB/s")
        except httpx2.HTTPError as error:
            raise self.failed(error) from None

    def close(self) -> None:
        self._client.close()


class RegistryClient:
    """Ask from the event loop.

    Raises (all methods):
        OriginUnreachable, OriginDenied, OriginRefused.
    """

    def __init__(self, origin: HttpOrigin, key: str | None) -> None:
        self._origin = origin
        self._client = httpx2.AsyncClient(**_options(origin.address, key))

    async def get(self, path: str, params: Mapping[str, Any], wait_s: float = 0.0) -> dict[str, Any]:
        """Return the JSON object of an answer that may take `wait_s` to begin."""
        return await self._ask("GET", path, ANSWER_S + wait_s, params=dict(params))

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float = CONNECT_S) -> dict[str, Any]:
        """Send a JSON body, and return the JSON object of the answer."""
        return await self._ask("POST", path, timeout_s, json=dict(body))

    async def _ask(self, method: str, path: str, timeout_s: float, **what: Any) -> dict[str, Any]:
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        body = bytearray()
        try:
            async with (
                asyncio.timeout(timeout_s) as until,
                self._client.stream(method, path, timeout=timeout, **what) as answer,
            ):
                ends_s = until.when() or 0.0
                is_whole = answer.is_success and REVISION in answer.headers
                most = MAX_ANSWER_BYTES if is_whole else MAX_REFUSAL_BYTES
                async for piece in answer.aiter_raw():
                    body += piece
                    until.reschedule(ends_s + len(body) / LEAST_BYTES_PER_S)
                    if len(body) > most:
                        break
        except httpx2.HTTPError as error:
            raise self._origin.failed(error) from None
        except TimeoutError:
            raise self._origin.failed(f"no whole answer within {timeout_s:g} s") from None
        self._origin.check_answer(answer.status_code, answer.headers, body)
        if len(body) > most:
            raise self._origin.is_another(f"its answer has more than {most} bytes")
        if len(body) <= INLINE_BYTES:
            return self._origin.parsed(body)
        return await run_in_threadpool(self._origin.parsed, body)

    async def close(self) -> None:
        await self._client.aclose()


def _options(address: str, key: str | None) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return {
        "base_url": address,
        "timeout": httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
        "headers": {**headers, "accept-encoding": "identity"},
        **connection_options(address),
    }


def _said(body: bytes | bytearray) -> str:
    """Return the message of an error's body."""
    try:
        return str(json.loads(body)["error"]["message"])[:SHOWN_CHARS]
    except (ValueError, LookupError, TypeError, RecursionError):
        return body[:SHOWN_CHARS].decode(errors="replace") or "without a message"


def _length(headers: Mapping[str, str], status: int, start: int) -> int | None:
    """Return the length of the whole blob; None if the answer is not the part that was asked for."""
    try:
        if status == 206:
            part, _, whole = headers["content-range"].removeprefix("bytes ").partition("/")
            if int(part.partition("-")[0]) == start:
                return int(whole)
        elif not start:
            return int(headers["content-length"])
    except (KeyError, ValueError):
        pass
    return None
