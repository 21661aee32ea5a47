"""Send batch lines to a running server."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from api.asgi.address import connection_options, server_address
from api.batches.results import LineReply
from api.batches.runner import USUAL_PAUSE_S, Ask, at_priority, put_off_s
from api.client import TIMEOUT, ServerUnreachable
from api.errors import SERVER, error_body

MAX_SENDS = 3
MAX_SHOWN_CHARS = 200
GATEWAY_STATUSES = (502, 503, 504)


class _Gateway(httpx2.TransportError):
    """Report that a proxy answered in place of the server. `late`: the proxy timed out, which the line itself may have
    caused.
    """

    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(f"a proxy says {response.status_code} {response.reason_phrase}".rstrip())
        self.late = response.status_code == 504


@asynccontextmanager
async def remote(url: str, priority: int, concurrency: int, key: str | None = None) -> AsyncIterator[Ask]:
    """Return a function that sends lines to a server at this priority; 0 leaves the bodies unchanged.

    Raises (when a line is sent):
        ServerUnreachable: several attempts in a row failed, or a proxy reports that the server does not answer.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    options: dict[str, Any] = {
        "base_url": server_address(url),
        "timeout": TIMEOUT,
        "headers": headers,
        "limits": limits,
    }
    async with httpx2.AsyncClient(**options, **connection_options(url)) as client:

        async def ask(path: str, body: Mapping[str, Any]) -> LineReply:
            wanted = at_priority(body, priority) if priority else dict(body)
            for sends_left in reversed(range(MAX_SENDS)):
                try:
                    return _reply(await client.post(path, json=wanted))
                except httpx2.TransportError as error:
                    if not sends_left and isinstance(error, _Gateway) and error.late:
                        return LineReply(504, error_body(str(error), SERVER, None, "gateway_timeout"))
                    if not sends_left:
                        reason = str(error) or type(error).__name__
                        raise ServerUnreachable(f"the server at {url} stopped answering: {reason}") from None
                    await asyncio.sleep(USUAL_PAUSE_S)
            raise AssertionError

        yield ask


def _reply(response: httpx2.Response) -> LineReply:
    """Convert a response.

    Raises: _Gateway.
    """
    status, request_id = response.status_code, response.headers.get("x-request-id")
    try:
        body = response.json()
    except ValueError:
        body = None
    if status in GATEWAY_STATUSES and not (isinstance(body, dict) and "error" in body):
        raise _Gateway(response)
    if body is None:
        shown = response.text[:MAX_SHOWN_CHARS]
        body = error_body(f"the server's response is not JSON: {shown}", SERVER, None, "invalid_answer")
        return LineReply(502, body, request_id)
    return LineReply(status, body, request_id, put_off_s(status, response.headers, body))
