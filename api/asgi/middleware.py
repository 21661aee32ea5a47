"""Wrap each request: request id, protection of servers without keys, responses to unexpected errors, HEAD.

Plain ASGI: Starlette's BaseHTTPMiddleware hides the client's disconnect from the routes, which must see it.
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
    """Set each response's x-request-id (the client's own if it is well-formed), and turn unexpected errors into a
    bare 500.
    """

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
            # Once the response has begun, only closing the connection tells the client that it is incomplete.
            if started:
                raise
            await describe_at(scope["path"], error).response()(scope, receive, send_with_id)


class LoopbackGuard:
    """Accept local programs, and web pages only from allowed origins.

    A page of any site can make the visitor's browser send requests to 127.0.0.1; the Origin header reveals it. If the
    attacker's domain resolves to 127.0.0.1 (DNS rebinding), the page is same-origin; the Host header reveals it.

    Args:
        checks_host: returns for each request whether to check the Host; not needed where a key is required, because
            such a page has none.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Iterable[str], checks_host: Callable[[], bool]) -> None:
        self._app = app
        self._allowed_origins = frozenset(allowed_origins)
        self._checks_host = checks_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := _unclear(scope) or self._refusal(Headers(scope=scope))):
            await describe_at(scope["path"], refusal).response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
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


def _unclear(scope: Scope) -> ApiError | None:
    """Return the refusal of a request whose end is ambiguous, else None; its connection is closed afterwards."""
    headers, version, ends = Headers(scope=scope), scope["http_version"], {"connection": "close"}
    if version not in ("1.0", "1.1"):
        said = f"HTTP/{version} is not served, only HTTP/1.1 and HTTP/1.0"
        return ApiError(400, said, code="invalid_http", headers=ends)
    if "content-length" in headers and "transfer-encoding" in headers:
        # A proxy in front of this server may use the other header, and take the rest for another request (RFC 9112
        # section 6.3).
        return ApiError(
            400,
            "the body's length is given twice, by Content-Length and by Transfer-Encoding",
            code="invalid_http",
            headers=ends,
        )
    return None


def host_name(host: str) -> str:
    """Return the name in a Host header, without port; empty if malformed."""
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
    """Serve HEAD as GET without the body (RFC 9110, section 9.3.2), for probes of load balancers and monitors.

    The response ends with the first piece of its body; the application then sees a disconnect. Must wrap the middleware
    that checks methods: authentication and router.
    """

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
                # The response ends here: cancel the application, as after a disconnect.
                await asyncio.Event().wait()

        async def left() -> Message:
            await is_over.wait()
            return {"type": "http.disconnect"}

        # Change this scope, not a copy: the outer middleware reads the matched route from it.
        scope["method"] = "GET"
        try:
            await run_until_disconnect(left, self._answer(scope, receive, send_head))
        except ClientDisconnected:
            return
        finally:
            scope["method"] = "HEAD"

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
