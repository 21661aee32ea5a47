"""The edge: take a client's request, choose the server that answers, and pipe the bytes. Replicas check the API key.

Requests that need an engine go to a replica, all others to the registry, the only writer. The edge holds no state that
a second edge would have to know.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.asgi.body_limits import BodyLimitMiddleware
from api.asgi.draining import Draining, DrainMiddleware
from api.asgi.middleware import Envelope
from api.asgi.sse import ClientDisconnected, run_until_disconnect
from api.auth.scopes import GENERATING
from api.cluster.chooser import Chooser, ReplicaAddress
from api.cluster.demand import read_demand
from api.cluster.edge_stats import EdgeStats
from api.cluster.forwarded_request import ForwardedRequest
from api.cluster.forwarding import (
    Destination,
    RawHeaders,
    check_framing,
    destination,
    forwarded,
    returned,
    silent_s,
    target_of,
)
from api.cluster.own_routes import GUARDED, OPEN, named_replica, without_replica
from api.cluster.peers import Peers, RequestPeers
from api.cluster.survey import ANSWER_S, Survey
from api.cluster.upstream import Broken, Silent, Unreachable, UpstreamReply, UpstreamRequest, Upstreams
from api.errors import ApiError, describe_at
from lorasrv.errors import LorasrvError, NoReplicaReady
from lorasrv.placement.placement import RETRY_AFTER_S, Demand

_LOG = logging.getLogger(__name__)
SUSPECT_S = 1.0
"""Time for which a replica that did not answer is tried last."""
MAX_KEPT_BYTES = 256 << 20
"""Limit on the request bodies that are kept to resume streams; beyond it, streams are not resumed."""


class Edge:
    """Serve as one ASGI application in front of all replicas.

    Args:
        chooser: chooses the replica that answers.
        registry: `http://host:port` of the server that owns the store; None: requests for it are refused.
        secret: the cluster's; None: streams are not resumed, and replicas take no pages from each other.
    """

    def __init__(self, chooser: Chooser, registry: str | None = None, secret: str | None = None) -> None:
        self._chooser, self._registry, self._secret = chooser, registry, secret
        self._upstreams = Upstreams()
        self.stats = EdgeStats()
        self._peers = Peers(chooser, self.stats)
        # Replica id -> time after which it is no longer suspect.
        self._suspects: dict[str, float] = {}
        self._kept_bytes = 0
        self._survey = None if secret is None else Survey(chooser, self._upstreams, self.stats, secret)
        self._surveying: asyncio.Task[None] | None = None
        self.draining = Draining()
        self._app = Envelope(DrainMiddleware(BodyLimitMiddleware(self._answer), self.draining))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._app(scope, receive, self._counted(send))
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _counted(self, send: Send) -> Send:
        """Count the answer by its status when it begins."""

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.stats.answers[message["status"]] += 1
            await send(message)

        return count_and_send

    # What a forwarded request needs (`Replicas`).

    @asynccontextmanager
    async def choose(self, demand: Demand, tried: Collection[str]) -> AsyncIterator[ReplicaAddress]:
        """Enter as `Chooser.choose` does, but choose replicas that failed recently last.

        Raises:
            NoReplicaReady: on entering.
        """
        async with AsyncExitStack() as entered:
            try:
                replica = await entered.enter_async_context(self._chooser.choose(demand, {*tried, *self.suspects()}))
            except NoReplicaReady:
                replica = await entered.enter_async_context(self._chooser.choose(demand, tried))
            yield replica

    def suspect(self, replica: ReplicaAddress) -> None:
        """Note that a replica did not answer."""
        self._suspects[replica.id] = time.monotonic() + SUSPECT_S

    def suspects(self) -> Collection[str]:
        """Return the ids of the replicas that recently did not answer."""
        now_s = time.monotonic()
        self._suspects = {name: until_s for name, until_s in self._suspects.items() if until_s > now_s}
        return self._suspects.keys() | set(self._chooser.silent)

    @property
    def is_stopping(self) -> bool:
        """Return whether running requests are cancelled because the edge stops."""
        return self.draining.is_over

    def unlike(self, replica: ReplicaAddress) -> frozenset[str]:
        """Return the ids of the replicas that might not continue this replica's answer with the same tokens."""
        others = self._chooser.replicas()
        return frozenset(one.id for one in others if not one.kernels or one.kernels != replica.kernels)

    # Requests.

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_framing(scope["headers"])
            replica = named_replica(self._chooser, scope["method"], scope["path"], scope.get("query_string", b""))
            if replica is not None:
                await self._ask_one(replica, scope, receive, send)
            elif scope["method"] in ("GET", "HEAD") and await self._answer_here(scope, receive, send):
                return
            elif destination(scope["method"], scope["path"]) is Destination.REPLICA:
                await self._ask_replicas(scope, receive, send)
            else:
                await self._ask_registry(scope, receive, send)
        except ClientDisconnected:
            return
        except Broken as error:
            # A part of the answer has been sent: the server cuts the connection.
            _LOG.warning("an answer to %s broke off: %s", scope["path"], error)
        except (ApiError, LorasrvError) as error:
            await describe_at(scope["path"], error).response()(scope, receive, send)

    async def _ask_replicas(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        headers = Headers(scope=scope)
        session = headers.get("x-session-id")
        demand = await read_demand(scope["path"], session, body, self._base_names(), self.stats.estimator)
        takes_pages = self._secret is not None and scope["path"] in GENERATING
        client = headers.get("authorization", "")
        peers = self._peers.of(demand, client) if takes_pages else RequestPeers(self._peers, demand)
        num_bytes = len(body)
        keeps = self._secret if self._kept_bytes + num_bytes <= MAX_KEPT_BYTES else None
        forwarded = ForwardedRequest(
            self, self._upstreams, self.stats, scope, send, peers, _request(scope, body), keeps
        )
        # The forwarded request frees the body once it is no longer needed.
        del body
        self._kept_bytes += num_bytes
        try:
            await run_until_disconnect(receive, forwarded.run())
        finally:
            self._kept_bytes -= num_bytes

    async def _ask_one(self, replica: ReplicaAddress, scope: Scope, receive: Receive, send: Send) -> None:
        """Pipe a request to the replica that its query names, and the answer back."""
        query = without_replica(scope.get("query_string", b""))
        try:
            await self._pipe_from(replica.url, {**scope, "query_string": query}, receive, send)
        except Unreachable as error:
            _LOG.warning("replica %s: %s", replica.id, error)
            raise NoReplicaReady(f"replica {replica.id} does not answer", retry_after_s=RETRY_AFTER_S) from None

    async def _ask_registry(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pipe a request and its answer. The request is never sent twice, because it may change the store."""
        if self._registry is None:
            raise ApiError(503, "this cluster has no registry, which answers this", code="no_registry")
        try:
            await self._pipe_from(self._registry, scope, receive, send)
        except Unreachable as error:
            _LOG.warning("registry: %s", error)
            raise ApiError(
                503,
                "the registry does not answer; replicas go on serving the adapters that they know",
                code="registry_unreachable",
                headers={"retry-after": "2"},
            ) from None

    async def _pipe_from(self, url: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pipe a request and its answer.

        Raises:
            Unreachable: nothing was sent back.
            Broken: a part of the answer was sent back.
        """
        has_arrived = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            async for piece in _arriving(receive):
                yield piece
            has_arrived.set()

        async def left() -> Message:
            # Until then, the reader of the body notices a disconnect.
            await has_arrived.wait()
            return await receive()

        async def ask_and_pipe() -> None:
            most_s = silent_s(scope["method"], scope["path"], scope.get("query_string", b""))
            try:
                reply = await self._upstreams.ask(url, replace(_request(scope, body()), silent_s=most_s))
            except (Broken, Silent) as error:
                raise Unreachable(str(error)) from None
            has_arrived.set()
            try:
                await _pipe(reply, send)
            finally:
                reply.close()

        await run_until_disconnect(left, ask_and_pipe())

    async def _answer_here(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer a request to the edge itself; return whether it was one."""
        path = scope["path"]
        answer = OPEN.get(path) or GUARDED.get(path)
        if answer is None:
            return False
        if path in GUARDED and (refusal := await run_until_disconnect(receive, self._refusal(scope))):
            await refusal(scope, receive, send)
        else:
            figures = {} if self._survey is None else self._survey.figures
            await answer(self._chooser, self.stats, figures)(scope, receive, send)
        return True

    async def _refusal(self, scope: Scope) -> Response | None:
        """Ask a replica whether this client may read its figures; return the replica's refusal, None if it may.

        Raises:
            NoReplicaReady: there is no replica to ask.
        """
        headers = [*forwarded(scope["headers"], scope["state"]["request_id"])]
        question = UpstreamRequest("GET", b"/v1/pool", headers)
        tried: set[str] = set()
        while True:
            async with self.choose(Demand(None, 0.0), tried) as replica:
                tried.add(replica.id)
                try:
                    async with asyncio.timeout(ANSWER_S):
                        status, body = await self._upstreams.fetch(replica.url, question)
                except (Unreachable, Broken, TimeoutError):
                    continue
            return None if status == 200 else Response(body, status, media_type="application/json")

    def _base_names(self) -> Collection[str]:
        return () if self._survey is None else self._survey.base_names

    async def _live(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "lifespan.shutdown":
            if self._survey is not None:
                self._surveying = asyncio.create_task(self._survey.run())
            await send({"type": f"{message['type']}.complete"})
        if self._surveying is not None:
            self._surveying.cancel()
            await asyncio.gather(self._surveying, return_exceptions=True)
        self._upstreams.close()
        await send({"type": "lifespan.shutdown.complete"})


def _request(scope: Scope, body: bytes | AsyncIterator[bytes]) -> UpstreamRequest:
    """Build the request to send on. Its length is that of the body if known, else as the client announced it."""
    headers: RawHeaders = forwarded(scope["headers"], scope["state"]["request_id"])
    given = [value for name, value in scope["headers"] if name == b"content-length"]
    if isinstance(body, bytes):
        framing = [(b"content-length", str(len(body)).encode())] if body or given else []
    else:
        framing = [(b"content-length", given[0])] if given else []
        if not given and any(name == b"transfer-encoding" for name, _ in scope["headers"]):
            framing = [(b"transfer-encoding", b"chunked")]
    return UpstreamRequest(scope["method"], target_of(scope), [*headers, *framing], body)


async def _read_body(receive: Receive) -> bytes:
    """Return the whole body. Raises: ClientDisconnected."""
    return b"".join([piece async for piece in _arriving(receive)])


async def _arriving(receive: Receive) -> AsyncIterator[bytes]:
    """Yield a body as it arrives.

    Raises:
        ClientDisconnected.
    """
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if piece := message.get("body", b""):
            yield piece
        if not message.get("more_body", False):
            return


async def _pipe(reply: UpstreamReply, send: Send) -> None:
    """Pass an answer on as it arrives. If it breaks off, the exception cuts the client's connection, too.

    Raises:
        Broken.
    """
    await send({"type": "http.response.start", "status": reply.status, "headers": returned(reply.headers)})
    while piece := await reply.read():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
