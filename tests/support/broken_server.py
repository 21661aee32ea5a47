"""An OpenAI-compatible server in a thread that fails in a chosen way, and counts its requests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from small_server import QuietHandler, running


class BrokenServer(ThreadingHTTPServer):
    """A server that answers requests of one token (which measure tokens) correctly, and fails every `every`-th other
    request in its `way`.
    """

    url = ""

    def __init__(self, way: str = "", every: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.way, self.every = way, every
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: set[str | None] = set()
        self.release = threading.Event()
        self._count = 0
        self._lock = threading.Lock()

    def way_of_next(self) -> str:
        with self._lock:
            self._count += 1
            return self.way if self._count % self.every == 0 else ""


@contextmanager
def broken_server(way: str = "", every: int = 1) -> Iterator[BrokenServer]:
    server = BrokenServer(way, every)
    with running(server) as server.url:
        try:
            yield server
        finally:
            server.release.set()


class _Handler(QuietHandler):
    server: BrokenServer

    def do_GET(self) -> None:  # noqa: N802
        cards = [{"id": "base", "owned_by": "nobody"}, {"id": "a", "parent": "base"}, {"id": "b", "parent": "base"}]
        if self.path == "/v1/models":
            self._whole(200, {"data": cards})
        elif self.path == "/version":
            self._whole(200, {"version": "9.9"})
        else:
            self._whole(404, {"detail": "nothing here"})

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.read_body())
        self.server.asked.append(body)
        self.server.paths.append(self.path)
        self.server.keys.add(self.headers.get("authorization"))
        way = "" if body["max_tokens"] == 1 else self.server.way_of_next()
        if way == "500":
            self._whole(500, {"error": {"message": "it burns"}})
        elif way == "404 model":
            self._whole(404, {"error": "no such model"})
        else:
            self._stream(body, way)

    def _whole(self, status: int, value: object) -> None:
        self.reply(status, {}, json.dumps(value).encode())

    def _stream(self, body: dict[str, Any], way: str) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        tokens = body["max_tokens"] + {"short": -1, "long": 1}.get(way, 0)
        for number in range(tokens):
            if number == 1 and way in ("cut", "silent", "error event", "no json"):
                self._go_wrong(way)
                return
            said = {"delta": {"content": "x "}} if "chat" in self.path else {"text": "x "}
            self._event({"choices": [said]})
        prompt = body.get("prompt") or body["messages"][0]["content"]
        if way != "no usage":
            usage = {"prompt_tokens": 3 + 2 * len(prompt.split()), "completion_tokens": tokens}
            self._event({"choices": [], "usage": usage})
        if way != "no done":
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _go_wrong(self, way: str) -> None:
        if way == "error event":
            self._event({"error": {"message": "the engine died"}})
            self._chunk(b"")
        elif way == "no json":
            self._chunk(b"data: {oops\n\n")
            self._chunk(b"")
        elif way == "silent":
            self.server.release.wait(20)
            self.close_connection = True
        else:
            # Without the last chunk.
            self.wfile.flush()
            self.close_connection = True

    def _event(self, value: object) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()
