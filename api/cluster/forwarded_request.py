"""Get one request answered: by the best replica, or by others as long as no answer has begun."""

import asyncio
import logging
import math
import re
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.types import Scope, Send

from api.asgi.sse import CHUNKS, DONE, ChunkSender, event, named_event
from api.cluster.chooser import ReplicaAddress
from api.cluster.edge_stats import EdgeStats
from api.cluster.forwarding import RawHeaders, returned
from api.cluster.peers import PeerHeaders, RequestPeers, taken_from
from api.cluster.resume import CLUSTER, RESUME, EventStreamCopy
from api.cluster.upstream import Broken, Unreachable, UpstreamReply, UpstreamRequest, Upstreams
from api.errors import RESPONSES_PATH, TGI_PATHS, describe_at
from lorasrv.errors import LorasrvError, NoReplicaReady, ReplicaLost, ServerStopping
from lorasrv.placement.placement import RETRY_AFTER_S, Demand

_LOG = logging.getLogger(__name__)
MAX_RETRIES = 2
HELD_BYTES = 64 << 10
"""Longest answer that is read whole before its first byte is passed on, so that another replica can still take over."""
MOVE_S = 5.0
"""Longest time that a stream of a draining replica waits for another replica to continue it; then it stays."""
_USAGE = re.compile(rb'"(?:completion|output)_tokens":(\d+)')
"""The last match is the answer's usage; earlier ones may be text that repeats the request."""
_HIDDEN = frozenset({RESUME})


class Replicas(Protocol):
    """Choose among the replicas, with what the edge knows of them; implemented by `Edge`."""

    def choose(self, demand: Demand, tried: Collection[str]) -> AbstractAsyncContextManager[ReplicaAddress]:
        """Enter as `Chooser.choose` does, but choose replicas that failed recently last."""

    def suspect(self, replica: ReplicaAddress) -> None:
        """Note that a replica did not answer."""

    def suspects(self) -> Collection[str]:
        """Return the ids of the replicas that recently did not answer."""

    @property
    def is_stopping(self) -> bool:
        """Return whether running requests are cancelled because the edge stops."""

    def unlike(self, replica: ReplicaAddress) -> frozenset[str]:
        """Return the ids of the replicas that might not continue this replica's answer with the same tokens."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """Hold an answer that was read to its end."""

    status: int
    headers: RawHeaders
    body: bytes

    @property
    def retry_after_s(self) -> float:
        value = next((value for name, value in self.headers if name == b"retry-after"), b"")
        return float(value) if value.isdigit() else math.inf


class ForwardedRequest:
    """Answer one request.

    Args:
        peers: name the replicas that pages may be taken from, and what the request asks of them.
        request: sent to replicas; its body is bytes.
        secret: makes replicas report how to resume; None: streams are not resumed, and no pages are taken.
    """

    def __init__(
        self,
        replicas: Replicas,
        upstreams: Upstreams,
        stats: EdgeStats,
        scope: Scope,
        send: Send,
        peers: RequestPeers,
        request: UpstreamRequest,
        secret: str | None,
    ) -> None:
        self._replicas, self._upstreams, self._stats = replicas, upstreams, stats
        self._path: str = scope["path"]
        self._send = send
        chunks: ChunkSender | None = scope.get("extensions", {}).get(CHUNKS)
        self._send_chunk = self._send_body if chunks is None else chunks.send
        self._peers, self._request, self._secret = peers, request, secret
        self._tried: set[str] = set()
        self._num_failed = 0
        self._has_begun = False
        self._copy: EventStreamCopy | None = None
        # Answers of full replicas, the shortest `Retry-After` first, and the ids of these replicas.
        self._full: list[_Whole] = []
        self._were_full: set[str] = set()
        # Answer of a replica that is stopping.
        self._stopping: _Whole | None = None
        self._why: LorasrvError | None = None

    async def run(self) -> None:
        """Answer.

        Raises:
            NoReplicaReady, ReplicaLost: nothing was sent.
            Broken: the answer was partly sent, and only cutting the connection can end it.
        """
        try:
            await self._ask_until_answered()
        except asyncio.CancelledError:
            if self._replicas.is_stopping and self._copy is not None:
                await self._end_with(ServerStopping("the server has shut down; the answer is incomplete, ask again"))
            raise

    async def _ask_until_answered(self) -> None:
        while self._num_failed <= MAX_RETRIES:
            try:
                async with self._replicas.choose(self._peers.answer, self._tried) as replica:
                    if self._tried:
                        self._stats.retries += 1
                    self._tried.add(replica.id)
                    if await self._answer_from(replica):
                        return
            except NoReplicaReady as error:
                self._why = self._why or error
                break
            self._num_failed += 1
        await self._give_up()

    async def _answer_from(self, replica: ReplicaAddress) -> bool:
        """Ask a replica and pass its answer on; return whether the client has it. If not, another may be asked."""
        with self._peers.named(replica, self._replicas.suspects()) as peer:
            reply = await self._ask(replica, peer)
        return reply is not None and await self._pass_on(replica, reply)

    async def _ask(self, replica: ReplicaAddress, peer: PeerHeaders) -> UpstreamReply | None:
        """Send the request to a replica; return the head of its answer, None if there is no answer."""
        self._stats.sent[replica.id] += 1
        try:
            return await self._upstreams.ask(replica.url, self._next_request(peer))
        except Unreachable as error:
            self._note_failure(replica, error, NoReplicaReady("no replica answers", retry_after_s=RETRY_AFTER_S))
        except Broken as error:
            self._note_failure(replica, error, _lost())
        return None

    async def _pass_on(self, replica: ReplicaAddress, reply: UpstreamReply) -> bool:
        """Pass on a replica's answer and close it; return whether the client has the whole answer."""
        try:
            return await (self._go_on(replica, reply) if self._has_begun else self._begin(replica, reply))
        except Broken as error:
            self._note_failure(replica, error, _lost())
            if self._has_begun:
                self._prepare_resuming(replica)
            return False
        finally:
            reply.close()

    def _note_failure(self, replica: ReplicaAddress, error: Exception, why: LorasrvError) -> None:
        """Note what the client is told if no other replica answers; addresses, which are internal, go to the log."""
        _LOG.warning("replica %s: %s", replica.id, error)
        self._stats.failed[replica.id] += 1
        self._replicas.suspect(replica)
        self._why = why

    def _next_request(self, peer: PeerHeaders) -> UpstreamRequest:
        if self._secret is None:
            return self._request
        state = self._copy.state() if self._copy is not None else b""
        ours = [(RESUME, str(len(state)).encode()), (CLUSTER, self._secret.encode()), *peer]
        assert isinstance(self._request.body, bytes)
        body = state + self._request.body
        length = [(b"content-length", str(len(body)).encode())]
        kept = [header for header in self._request.headers if header[0] != b"content-length"]
        return replace(self._request, headers=[*kept, *ours, *length], body=body)

    # Beginning.

    async def _begin(self, replica: ReplicaAddress, reply: UpstreamReply) -> bool:
        if reply.status == 200:
            self._peers.on_answering(replica)
        length = reply.header(b"content-length")
        if length and int(length) <= HELD_BYTES:
            whole = _Whole(reply.status, reply.headers, await reply.read_all())
            if whole.status == 429:
                self._were_full.add(replica.id)
            if self._is_for_another(whole):
                return False
            await self._send_whole(whole)
            return True
        piece = await reply.read()
        self._has_begun = True
        await self._send_head(reply.status, reply.headers)
        if reply.header(b"content-type").startswith(b"text/event-stream"):
            self._copy = EventStreamCopy(reply.header(RESUME) if self._secret is not None else b"")
            if not self._copy.may_resume:
                # The request will not be sent again: free its body, since streams may last for hours.
                self._request = replace(self._request, body=b"")
            # Replicas that were full may have room by the time that one must continue this stream.
            self._tried -= self._were_full
            self._num_failed -= len(self._were_full)
            return await self._copy_events(replica, reply, piece)
        while piece:
            await self._send_chunk_or_body(reply, piece)
            piece = await reply.read()
        await self._end()
        return True

    def _is_for_another(self, whole: _Whole) -> bool:
        """Return whether an answer says that the replica is full or stops, so that another should be asked.

        After a full replica, one more that is not stopping is asked. If that one is full, too, the client gets the
        answer with the shorter wait.
        """
        if whole.status == 429:
            self._full.append(whole)
            self._full.sort(key=lambda one: one.retry_after_s)
            return len(self._full) == 1
        if whole.status != 503 or (b"connection", b"close") not in whole.headers:
            return False
        self._stopping = whole
        return self._num_failed < MAX_RETRIES

    async def _send_whole(self, whole: _Whole) -> None:
        if self._full and (whole.status == 429 or whole is self._stopping):
            whole = self._full[0]
        if usage := _USAGE.findall(whole.body):
            self._stats.observe_answer(self._peers.answer.adapter_id, int(usage[-1]))
        await self._send_head(whole.status, whole.headers)
        await self._send({"type": "http.response.body", "body": whole.body, "more_body": False})

    # Streams.

    async def _copy_events(self, replica: ReplicaAddress, reply: UpstreamReply, piece: bytes) -> bool:
        copy = self._copy
        assert copy is not None
        has_asked = False
        while piece:
            if ready := copy.push(piece):
                await self._send_chunk(ready)
            if copy.should_move and not has_asked:
                has_asked = True
                if (is_answered := await self._move(replica, reply)) is not None:
                    return is_answered
            piece = await reply.read()
        if rest := copy.end():
            await self._send_chunk(rest)
        if copy.num_tokens:
            self._stats.observe_answer(self._peers.answer.adapter_id, copy.num_tokens)
        await self._end()
        return True

    async def _move(self, draining: ReplicaAddress, reply: UpstreamReply) -> bool | None:
        """Let another replica continue the stream, taking this replica's pages while they exist.

        Returns: whether the client has the whole answer from there; None: no other replica continues it.
        """
        others = self._tried | self._replicas.unlike(draining)
        try:
            async with self._replicas.choose(self._peers.answer, others) as replica:
                # The draining replica's stream is not read meanwhile.
                async with asyncio.timeout(MOVE_S):
                    gone_on = await self._ask(replica, taken_from(draining))
                if gone_on is None:
                    return None
                if not _is_stream(gone_on):
                    gone_on.close()
                    return None
                reply.close()
                self._tried.add(replica.id)
                self._stats.moved += 1
                return await self._pass_on(replica, gone_on)
        except (NoReplicaReady, TimeoutError):
            return None

    async def _go_on(self, replica: ReplicaAddress, reply: UpstreamReply) -> bool:
        """Pass on a resumed stream; return False if the replica cannot resume it."""
        if not _is_stream(reply):
            return False
        assert self._copy is not None
        self._copy.begin_anew()
        self._stats.resumed += 1
        return await self._copy_events(replica, reply, await reply.read())

    def _prepare_resuming(self, replica: ReplicaAddress) -> None:
        if self._copy is None or not self._copy.may_resume:
            # Ask no other replica.
            self._num_failed = MAX_RETRIES
        else:
            self._tried |= self._replicas.unlike(replica)

    # Sending.

    async def _send_head(self, status: int, headers: RawHeaders) -> None:
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": returned(headers, _HIDDEN)})

    async def _send_body(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _send_chunk_or_body(self, reply: UpstreamReply, piece: bytes) -> None:
        await (self._send_body if reply.header(b"content-length") else self._send_chunk)(piece)

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _give_up(self) -> None:
        refused = self._full[0] if self._full else self._stopping
        if not self._has_begun and refused is not None:
            await self._send_whole(refused)
            return
        assert self._why is not None
        if not self._has_begun:
            raise self._why
        if self._copy is None:
            # Only a cut connection can tell the client that the answer is incomplete.
            raise Broken(str(self._why))
        self._stats.lost += 1
        await self._end_with(self._why if isinstance(self._why, ReplicaLost) else ReplicaLost(str(self._why)))

    async def _end_with(self, why: LorasrvError) -> None:
        """End a stream with the events of an error."""
        assert self._copy is not None
        await self._send_chunk(_error_events(self._path, why, self._copy.num_events))
        await self._end()


def _is_stream(reply: UpstreamReply) -> bool:
    return reply.status == 200 and reply.header(b"content-type").startswith(b"text/event-stream")


def _error_events(path: str, why: LorasrvError, num_events: int) -> bytes:
    """Return the events of an error that ends a stream, in the form of its route.

    Args:
        num_events: events that the client has. Where events are numbered, it is the number of the next one.
    """
    body = describe_at(path, why).body
    if path == RESPONSES_PATH:
        # openai-python raises if there is an "error"; other clients read "type".
        return named_event("error", {**body["error"], **body, "type": "error", "sequence_number": num_events})
    return event(body) if path in TGI_PATHS else event(body) + DONE


def _lost() -> ReplicaLost:
    return ReplicaLost("the replica that answered is gone; the answer is incomplete, ask again")
