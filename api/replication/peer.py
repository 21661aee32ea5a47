"""Hold the peer that the edge names for a request: the server that is asked for the pages of its prompt."""

from contextvars import ContextVar

from lorasrv.request import Peer

PEER: ContextVar[Peer | None] = ContextVar("peer", default=None)
"""Peer of the current task's request; None in batches, which no edge sends."""
