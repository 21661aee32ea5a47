"""HEAD is GET without its body: nothing of that is read from anywhere."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from api.asgi.middleware import HeadRequests


def ask(answer: Callable[[Any], Awaitable[Response]], method: str) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    app = HeadRequests(Starlette(routes=[Route("/", answer, methods=["GET"])]))
    scope = {"type": "http", "method": method, "path": "/", "headers": [], "query_string": b"", "asgi": {}}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert scope["method"] == method
    return sent


@pytest.mark.parametrize(("method", "most_read"), [("HEAD", 2), ("GET", 1000)])
def test_a_body_is_read_no_further_than_to_its_first_piece(method: str, most_read: int) -> None:
    seen: list[str] = []

    async def pieces() -> AsyncIterator[bytes]:
        try:
            for _ in range(1000):
                seen.append("read")
                yield b"x" * 1000
        finally:
            seen.append("closed")

    async def answer(_: Any) -> Response:
        return StreamingResponse(pieces(), headers={"content-length": "1000000"})

    sent = ask(answer, method)
    assert seen.count("read") <= most_read
    assert seen[-1] == "closed"
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"content-length"]) == (200, b"1000000")
    body = b"".join(message["body"] for message in sent[1:])
    assert (len(body), sent[-1]["more_body"]) == (0 if method == "HEAD" else 10**6, False)


def test_a_small_answer_and_a_failure() -> None:
    async def answer(_: Any) -> Response:
        return JSONResponse({"a": 1})

    async def fails(_: Any) -> Response:
        raise ZeroDivisionError

    start, body = ask(answer, "HEAD")
    assert (start["status"], dict(start["headers"])[b"content-length"], body["body"]) == (200, b"7", b"")
    with pytest.raises(ZeroDivisionError):
        ask(fails, "HEAD")
