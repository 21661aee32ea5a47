"""Parse JSON bodies strictly: content type, bounded depth and number of values, no NaN, no repeated keys.

FastAPI parses bodies with `json.loads`, which accepts NaN and lets the last of two equal keys win. Sizes in bytes are
bounded in `api.asgi.body_limits`.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from adapter_store.formats import strict_json
from api.asgi.body_limits import parsing_alone
from api.errors import ApiError

MAX_DEPTH = 64
MAX_VALUES = 1 << 20
"""Eight million bytes may hold four million empty lists, each of which takes about sixty bytes of memory."""
# Parsing 256 KiB takes about 3 ms: larger bodies would delay the streams of other clients.
INLINE_BYTES = 256 << 10


class JsonRoute(APIRoute):
    """Route whose body, if it declares one, is read by `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_strictly(request: Request) -> Response:
            _check_media_type(request)
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


class StrictRequest(Request):
    """Parse the body strictly."""

    async def body(self) -> bytes:
        """Return the body.

        Raises:
            ApiError: 400, the body is empty.
        """
        data = await super().body()
        if not data:
            raise _malformed("the body is empty; a JSON object is expected")
        return data

    async def json(self) -> Any:
        data = await self.body()
        if len(data) <= INLINE_BYTES:
            return parse_json(data)
        async with parsing_alone(self.scope):
            return await run_in_threadpool(parse_json, data)


def parse_json(data: bytes, name: str = "the body") -> Any:
    """Parse strict JSON.

    Args:
        name: name of the text in error messages.
    Raises:
        ApiError: 400, with the text's fault.
    """
    _check_number_of_values(data, name)
    try:
        value = strict_json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise _malformed(f"{name} is not UTF-8") from None
    except RecursionError:
        raise _too_deep(name) from None
    except json.JSONDecodeError as error:
        raise _malformed(f"{name} is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:
        raise _malformed(f"{name} is not strict JSON: {error}") from None
    # A text with few brackets cannot be deep. Counting them is fast and spares most bodies the walk.
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        _check_depth(value, name)
    return value


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "content-type must be application/json", code="unsupported_media_type")


def _check_number_of_values(data: bytes, name: str) -> None:
    """Bound the number of values before any is created.

    Each value is the first of its list or object, or follows a comma. Commas and brackets within strings count, too: a
    string with so many of them has more tokens than a context anyway.
    """
    if data.count(b",") + data.count(b"{") + data.count(b"[") >= MAX_VALUES:
        raise _malformed(f"{name} has more than {MAX_VALUES} values")


def _check_depth(value: Any, name: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item) if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep(name)


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _malformed(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def _too_deep(name: str) -> ApiError:
    return _malformed(f"{name} is nested more than {MAX_DEPTH} levels deep")
