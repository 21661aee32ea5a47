"""Write the server's log to stderr: a line per event, as JSON or as text, from every source. Imports no FastAPI.

All lines go through one handler of Python's logging: ours, uvicorn's, Python's warnings. Our loggers use
`--log-level`, all others warning or above. No line contains a prompt, an answer or a header, unless `--log-prompts`
requests the beginnings of bodies.
"""

import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TextIO

import structlog
from structlog.types import EventDict, ExcInfo, Processor

from api.asgi.json_lines import one_line

OURS = ("api", "lorasrv", "adapter_store", "sgmv_kernels")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Identified(Protocol):
    """Have the id of a request, which may be known only later."""

    @property
    def request_id(self) -> str: ...


CURRENT: ContextVar[Identified | None] = ContextVar("current_request", default=None)
"""The HTTP request that is being processed, for log lines."""


@contextmanager
def written(log_format: str, log_level: str, stream: TextIO | None = None) -> Iterator[None]:
    """Send all log lines of the process to `stream` (default stderr) within the block.

    Args:
        log_format: json, text, or auto: text for a terminal, else json.
        log_level: debug, info, warning or error.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(log_format, stream.isatty()))
    level = logging.getLevelNamesMapping()[log_level.upper()]
    root = logging.getLogger()
    levels = {root: max(level, logging.WARNING), **{logging.getLogger(name): level for name in OURS}}
    before = list(root.handlers), {logger: logger.level for logger in levels}, warnings.showwarning
    root.handlers[:] = [handler]
    for logger, wanted in levels.items():
        logger.setLevel(wanted)
    warnings.showwarning = _log_warning
    try:
        yield
    finally:
        root.handlers[:], _, warnings.showwarning = before
        for logger, own in before[1].items():
            logger.setLevel(own)


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    logging.getLogger("py.warnings").warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)


def _formatter(log_format: str, is_terminal: bool) -> logging.Formatter:
    as_text = log_format == "text" or (log_format == "auto" and is_terminal)
    before: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        _add_request_id,
        structlog.processors.TimeStamper(fmt="iso", utc=not as_text),
    ]
    last: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_text:
        # Plain tracebacks: the prettier ones show variables, which hold prompts.
        last.append(_escape_event)
        last.append(structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=_traceback, pad_event_to=0))
    else:
        last += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=one_line)]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=before, processors=last)


def _escape_event(_: object, __: str, event: EventDict) -> EventDict:
    """Keep an event on one line: text from a client may contain line breaks and terminal control sequences."""
    event["event"] = escaped(str(event["event"]))
    return event


def _traceback(out: TextIO, info: ExcInfo) -> None:
    """Write a plain traceback, indented so that none of its lines looks like a log line."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, info)
    out.write("\n".join(f"  {escaped(line)}".rstrip() for line in text.getvalue().split("\n")))


def escaped(text: str) -> str:
    """Return a text without control characters and line breaks, escaped as in Python."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def _add_request_id(_: object, __: str, event: EventDict) -> EventDict:
    """Add the id of the request being processed."""
    seen = CURRENT.get()
    if seen is not None and seen.request_id:
        event["request_id"] = seen.request_id
    return event
