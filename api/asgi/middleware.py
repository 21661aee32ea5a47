"""What surrounds every request: its id, who may speak to a server without keys, and an answer for what nobody caught.

Plain ASGI: Starlette's BaseHTTPMiddleware hides the client's disconnect from the routes, and those must see it.

HEAD: what GET would answer, without the body (RFC 9110, section 9.3.2). Load balancers and monitors probe so.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.asgi.address import is_loopback
from api.asgi.sse import ClientDisconnected, run_until_disconnect
from api.errors import ApiError, describe_at

_LOG = logging.getLogger(__name__)
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Envelope:
    """Gives each answer its x-request-id (the client's own if it is sane), and turns a surprise into a bare 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            _LOG.exception("request %s failed", request_id)
            # Once the answer has begun, only closing the connection tells the client that it is not whole.
            if started:
                raise
            await describe_at(scope["path"], error).response()(scope, receive, send_with_id)


class LoopbackGuard:
    """Lets local programs in, and web pages only if their origin is allowed.

    A page of any site can make the visitor's browser send requests to 127.0.0.1: its Origin tells. A name of the
    attacker's that resolves to 127.0.0.1 makes the page same-origin: its Host tells (DNS rebinding). `checks_host` says
    at each request whether that matters: not where a key is asked for, which such a page does not have.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Iterable[str], checks_host: Callable[[], bool]) -> None:
        self._app = app
        self._allowed_origins = frozenset(allowed_origins)
        self._checks_host = checks_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Headers(scope=scope))):
            await describe_at(scope["path"], refusal).response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # Whoever stands before us may take the other one, and with it what follows for another request
            # (RFC 9112 section 6.3).
            return ApiError(
                400,
                "the body's length is said twice, by Content-Length and by Transfer-Encoding",
                code="invalid_http",
                headers={"connection": "close"},
            )
        hosts = headers.getlist("host")
        if (len(hosts) != 1 or not is_loopback(host_name(hosts[0]))) and self._checks_host():
            return ApiError(
                403, "this server answers only to a loopback Host such as 127.0.0.1", code="host_not_allowed"
            )
        for origin in headers.getlist("origin"):
            if origin not in self._allowed_origins and not _same_origin(origin, hosts):
                return ApiError(
                    403,
                    "web pages of this origin may not use this server; start it with --allowed-origins to let them",
                    code="origin_not_allowed",
                )
        return None


def host_name(host: str) -> str:
    """The name in a Host header, without port; empty if it is malformed."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{1,5})?", host)
    return match[1].strip("[]") if match else ""


def _same_origin(origin: str, hosts: list[str]) -> bool:
    try:
        return [urlsplit(origin).netloc] == hosts and host_name(hosts[0]) != ""
    except ValueError:
        return False


def _request_id(given: str) -> str:
    return given if _SANE_REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


class HeadRequests:
    """Lets every HEAD pass as a GET, and keeps the body back; with its first piece the answer is over, and whoever
    would read the rest is told that nobody is there. In front of who looks at methods: key gate and router."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        is_over = asyncio.Event()

        async def send_head(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            await send({**message, "body": b"", "more_body": False})
            if message.get("more_body", False):
                is_over.set()
                # It ends here: cancelled, as if the client had left.
                await asyncio.Event().wait()

        async def left() -> Message:
            await is_over.wait()
            return {"type": "http.disconnect"}

        # In this very scope: the layers around read from it which route it was.
        scope["method"] = "GET"
        try:
            await run_until_disconnect(left, self._answer(scope, receive, send_head))
        except ClientDisconnected:
            return
        finally:
            scope["method"] = "HEAD"

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
