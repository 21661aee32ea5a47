"""Define the limits of connections that `api.asgi.protocol` enforces, and the causes of closing one."""

from collections import Counter
from dataclasses import dataclass

CUTS = (
    *("too_many_connections", "header_timeout", "headers_too_large", "invalid_http", "body_timeout"),
    "slow_reader",
)
"""Causes of closing a connection below the application; each but the last is also the code of a response."""


def no_cuts() -> Counter[str]:
    """Return a counter of closed connections with zeros for all `CUTS`."""
    return Counter(dict.fromkeys(CUTS, 0))


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Hold the limits per connection, times in seconds."""

    max_connections: int = 2048
    # Longest time for a whole head to arrive.
    header_timeout_s: float = 10.0
    # Longest time without progress of a request body.
    body_timeout_s: float = 30.0
    # Longest time without progress of a response.
    write_timeout_s: float = 60.0
    # Longest time between two requests.
    keep_alive_s: float = 30.0
