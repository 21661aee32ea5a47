"""HEAD: what GET would answer, without the body (RFC 9110, section 9.3.2). Load balancers and monitors probe so."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.sse import ClientGone, unless_disconnected


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
            await unless_disconnected(left, self._answer(scope, receive, send_head))
        except ClientGone:
            return
        finally:
            scope["method"] = "HEAD"

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
