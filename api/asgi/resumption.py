"""Read the state of a stream that an edge resumes, which precedes the client's body.

`x-lorasrv-resume: N` says that the first N bytes of the body are not the client's, but the state of the stream as JSON.
With 0, the edge only asks for a state from which the stream can be resumed later. Only an edge of this server's cluster
may send the header.
"""

import json
from collections.abc import Callable
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError, describe_at

RESUME, CLUSTER = "x-lorasrv-resume", "x-lorasrv-cluster"
STATE = "resumption"
"""Key of the `Resumption` in an ASGI scope's `state`; absent for requests that come from no edge."""
MAX_STATE_BYTES = 4 << 20


class Resumption(BaseModel):
    """Hold the state of a stream; empty for a new one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Id and Unix time in the answer's chunks.
    answer_id: str = ""
    created_s: int = 0
    seed: int | None = None
    # Versions that the first replica resolved the request's references to.
    versions: dict[str, str] = {}
    # Digest of everything that the tokens depend on.
    digest: str = ""
    token_ids: tuple[int, ...] = ()
    # Number of events that the client got for these tokens.
    num_events: int = Field(default=0, ge=0)

    @property
    def goes_on(self) -> bool:
        """Return whether a stream is resumed, rather than begun."""
        return self.digest != ""


class ResumptionMiddleware:
    """Put the state into the request's scope, and leave the rest of the body, with its length, to the application.

    Args:
        is_cluster: returns whether a secret is the cluster's.
    """

    def __init__(self, app: ASGIApp, is_cluster: Callable[[str], bool]) -> None:
        self._app = app
        self._is_cluster = is_cluster

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if RESUME not in headers:
            await self._app(scope, receive, send)
            return
        try:
            if not self._is_cluster(headers.get(CLUSTER, "")):
                raise ApiError(403, f"only an edge of this cluster may send {RESUME}", code="forbidden", param=RESUME)
            body, size = _Body(receive), _length(headers[RESUME])
            state = _parsed(await body.read(size))
        except ApiError as refusal:
            await describe_at(scope["path"], refusal).response()(scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), STATE: state}
        scope["headers"] = [
            (name, str(int(value) - size).encode() if name == b"content-length" else value)
            for name, value in scope["headers"]
        ]
        await self._app(scope, body.receive, send)


class _Body:
    """Split a body as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._pending: Message | None = None

    async def read(self, size: int) -> bytes:
        """Return the first bytes.

        Raises:
            ApiError: 400, the body is shorter.
        """
        read = b""
        while len(read) < size:
            message = await self._receive()
            read += message.get("body", b"")
            if len(read) < size and not message.get("more_body", False):
                raise _malformed()
            self._pending = {**message, "body": read[size:]}
        return read[:size]

    async def receive(self) -> Message:
        """Return the next message after the bytes that were read."""
        if self._pending is None:
            return await self._receive()
        message, self._pending = self._pending, None
        return message


def resumption_of(request: Request) -> Resumption | None:
    """Return the state that an edge sent; None for a request that comes from no edge."""
    found = request.scope.get("state", {}).get(STATE)
    assert found is None or isinstance(found, Resumption)
    return found


def _length(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > MAX_STATE_BYTES:
        raise _malformed()
    return int(text)


def _parsed(state: bytes) -> Resumption:
    try:
        fields: Any = json.loads(state) if state else {}
        return Resumption.model_validate(fields)
    except (ValueError, ValidationError):
        raise _malformed() from None


def _malformed() -> ApiError:
    return ApiError(400, f"{RESUME} says how many bytes of JSON precede the body", code="invalid_value", param=RESUME)
