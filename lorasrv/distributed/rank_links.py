"""RankLinks: rank 0's links to the other ranks of its replica."""

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from lorasrv.distributed.frames import Frame, Link, LinkClosed, RankLost
from lorasrv.distributed.pulse import PulseMonitor
from lorasrv.errors import ConfigError, EngineDead, LorasrvError, ModelError, NotEnoughMemory

START, PROGRESS, LOADED, FAILED, POOL, DONE, STOP = "start", "progress", "loaded", "failed", "pool", "done", "stop"
NOTICED_S = 1.0
"""Longest wait, in seconds, for the reason of a noticed failure."""
LOOKS_S = 0.25
"""Seconds between two checks whether rank 0 itself has failed to meet the others."""
AFTER = "after"
"""Field of frames that fill pages: how many orders must be done first."""
MEMORY, OTHER = "memory", "other"
"""Kinds of failures: too little memory, and failures that only the rank's log explains."""
T = TypeVar("T")
_KINDS: dict[str, type[LorasrvError]] = {"config": ConfigError, "model": ModelError, MEMORY: NotEnoughMemory}


class RankFailed(Exception):
    """Report that a rank could not execute an order; the rank continues."""


class RankOutOfMemory(RankFailed, MemoryError):
    """Report that a rank has too little memory for an order; the rank continues."""


@dataclass(frozen=True, slots=True)
class RankSockets:
    """Hold one end of the connections between rank 0 and another rank."""

    # Orders of the engine's thread, in sequence; orders of loader threads, beside the steps; pulses.
    orders: socket.socket
    bulk: socket.socket
    pulse: socket.socket

    @classmethod
    def pair(cls) -> "tuple[RankSockets, RankSockets]":
        """Return both ends."""
        pairs = [socket.socketpair() for _ in range(3)]
        return cls(*(pair[0] for pair in pairs)), cls(*(pair[1] for pair in pairs))

    def close(self) -> None:
        """Close all connections."""
        for connection in (self.orders, self.bulk, self.pulse):
            connection.close()


class LinkSet:
    """Exchange frames with all ranks, over a link to each. For one thread at a time.

    An interrupted exchange, for example by Ctrl-C, leaves replies behind that the next one would take for its own. So
    no further exchange is possible then.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = links
        self._is_within = False

    @property
    def is_broken_off(self) -> bool:
        """Return whether an exchange was interrupted. For the thread that uses the links now."""
        return self._is_within

    def tell(self, frames: Sequence[Frame]) -> None:
        """Send each rank its frame, to which it does not reply.

        Raises:
            LinkClosed: a rank has ended, or an exchange was interrupted.
        """
        self._send(frames)
        self._is_within = False

    @contextlib.contextmanager
    def asking(self, frames: Sequence[Frame]) -> Iterator[list[Frame]]:
        """Send each rank its frame, wait at the end of the block for the replies, and put them into the list.

        Raises:
            RankFailed, RankOutOfMemory: a rank could not do it, or there is no memory here for its reply.
            LinkClosed: a rank has ended, or an exchange was interrupted.
        """
        self._send(frames)
        replies: list[Frame] = []
        try:
            yield replies
        finally:
            # Read them even if the caller's part has failed: replies arrive in the order of the questions.
            replies += map(_received_reply, self.links)
            self._is_within = False
        _check(replies)

    def _send(self, frames: Sequence[Frame]) -> None:
        if self._is_within:
            raise LinkClosed("an exchange with the other ranks was broken off")
        # Encode all first: no frame is sent if one cannot be encoded.
        encoded = [frame.encode() for frame in frames]
        self._is_within = True
        for link, pieces in zip(self.links, encoded, strict=True):
            link.send_pieces(pieces)


class RankLinks:
    """Communicate with the other ranks. Methods with `bulk` are for loader threads, all others for the engine's thread.

    Args:
        sockets: this process's ends of the connections to ranks 1 and up.
        monitor: watches these ranks.
        stop: waits until the ranks have ended.
    """

    def __init__(self, sockets: Sequence[RankSockets], monitor: PulseMonitor, stop: Callable[[], None]) -> None:
        self._sockets = sockets
        self._orders = LinkSet([Link(one.orders) for one in sockets])
        self._bulk = LinkSet([Link(one.bulk) for one in sockets])
        self._bulk_lock = threading.Lock()
        # Number of orders sent to all ranks so far.
        self._num_told = 0
        self._monitor, self._stop = monitor, stop
        self._is_closed = False

    @property
    def is_broken_off(self) -> bool:
        """Return whether an exchange was interrupted. For the engine's thread, outside an exchange; loader threads
        always finish theirs."""
        if not self._bulk_lock.acquire(blocking=False):
            return self._orders.is_broken_off
        try:
            return self._orders.is_broken_off or self._bulk.is_broken_off
        finally:
            self._bulk_lock.release()

    def tell(self, frame: Frame) -> None:
        """Send an order to all ranks, which do not reply.

        Raises:
            LinkClosed: a rank has gone.
        """
        self._orders.tell(self._to_all(frame))
        self._num_told += 1

    def tell_one(self, rank: int, frame: Frame) -> None:
        """Send a frame to one rank that does not serve yet.

        Raises:
            EngineDead: the rank has ended.
        """
        try:
            self._orders.links[rank - 1].send(frame)
        except LinkClosed as error:
            raise _ended(rank) from error

    @contextlib.contextmanager
    def asking(self, frame: Frame) -> Iterator[list[Frame]]:
        """Send an order to all ranks, let the caller do its own part meanwhile, wait for the replies and put them into
        the list.

        Raises:
            RankFailed, RankOutOfMemory: a rank could not do it, or there is no memory here for its reply.
            LinkClosed: a rank has gone.
        """
        with self._orders.asking(self._to_all(frame)) as replies:
            self._num_told += 1
            yield replies

    @contextlib.contextmanager
    def asking_bulk(self, frames: Sequence[Frame]) -> Iterator[None]:
        """Send each rank its frame, let the caller do its own part meanwhile, and wait for the replies.

        A rank executes the frame after all orders sent to it so far.

        Raises:
            RankFailed, RankOutOfMemory: a rank could not do it.
            LinkClosed: a rank has gone.
        """
        with self._bulk_lock:
            after = {AFTER: self._num_told}
            with self._bulk.asking([replace(frame, fields={**frame.fields, **after}) for frame in frames]):
                yield

    def _to_all(self, frame: Frame) -> list[Frame]:
        return [frame] * len(self._sockets)

    @property
    def monitor(self) -> PulseMonitor:
        """Return the monitor of the ranks' pulses."""
        return self._monitor

    def why_lost(self, error: Exception) -> str:
        """Return why a rank cannot be reached, after an error that shows this. The monitor may notice it only later."""
        return self._monitor.wait_lost(NOTICED_S) or str(error)

    def wait_loaded(self, progress: Callable[[str, float], None]) -> list[Frame]:
        """Wait until every rank has its weights, and return what each reports.

        Raises:
            ModelError, ConfigError, NotEnoughMemory: a rank reports it.
            EngineDead: a rank has ended.
        """
        loaded = []
        for rank, link in enumerate(self._orders.links, 1):
            frame = _received(rank, link)
            while frame.kind == PROGRESS:
                progress(f"rank {rank}: {frame.fields['what']}", frame.fields["done"])
                frame = _received(rank, link)
            _raise_failure(rank, frame)
            loaded.append(frame)
        return loaded

    def wait_ready(self, meeting: Future[T]) -> T:
        """Wait until rank 0 has met the others and they have their pools and serve; return the result of the meeting.

        Wait for all of them at once, because each may wait for the one that fails.

        Args:
            meeting: future result of rank 0's meeting.
        Raises:
            ModelError, ConfigError, NotEnoughMemory: a rank reports it.
            EngineDead: a rank has ended, or the ranks have not met.
        """
        starting = {one.orders: rank for rank, one in enumerate(self._sockets, 1)}
        while starting:
            for connection in select.select(list(starting), [], [], LOOKS_S)[0]:
                rank = starting.pop(connection)
                try:
                    _raise_failure(rank, self._orders.links[rank - 1].receive())
                except LinkClosed as error:
                    # When one rank ends, all are ended; the monitor knows which one was first.
                    raise EngineDead(f"{self._monitor.wait_lost(NOTICED_S) or _ended(rank)}") from error
            if meeting.done() and meeting.exception() is not None:
                break
        try:
            met = meeting.result()
        except RankLost as error:
            raise EngineDead(f"the ranks have not met: {self.why_lost(error)}") from error
        self._monitor.on_loaded()
        return met

    def close(self) -> None:
        """Have the ranks end, and wait for them."""
        if self._is_closed:
            return
        self._is_closed = True
        self._monitor.close()
        with contextlib.suppress(LinkClosed):
            self.tell(Frame(STOP))
        self._stop()
        for link in (*self._orders.links, *self._bulk.links):
            link.close()
        for one in self._sockets:
            one.close()


def _received(rank: int, link: Link) -> Frame:
    try:
        return link.receive()
    except LinkClosed as error:
        raise _ended(rank) from error


def _ended(rank: int) -> EngineDead:
    return EngineDead(f"rank {rank} has ended while it was starting; its own lines on stderr say why")


def _raise_failure(rank: int, frame: Frame) -> None:
    if frame.kind == FAILED:
        raise _KINDS[frame.fields["error"]](f"rank {rank}: {frame.fields['message']}")


def _received_reply(link: Link) -> Frame:
    """Return the next reply, or a report of failure if there is too little memory for it."""
    try:
        return link.receive()
    except MemoryError as error:
        return failure(error, MEMORY)


def _check(replies: Sequence[Frame]) -> None:
    """Check the replies to an order.

    Raises:
        RankFailed, RankOutOfMemory: a rank could not execute it.
    """
    for rank, frame in enumerate(replies, 1):
        if frame.kind == FAILED:
            kind = RankOutOfMemory if frame.fields["error"] == MEMORY else RankFailed
            raise kind(f"rank {rank}: {frame.fields['message']}")


def failure(error: Exception, kind: str = "config") -> Frame:
    """Build the frame that reports a failed order to rank 0."""
    return Frame(FAILED, {"error": kind, "message": str(error) or type(error).__name__})
