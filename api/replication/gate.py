"""Answer requests only with names that are new enough."""

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapter_store.errors import OriginUnreachable
from adapter_store.store import AdapterStore
from api.asgi.draining import OPEN_PATHS
from api.errors import ApiError, describe_at
from api.replication.follower import Follower
from api.replication.headers import MIN_REVISION, REVISION

MAX_WAIT_S = 2.0
"""Longest wait for a revision that a client asks for."""
_REVISION = re.compile(r"[0-9]{1,18}")


class ReplicationGate:
    """Add the revision of the names to responses, and wait for the revision that a request asks for.

    A follower without a lease answers 503, except on the paths that monitoring and edges read.

    Args:
        follower: None on a server that owns its store.
    """

    def __init__(self, app: ASGIApp, store: AdapterStore, follower: Follower | None) -> None:
        self._app, self._store, self._follower = app, store, follower

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return

        async def send_with_revision(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Empty if the key is refused: a client without a key must not learn how often names change.
                told = "" if message["status"] == 401 else str(self._store.feed.revision)
                MutableHeaders(scope=message)[REVISION] = told
            await send(message)

        try:
            await self._check(Headers(scope=scope).get(MIN_REVISION))
        except (ApiError, OriginUnreachable) as refusal:
            await describe_at(scope["path"], refusal).response()(scope, receive, send_with_revision)
            return
        await self._app(scope, receive, send_with_revision)

    async def _check(self, wanted: str | None) -> None:
        """Check that this server may answer, with names of at least the wanted revision.

        Raises:
            OriginUnreachable: this server has no lease.
            ApiError: 400, the header is not a number; 503, the names are older.
        """
        if self._follower is not None:
            self._follower.check_lease()
        if wanted is None:
            return
        if not _REVISION.fullmatch(wanted):
            raise ApiError(400, f"{MIN_REVISION} is the number of a revision", code="invalid_value", param=MIN_REVISION)
        if not await self._is_reached(int(wanted)):
            raise ApiError(
                503,
                f"the names here have revision {self._store.feed.revision}, older than {wanted} ({MIN_REVISION})",
                code="revision_not_reached",
                headers={"retry-after": "1"},
            )

    async def _is_reached(self, revision: int) -> bool:
        if self._follower is None:
            return self._store.feed.revision >= revision
        return await self._follower.until_revision(revision, MAX_WAIT_S)
