"""How long and with how much a connection may keep the server: what `http_protocol` keeps to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EdgeBounds:
    """Of every connection. Times in seconds: for a whole head, for a body and for an answer that do not get on, and
    between two requests."""

    max_connections: int = 2048
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 30.0
