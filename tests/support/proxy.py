"""An HTTP proxy in front of a real server that sometimes reports, as proxies do, that the server is unavailable."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
from small_server import Reply, Request, answering

PAGE = b"<html><body><h1>The server is away</h1></body></html>"


@dataclass
class Proxy:
    """Answer the next `refuses` POST requests with a page and this status; pass the others on."""

    client: httpx2.Client
    status: int
    refuses: int = 0
    url: str = ""

    def answer(self, request: Request) -> Reply:
        if request.body and self.refuses:
            self.refuses -= 1
            return self.status, {"content-type": "text/html"}, PAGE
        headers = {"content-type": request.headers["content-type"]} if request.body else {}
        answer = self.client.request(request.method, request.path, content=request.body, headers=headers)
        return answer.status_code, {"content-type": answer.headers["content-type"]}, answer.content


@contextmanager
def proxied(behind: str, status: int) -> Iterator[Proxy]:
    """Run a proxy in front of the server at `behind`."""
    with httpx2.Client(base_url=behind, trust_env=False) as client:
        proxy = Proxy(client, status)
        with answering(proxy.answer) as proxy.url:
            yield proxy
