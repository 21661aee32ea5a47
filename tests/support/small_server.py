"""A small HTTP server around one function, in a thread."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    """A complete request."""

    method: str
    path: str
    headers: Message
    body: bytes


Reply = tuple[int, Mapping[str, str], bytes]
"""Status, headers, content."""


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that keeps connections and logs nothing, not even disconnected clients."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        pass

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def reply(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run a server in a thread, and yield its address."""
    server.daemon_threads = True
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering(answer: Callable[[Request], Reply]) -> Iterator[str]:
    """Answer requests with a function, and yield the address."""

    def handle(handler: QuietHandler) -> None:
        request = Request(handler.command, handler.path, handler.headers, handler.read_body())
        handler.reply(*answer(request))

    methods = {f"do_{method}": handle for method in ("GET", "HEAD", "POST")}
    with running(ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (QuietHandler,), methods))) as url:
        yield url
