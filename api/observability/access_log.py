"""Log each HTTP request: its route, client, model, counts, times and result."""

import logging
from collections.abc import Callable
from typing import Any

from api.observability.access_middleware import NO_ROUTE, RequestInfo
from api.observability.logs import escaped
from api.replication.headers import CHANGES, LEASE, REPLICA, USAGE

PROBES = frozenset({"/health", "/ready", "/ping", "/metrics", LEASE, CHANGES, USAGE, REPLICA})
"""Polled by machines every few seconds, and therefore logged at debug."""
MAX_SHOWN = 500
"""Most characters shown of a body."""
_LOG = logging.getLogger(__name__)


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
        fields["path"] = escaped(seen.path)
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


def _level(seen: RequestInfo) -> int:
    if seen.status >= 500 or seen.broken:
        return logging.WARNING
    return logging.DEBUG if seen.route in PROBES else logging.INFO


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)
