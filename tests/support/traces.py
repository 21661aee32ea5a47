"""Files of requests, in the form of `serve --record-trace`."""

from collections.abc import Iterable
from pathlib import Path

from lorasrv.metrics.trace import TraceRequest


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a complete trace, replacing an existing file."""
    path.write_text("".join(request.line() + "\n" for request in requests), "utf-8")
