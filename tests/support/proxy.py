"""An HTTP proxy before a real server that says now and then, as proxies do, that the server is not there."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx2

PAGE = b"<html><body><h1>The server is away</h1></body></html>"


class Proxy(ThreadingHTTPServer):
    """Answers the next `refuses` POST requests by itself, with a page and this status; passes the others on."""

    daemon_threads = True

    def __init__(self, behind: str, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.refuses = 0
        self.client = httpx2.Client(base_url=behind, trust_env=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def proxied(behind: str, status: int) -> Iterator[Proxy]:
    with Proxy(behind, status) as proxy, proxy.client:
        thread = Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._pass_on(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.refuses:
            self.server.refuses -= 1
            self._say(self.server.status, "text/html", PAGE)
        else:
            self._pass_on(body)

    def _pass_on(self, body: bytes) -> None:
        headers = {"content-type": self.headers["content-type"]} if body else {}
        answer = self.server.client.request(self.command, self.path, content=body, headers=headers)
        self._say(answer.status_code, answer.headers["content-type"], answer.content)

    def _say(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
