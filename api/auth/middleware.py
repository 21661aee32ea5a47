"""Authenticate each request in front of all routes, so that no route can omit it.

The decision uses the path that the router gets, not one taken from a rebuilt URL, so a Host header cannot change it
(CVE-2026-48746 in vLLM). A secret is never logged and never repeated in a response.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth.key_cache import KeyCache, KeyRefused, KeysUnreadable
from api.auth.principal import ANYBODY, NOBODY, STATE, Caller
from api.auth.scopes import ADMIN, REPLICATE, further_needs, needed, needs_no_key
from api.errors import ApiError, describe_at

BEARER = "send a key as the header Authorization: Bearer lorasrv-..."
CHALLENGE = {"www-authenticate": 'Bearer realm="lorasrv"'}
POLICY_VIOLATION = 1008
_IN_QUERY = frozenset({"api_key", "api-key", "apikey", "key", "token", "access_token"})
_OTHER_HEADERS = ("x-api-key", "api-key")


class AuthMiddleware:
    """Put the caller into the request's state, or respond with 401 or 403."""

    def __init__(self, app: ASGIApp, keys: KeyCache) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # There are no WebSocket routes; a new one must define its scope here.
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            return
        try:
            caller = self._caller(scope)
            # Copied, because requests share the server's state. Set before a refusal, so that the caller is logged.
            scope["state"] = {**scope.get("state", {}), STATE: caller}
            _check_scope(scope, caller)
        except ApiError as refusal:
            await describe_at(scope["path"], refusal).response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        if self._keys.is_open():
            return self._cluster_or_anybody(scope)
        if needs_no_key(scope["method"], scope["path"]):
            return NOBODY
        secret = _secret(scope)
        with _refusals():
            return self._keys.caller(secret)

    def _cluster_or_anybody(self, scope: Scope) -> Caller:
        """Return the caller at a server without keys, which accepts only one secret: its cluster's."""
        kind, _, secret = Headers(scope=scope).get("authorization", "").partition(" ")
        is_cluster = kind.lower() == "bearer" and self._keys.is_cluster(secret.strip())
        return self._keys.caller(secret.strip()) if is_cluster else ANYBODY


def check_key(keys: KeyCache, principal: str) -> None:
    """Check that a key is still valid, for code that acts for a key without its secret.

    Raises:
        ApiError: 401, the key is revoked or expired; 503, keys cannot be read now.
    """
    with _refusals():
        keys.check(principal)


@contextmanager
def _refusals() -> Iterator[None]:
    """Convert the key cache's errors to responses."""
    try:
        yield
    except KeysUnreadable:
        raise ApiError(
            503,
            "keys cannot be checked now; the server's log says why",
            code="keys_unreadable",
            headers={"retry-after": "10"},
        ) from None
    except KeyRefused as refused:
        was = "is not known here" if refused.state is None else f"is {refused.state}"
        raise _unauthorized(f"this key {was}", "invalid_api_key") from None


def _check_scope(scope: Scope, caller: Caller) -> None:
    """Check the scope that the route needs.

    Raises:
        ApiError: 403.
    """
    needs = needed(scope["method"], scope["path"])
    if caller is NOBODY or (caller is ANYBODY and needs != REPLICATE):
        return
    if needs is None and _is_route(scope):
        needs = ADMIN
    if needs is not None and not any(caller.may(of) for of in needs):
        further = further_needs(scope["method"], scope["path"])
        wanted = f"{' or '.join(sorted(needs))}{f' ({further})' if further else ''}"
        raise ApiError(
            403,
            f"this needs a key of scope {wanted}; yours has {', '.join(sorted(caller.scopes))}"
            if needs != REPLICATE
            else "only servers of this cluster may ask this, with the secret of --cluster-secret-file",
            code="forbidden",
        )


def _secret(scope: Scope) -> str:
    """Return the request's secret.

    Raises:
        ApiError: 401, the secret is missing or in the wrong place.
    """
    headers = Headers(scope=scope)
    given = headers.getlist("authorization")
    if len(given) > 1:
        raise _unauthorized(f"there are several Authorization headers; {BEARER}", "invalid_api_key")
    kind, _, secret = (given[0] if given else "").partition(" ")
    if kind.lower() == "bearer" and secret.strip():
        return secret.strip()
    if given:
        raise _unauthorized(f"the Authorization header contains no bearer token; {BEARER}", "invalid_api_key")
    if any(name in headers for name in _OTHER_HEADERS):
        raise _unauthorized(f"this header is not read; {BEARER}", "missing_api_key")
    if _IN_QUERY & set(_query_names(scope)):
        raise _unauthorized(f"a key in the address ends up in logs and is not read; {BEARER}", "missing_api_key")
    raise _unauthorized(f"this server has keys; {BEARER}", "missing_api_key")


def _query_names(scope: Mapping[str, Any]) -> list[str]:
    try:
        names = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True, max_num_fields=100)
    except ValueError:
        return []
    return [name.lower() for name in names]


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers=CHALLENGE)


def _is_route(scope: Scope) -> bool:
    """Return whether the application has such a route; called only for routes that are not in the table."""
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].router.routes)
