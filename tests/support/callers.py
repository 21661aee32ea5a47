"""Callers without keys: what authentication puts into a request's scope, put there by a header."""

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth.principal import ANYBODY, Caller
from api.auth.rate_limits import RateLimitMiddleware


def with_callers(app: FastAPI, callers: dict[str, Caller]) -> None:
    """From now on requests come from whom their `x-caller` names, as `callers` is then; from anybody without it.

    To be called before the first request.
    """
    # Behind everything that finds out the caller, before everything that reads it.
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
