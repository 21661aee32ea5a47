"""GET and HEAD below /console: files that are read when the server starts, by an exact table of paths.

No path of a request ever becomes the name of a file. What the console may do in a browser is in its headers: it loads
from its own server only, runs no inline script, and may not make markup of text (Trusted Types), so that adapter ids
and answers of models stay text.
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
    """One file as it is sent; `etag` tells its content."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> "Page":
        digest = hashlib.sha256(content).hexdigest()[:32]
        return cls(content, MEDIA_TYPES[name.rpartition(".")[2]], f'"{digest}"')

    def answer(self, request: Request) -> Response:
        """The file, or 304 to whoever has it already."""
        headers = {**HEADERS, "etag": self.etag}
        if self.etag in _known_tags(request):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def read_pages() -> dict[str, Page]:
    """Every path of `CONSOLE_PATHS` with its file.

    The page names its files relative to `/console`, for servers behind a proxy's prefix; at `/console/` they are
    beside it.
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
    """What If-None-Match names; compared weakly, as RFC 9110 section 13.1.2 has it."""
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
