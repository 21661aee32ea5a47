"""Export OpenTelemetry spans on request: one per HTTP request, with adapter load, queue, prefill and decode inside.

A span is created when its request has ended, from times that are recorded anyway: until then tracing costs nothing, and
no context has to be passed on. A thread sends spans (`BatchSpanProcessor`) and drops them when it cannot keep up.
Attributes follow OpenTelemetry's conventions for HTTP and for generative AI; our own begin with `lorasrv.`.
"""

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from api.observability.access_middleware import RequestInfo
from lorasrv import __version__
from lorasrv.errors import ConfigError, to_install
from lorasrv.metrics.request_stats import FinishedRequestStats

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACES_PATH = "/v1/traces"
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}
GENERATION = "generate_content"
MAX_CHOICES_SHOWN = 8
LAST_SPANS_S = 2.0
"""Time for which shutdown may wait for a collector; the default of `--drain-s` leaves this much."""


def open_tracing(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> "Tracing | None":
    """Configure tracing from `--otlp-endpoint` or OpenTelemetry's own variables; return None without either.

    Raises:
        ConfigError: the packages for tracing are not installed.
    """
    asker = (
        "--otlp-endpoint" if endpoint else next((name for name in ENDPOINT_VARIABLES if environment.get(name)), None)
    )
    if asker is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"{asker} needs packages that are not installed: {to_install('otel')}") from error
    known = {"service.name": "lorasrv", "service.version": __version__}
    resource = Resource.create(known if "OTEL_SERVICE_NAME" not in environment else {})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}{TRACES_PATH}" if endpoint else None)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


class Tracing:
    """Create spans of finished requests."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("lorasrv", __version__)

    def on_response_ended(self, seen: RequestInfo) -> None:
        """Export a finished request; probes and reads of statistics get no span."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if not seen.answers and seen.method in ("GET", "HEAD"):
            return
        carrier = {name: value for name in ("traceparent", "tracestate") if (value := seen.asked(name))}
        span = self._tracer.start_span(
            f"{seen.method} {seen.route}",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes=_attributes(seen),
            start_time=seen.began_ns,
        )
        # Server errors only: a client's error is not an error of the span.
        if seen.status >= 500 or seen.broken:
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        if span.is_recording():
            for answer in seen.answers[:MAX_CHOICES_SHOWN]:
                self._parts(seen, answer, span)
        span.end(seen.began_ns + round(1e9 * seen.seconds))

    def close(self) -> None:
        """Send the remaining spans, for at most `LAST_SPANS_S`: the exporter itself would retry for ten seconds."""
        sending = threading.Thread(target=self._provider.shutdown, name="lorasrv-last-spans", daemon=True)
        sending.start()
        sending.join(LAST_SPANS_S)

    def _parts(self, seen: RequestInfo, answer: FinishedRequestStats, span: "Span") -> None:
        """Add a child span per phase in the engine, one after another; the load begins on arrival."""
        from opentelemetry import trace

        context = trace.set_span_in_context(span)
        at_s = answer.arrived_s - seen.began_s
        parts = {"load": answer.load_s, "queue": answer.queue_s, "prefill": answer.prefill_s, "decode": answer.decode_s}
        for name, seconds in parts.items():
            if seconds > 0:
                attributes = {"lorasrv.engine_request_id": answer.request_id}
                begun_ns = seen.began_ns + round(1e9 * at_s)
                part = self._tracer.start_span(name, context=context, attributes=attributes, start_time=begun_ns)
                part.end(begun_ns + round(1e9 * seconds))
            at_s += seconds


def _attributes(seen: RequestInfo) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": seen.method,
        "http.route": seen.route,
        "http.response.status_code": seen.status,
        "lorasrv.request_id": seen.request_id,
        "lorasrv.principal": seen.principal,
    }
    for name in ("id", "version", "digest"):
        if (value := seen.headers.get(f"x-adapter-{name}")) is not None:
            found[f"lorasrv.adapter.{name}"] = value
    return found | (_of_answers(seen) if seen.answers else {})


def _of_answers(seen: RequestInfo) -> dict[str, Any]:
    first = seen.answers[0]
    found: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS.get(seen.route, GENERATION),
        "gen_ai.provider.name": "lorasrv",
        "gen_ai.usage.input_tokens": sum(answer.prompt_tokens for answer in seen.prompts),
        "gen_ai.usage.output_tokens": sum(answer.generated_tokens for answer in seen.answers),
        "gen_ai.response.finish_reasons": [answer.reason.value for answer in seen.answers],
        "lorasrv.cached_tokens": sum(answer.cached_tokens for answer in seen.prompts),
    }
    if first.adapter_id:
        found |= {"gen_ai.request.model": first.adapter_id, "lorasrv.adapter.id": first.adapter_id}
    if first.adapter_key is not None:
        found["lorasrv.adapter.digest"] = f"sha256:{first.adapter_key}"
    if first.tier is not None:
        found["lorasrv.adapter.tier"] = first.tier.value
    failed = [answer.why for answer in seen.answers if answer.failed]
    return found | ({"error.type": failed[0]} if failed else {})
