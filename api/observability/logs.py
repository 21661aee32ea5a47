"""Write the server's log to stderr: a line per event, as JSON or as text, from every source.

All lines go through one handler of Python's logging: ours, uvicorn's, Python's warnings. Our loggers use
`--log-level`, all others warning or above. No line contains a prompt, an answer or a header, unless `--log-prompts`
requests the beginnings of bodies.
"""

import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import structlog
from structlog.types import EventDict, ExcInfo, Processor

from api.asgi.json_lines import one_line
from api.observability.access_middleware import CURRENT, NO_ROUTE, RequestInfo
from api.replication.headers import CHANGES, LEASE, REPLICA, USAGE

OURS = ("api", "lorasrv", "adapter_store", "sgmv_kernels")
PROBES = frozenset({"/health", "/ready", "/ping", "/metrics", LEASE, CHANGES, USAGE, REPLICA})
"""Polled by machines every few seconds, and therefore logged at debug."""
MAX_SHOWN = 500
"""Most characters shown of a body."""
_LOG = logging.getLogger(__name__)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


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


def request_logger(keeps_text: bool = False) -> Callable[[RequestInfo], None]:
    """Return a function that logs each request; with `keeps_text`, it includes the beginnings of both bodies if the
    engine answered.
    """

    def log(seen: RequestInfo) -> None:
        level = _level(seen)
        if _LOG.isEnabledFor(level):
            _LOG.log(level, "request", extra=facts(seen) | (_texts(seen) if keeps_text and seen.answers else {}))

    return log


def facts(seen: RequestInfo) -> dict[str, Any]:
    """Return the log fields of a request: client, model, counts, times (ms) and result."""
    fields: dict[str, Any] = {
        "method": seen.method,
        **_place(seen),
        "status": seen.status,
        "ms": _ms(seen.seconds),
        "principal": seen.principal,
    }
    for name in ("id", "version", "digest"):
        if f"x-adapter-{name}" in seen.headers:
            fields[f"adapter_{name}"] = seen.headers[f"x-adapter-{name}"]
    if seen.answers:
        fields |= _of_answers(seen)
    if seen.error_code:
        # If the engine accepted the request, its own reason says more.
        fields.setdefault("why", seen.error_code)
    if seen.error_cause:
        fields["cause"] = seen.error_cause
    if seen.broken:
        fields["broken"] = True
    return fields


def _place(seen: RequestInfo) -> dict[str, str]:
    """Return the route's template; of one with a parameter, or if there is none, also the path on one line."""
    fields = {} if seen.route == NO_ROUTE else {"route": seen.route}
    if not fields or "{" in seen.route:
        fields["path"] = _CONTROL.sub(_escaped, seen.path)
    return fields


def _of_answers(seen: RequestInfo) -> dict[str, Any]:
    """Combine the figures of all choices: a prompt counts once, times are the longest."""
    answers, prompts = seen.answers, seen.prompts
    fields: dict[str, Any] = {
        "prompt_tokens": sum(answer.prompt_tokens for answer in prompts),
        "cached_tokens": sum(answer.cached_tokens for answer in prompts),
        "completion_tokens": sum(answer.generated_tokens for answer in answers),
        "queue_ms": _ms(max(answer.queue_s for answer in answers)),
        "load_ms": _ms(max(answer.load_s for answer in answers)),
        "prefill_ms": _ms(max(answer.prefill_s for answer in answers)),
        "decode_ms": _ms(max(answer.decode_s for answer in answers)),
        "finish_reason": ",".join(dict.fromkeys(answer.reason.value for answer in answers)),
    }
    first = answers[0]
    fields["engine_request_id"] = first.request_id
    if first.adapter_id:
        fields["adapter_id"] = first.adapter_id
    if first.adapter_key is not None:
        fields["adapter_digest"] = f"sha256:{first.adapter_key}"
    if first.tier is not None:
        fields["adapter_tier"] = first.tier.value
    if any(answer.fell_back for answer in answers):
        fields["fallback"] = "base"
    if why := ",".join(dict.fromkeys(answer.why for answer in answers if answer.why)):
        fields["why"] = why
    return fields


def _texts(seen: RequestInfo) -> dict[str, str]:
    kept = {"request_text": seen.received, "answer_text": seen.sent}
    return {name: bytes(text).decode("utf-8", "replace")[:MAX_SHOWN] for name, text in kept.items()}


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    logging.getLogger("py.warnings").warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)


def _level(seen: RequestInfo) -> int:
    if seen.status >= 500 or seen.broken:
        return logging.WARNING
    return logging.DEBUG if seen.route in PROBES else logging.INFO


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


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
    event["event"] = _CONTROL.sub(_escaped, str(event["event"]))
    return event


def _traceback(out: TextIO, info: ExcInfo) -> None:
    """Write a plain traceback, indented so that none of its lines looks like a log line."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, info)
    out.write("\n".join(f"  {_CONTROL.sub(_escaped, line)}".rstrip() for line in text.getvalue().split("\n")))


def _escaped(found: re.Match[str]) -> str:
    return repr(found.group())[1:-1]


def _add_request_id(_: object, __: str, event: EventDict) -> EventDict:
    """Add the id of the request being processed."""
    seen = CURRENT.get()
    if seen is not None and seen.request_id:
        event["request_id"] = seen.request_id
    return event
