"""Hold the server that a request's edge names, which is asked for the pages of its prompt."""

from contextvars import ContextVar

from lorasrv.request import Peer

PEER: ContextVar[Peer | None] = ContextVar("peer", default=None)
"""Of the request whose task this is; None in batches, which no edge sends."""
