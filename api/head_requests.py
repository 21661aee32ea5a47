"""HEAD: what GET would answer, without the body (RFC 9110, section 9.3.2). Load balancers and monitors probe so."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """Lets every HEAD pass as a GET, and keeps the body back. In front of who looks at methods: key gate and router."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        # In this very scope: the layers around read from it which route it was.
        scope["method"] = "GET"
        try:
            await self._app(scope, receive, send_head)
        finally:
            scope["method"] = "HEAD"
