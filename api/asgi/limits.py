"""How long and with how much a connection may keep the server: what `http_protocol` keeps to, and whom it cut off."""

from collections import Counter
from dataclasses import dataclass

CUTS = (
    *("too_many_connections", "header_timeout", "headers_too_large", "invalid_http", "body_timeout"),
    "slow_reader",
)
"""Why a connection may be ended that the application does not end; all but the last are codes of answers."""


def no_cuts() -> Counter[str]:
    """A count of connections cut off, by `CUTS`."""
    return Counter(dict.fromkeys(CUTS, 0))


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of every connection. Times in seconds: for a whole head, for a body and for an answer that do not get on, and
    between two requests."""

    max_connections: int = 2048
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 30.0
