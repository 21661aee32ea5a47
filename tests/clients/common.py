"""What scripts of clients share. They run in environments of their own, without lorasrv and pytest."""

import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHAT = [{"role": "user", "content": "What should I eat for breakfast?"}]


@dataclass(frozen=True)
class Arguments:
    """The server, the base that it serves, and an adapter of it."""

    url: str
    base: str
    adapter: str

    @classmethod
    def read(cls) -> "Arguments":
        return cls(*sys.argv[1:4])


def check(holds: bool, why: str = "") -> None:
    """As `assert`, which -O would take away."""
    if not holds:
        raise AssertionError(why or "see the line above")


def check_differ(base: str | None, adapter: str | None) -> None:
    """The adapter answered, and not the base in its place."""
    check(bool(base) and bool(adapter), f"an empty answer: {base!r}, {adapter!r}")
    check(base != adapter, f"the adapter says what the base says: {base!r}")


def passed(what: str) -> None:
    print(f"  ok: {what}", flush=True)


@contextmanager
def refuses_first(url: str, status: int, headers: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Something before the server at `url` that answers the first request with `status`: its URL, and paths it saw."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            seen.append(self.path)
            body = self.rfile.read(int(self.headers["content-length"]))
            if len(seen) == 1:
                content, code, more = b'{"error": {"message": "later", "type": "x", "param": null}}', status, headers
            else:
                kind = {"content-type": "application/json"}
                with urllib.request.urlopen(urllib.request.Request(url + self.path, body, kind)) as answer:
                    content, code, more = answer.read(), answer.status, {}
            self.send_response(code)
            for name, value in {"content-type": "application/json", **more}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()
