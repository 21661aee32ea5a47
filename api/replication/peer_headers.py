"""Read the headers by which the edge of a cluster names a server that has, or computes, the pages of a prompt.

A client that could set them could make this server send the cluster's secret to any address. They are therefore refused
without the secret, and an edge does not forward such headers from its clients.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth.key_cache import KeyCache
from api.errors import ApiError, describe_at
from api.replication.peer import PEER
from lorasrv.request import Peer

CLUSTER = "x-lorasrv-cluster"
"""The secret of the cluster."""
PREFILL = "x-lorasrv-prefill"
"""URL of a server to ask for the prompt's pages; it computes those that it does not have."""
PAGES = "x-lorasrv-pages"
"""URL of a server to ask for the prompt's pages; it sends only those that it already has."""


class PeerHeaders:
    """Set the peer of a request, or respond with 400 or 403."""

    def __init__(self, app: ASGIApp, keys: KeyCache) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            peer = self._peer(Headers(scope=scope))
        except ApiError as refusal:
            await describe_at(scope["path"], refusal).response()(scope, receive, send)
            return
        token = PEER.set(peer)
        try:
            await self._app(scope, receive, send)
        finally:
            PEER.reset(token)

    def _peer(self, headers: Headers) -> Peer | None:
        """Return the server that a request names.

        Raises:
            ApiError: 403, the cluster's secret is missing; 400, the value is not an address, or there are two.
        """
        named = [name for name in (PREFILL, PAGES) if name in headers]
        if not named:
            return None
        if not self._keys.is_cluster(headers.get(CLUSTER, "")):
            why = f"{named[0]} is taken from the edge of this cluster only, with its secret in {CLUSTER}"
            raise ApiError(403, why, code="forbidden", param=named[0])
        if len(named) > 1:
            raise ApiError(400, f"{PREFILL} and {PAGES} name two servers; send one", code="invalid_value", param=PAGES)
        url = headers[named[0]]
        if not _is_address(url):
            why = f"{named[0]} must be the address of a server, such as http://10.0.0.7:8000"
            raise ApiError(400, why, code="invalid_value", param=named[0])
        return Peer(url, computes=named[0] == PREFILL)


def _is_address(url: str) -> bool:
    try:
        address = urlsplit(url)
        has_place = bool(address.hostname) and (address.port is None or address.port > 0)
    except ValueError:
        return False
    bare = not (address.query or address.fragment or address.username or address.password)
    return address.scheme in ("http", "https") and has_place and bare and address.path in ("", "/")
