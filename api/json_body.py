"""JSON bodies read strictly: right content type, bounded bytes and depth, no NaN, no repeated key.

FastAPI reads bodies of any size with `json.loads`, which takes NaN and lets the last of two equal keys win.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from api.errors import ApiError

MAX_BODY_BYTES = 8 << 20
MAX_DEPTH = 64
# Parsing 256 KiB takes about 3 ms: more than that would hold up the streams of everyone else.
INLINE_BYTES = 256 << 10
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonRoute(APIRoute):
    """A route whose body, if it declares one, is read by `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_strictly(request: Request) -> Response:
            _check_headers(request)
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


class StrictRequest(Request):
    """A request whose body is bounded while it arrives, and parsed without leniency."""

    _bytes: bytes | None = None

    async def body(self) -> bytes:
        """Raises: ApiError: 413 as soon as more than `MAX_BODY_BYTES` came or were announced."""
        if self._bytes is None:
            chunks, total = [], 0
            async for chunk in self.stream():
                total += len(chunk)
                if total > MAX_BODY_BYTES:
                    raise _too_large()
                chunks.append(chunk)
            self._bytes = b"".join(chunks)
            if not self._bytes:
                raise _malformed("the body is empty; a JSON object is expected")
        return self._bytes

    async def json(self) -> Any:
        data = await self.body()
        if len(data) <= INLINE_BYTES:
            return parse_json(data)
        return await run_in_threadpool(parse_json, data)


def parse_json(data: bytes) -> Any:
    """Raises: ApiError: 400, saying what is wrong with the text."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except UnicodeDecodeError:
        raise _malformed("the body is not UTF-8") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise _malformed(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:
        raise _malformed(f"the body is not strict JSON: {error}") from None
    # A text with few brackets cannot be deep, and counting them is fast; most bodies are never walked.
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        _check_depth(value)
    if _SURROGATE.search(data):
        _check_text(value)
    return value


def _check_headers(request: Request) -> None:
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not accepted", code="unsupported_media_type")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "content-type must be application/json", code="unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item) if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def _check_text(value: Any) -> None:
    """Refuse halves of characters: they are no text, and fail wherever text is written next."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _malformed("the body holds a lone surrogate (\\ud800 to \\udfff), which is no text") from None


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {repeated[:80]!r} appears more than once")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number {text[:40]} is too large")
    return value


def _malformed(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def _too_deep() -> ApiError:
    return _malformed(f"the body is nested more than {MAX_DEPTH} levels deep")


def _too_large() -> ApiError:
    return ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="body_too_large")
