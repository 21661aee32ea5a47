"""Callers without keys: a header sets the caller in a request's scope, instead of authentication."""

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth.principal import ANYBODY, Caller
from api.auth.rate_limits import RateLimitMiddleware


def with_callers(app: FastAPI, callers: dict[str, Caller]) -> None:
    """Set the caller of every request to the entry of `callers` that its `x-caller` names at that time, else to
    `ANYBODY`.

    Call this before the first request.
    """
    # After every middleware that determines the caller, before every middleware that reads it.
    classes: list[object] = [middleware.cls for middleware in app.user_middleware]
    app.user_middleware.insert(classes.index(RateLimitMiddleware), Middleware(_ByHeader, callers=callers))


class _ByHeader:
    def __init__(self, app: ASGIApp, callers: dict[str, Caller]) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = dict(scope["headers"]).get(b"x-caller", b"").decode()
            scope.setdefault("state", {})["caller"] = self._callers.get(name, ANYBODY)
        await self._app(scope, receive, send)
