"""ASGI applications that are not lorasrv."""

from starlette.types import ASGIApp, Receive, Scope, Send


def always(status: int, body: bytes) -> ASGIApp:
    """Return an application that gives the same answer to every request."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return app
