"""Spans: one a request, its parts below it, under the caller's own; nothing unless asked for."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'lorasrv[otel]'")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from api import watching  # noqa: E402
from api.tracing import Tracing, open_tracing  # noqa: E402
from lorasrv.errors import ConfigError  # noqa: E402

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(watching, "open_tracing", lambda _: Tracing(provider))
    yield exporter
    provider.shutdown()


def named(spans: InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in spans.get_finished_spans()}


def test_a_request_and_its_parts(spans, make_server, make_adapter, eventually) -> None:
    server = make_server()
    digest = server.upload(make_adapter(), "mia").json()["digest"]
    # Spans are made after their answers: those of the upload are awaited first.
    eventually(lambda: "POST /v1/adapters" in named(spans))
    spans.clear()
    body = {"model": "mia", "messages": [{"role": "user", "content": "secret words"}]}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "my-id"}
    usage = server.http.post("/v1/chat/completions", json=body, headers=headers).json()["usage"]
    eventually(lambda: "POST /v1/chat/completions" in named(spans))
    found = named(spans)
    whole = found.pop("POST /v1/chat/completions")
    assert f"{whole.context.trace_id:x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == PARENT
    told = dict(whole.attributes)
    assert (told["lorasrv.adapter.id"], told["lorasrv.adapter.digest"]) == ("mia", digest)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert (told["http.response.status_code"], told["http.route"]) == (200, "/v1/chat/completions")
    assert told["lorasrv.request_id"] == "my-id"
    assert not [value for value in told.values() if "secret" in str(value)]
    assert found.keys() <= {"load", "queue", "prefill", "decode"}
    assert {"load", "queue"} <= found.keys()
    for part in found.values():
        assert part.parent.span_id == whole.context.span_id
    assert found["load"].end_time - found["load"].start_time == 2_500_000
    assert found["queue"].start_time == found["load"].end_time
    assert found["queue"].end_time - found["queue"].start_time == 1_500_000


def test_failures_are_ours_only(spans, make_server, engine, eventually) -> None:
    server = make_server()
    server.http.post("/v1/chat/completions", json={})
    engine.load_error = "broken"
    server.chat()
    eventually(lambda: len(spans.get_finished_spans()) >= 2)
    mistake, failure = (span for span in spans.get_finished_spans() if span.name.startswith("POST"))
    assert (mistake.attributes["http.response.status_code"], mistake.status.is_unset) == (400, True)
    assert (failure.attributes["http.response.status_code"], failure.status.is_ok) == (503, False)
    assert not failure.status.is_unset


def test_probes_make_none(spans, make_server) -> None:
    server = make_server()
    for path in ("/health", "/metrics", "/v1/adapters"):
        server.http.get(path)
    assert spans.get_finished_spans() == ()


def test_nothing_unless_asked() -> None:
    assert open_tracing(None, {}) is None


@pytest.mark.parametrize(
    ("flag", "environment", "named_in_error"),
    [
        ("http://127.0.0.1:9", {}, "--otlp-endpoint"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
    ],
)
def test_packages_that_are_not_there(
    flag: str | None, environment: dict[str, str], named_in_error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=rf"{named_in_error} needs packages .*pip install 'lorasrv\[otel\]'"):
        open_tracing(flag, environment)
