"""Serve GET and HEAD below /console: files read at the start, by an exact table of paths.

A request's path never becomes a file name. Headers restrict the console in the browser: it loads from its own server
only, runs no inline script, and cannot turn text into markup (Trusted Types), so that adapter ids and model answers
stay text.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.console.paths import CONSOLE_PATHS, STATIC_FILES

POLICY = "; ".join(
    (
        "default-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Page:
    """Hold one file as it is sent."""

    content: bytes
    media_type: str
    # Identifies the content.
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> "Page":
        digest = hashlib.sha256(content).hexdigest()[:32]
        return cls(content, MEDIA_TYPES[name.rpartition(".")[2]], f'"{digest}"')

    def answer(self, request: Request) -> Response:
        """Send the file, or 304 if the client has it already."""
        headers = {**HEADERS, "etag": self.etag}
        if self.etag in _known_tags(request):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def read_pages() -> dict[str, Page]:
    """Read the file of each path in `CONSOLE_PATHS`.

    The page names its resources relative to `/console`, for servers behind a proxy's prefix; for `/console/` the names
    are relative to the page itself.
    """
    folder = resources.files("api.console") / "static"
    index = (folder / "index.html").read_text("utf-8")
    beside = index.replace('"console/', '"./')
    pages = {
        "/console": Page.of("index.html", index.encode()),
        "/console/": Page.of("index.html", beside.encode()),
    }
    for name in STATIC_FILES:
        pages[f"/console/{name}"] = Page.of(name, (folder / name).read_bytes())
    return pages


def _known_tags(request: Request) -> set[str]:
    """Return the tags of If-None-Match, for weak comparison (RFC 9110 section 13.1.2)."""
    values = ",".join(request.headers.getlist("if-none-match")).split(",")
    return {value.strip().removeprefix("W/") for value in values}


def _handler(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return page.answer(request)

    return answer


router = APIRouter()
_pages = read_pages()
for _path in CONSOLE_PATHS:
    router.add_route(_path, _handler(_pages[_path]), ["GET"], include_in_schema=False)
