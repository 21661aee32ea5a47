"""Spans: one a request, its parts below it, under the caller's own; nothing unless asked for."""

import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from small_server import Reply, Request, answering

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install -e '.[otel]'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from api.observability import setup as watching  # noqa: E402
from api.observability.access_middleware import RequestInfo  # noqa: E402
from api.observability.tracing import LAST_SPANS_S, Tracing, open_tracing  # noqa: E402
from lorasrv.errors import AdapterLoadFailed, ConfigError  # noqa: E402
from lorasrv.metrics.request_stats import FinishedRequestStats  # noqa: E402
from lorasrv.outputs import FinishReason  # noqa: E402

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
    engine.breaks(0, AdapterLoadFailed("broken"))
    server.chat()
    eventually(lambda: len(spans.get_finished_spans()) >= 2)
    mistake, failure = (span for span in spans.get_finished_spans() if span.name.startswith("POST"))
    assert (mistake.attributes["http.response.status_code"], mistake.status.is_unset) == (400, True)
    assert (failure.attributes["http.response.status_code"], failure.status.is_ok) == (503, False)
    assert not failure.status.is_unset


def test_a_stream_that_fails_behind_its_first_token(spans, make_server, engine, eventually) -> None:
    server = make_server()
    engine.breaks(1)
    server.chat(stream=True)
    eventually(spans.get_finished_spans)
    whole = named(spans)["POST /v1/chat/completions"]
    assert (whole.attributes["http.response.status_code"], whole.attributes["error.type"]) == (200, "engine_dead")
    assert (whole.status.is_ok, whole.status.is_unset) == (False, False)


def test_tokens_of_several_prompts_are_sums() -> None:
    """Of two prompts with two choices each, in the order of their ends."""
    seen, exporter, provider = (
        RequestInfo({"method": "POST", "headers": []}),
        InMemorySpanExporter(),
        sdk.TracerProvider(),
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for prompt, cached, is_further in ((30, 29, True), (50, 32, False), (30, 16, False), (50, 49, True)):
        told = ("r", "", None, "p", FinishReason.STOP, "", 0.0, 1.0, prompt, cached, 7)
        seen.on_request_finished(FinishedRequestStats(*told, is_further=is_further))
    Tracing(provider).on_response_ended(seen)
    [span] = exporter.get_finished_spans()
    used = ("gen_ai.usage.input_tokens", "lorasrv.cached_tokens", "gen_ai.usage.output_tokens")
    assert [span.attributes[name] for name in used] == [80, 48, 28]
    provider.shutdown()


def test_probes_make_none(spans, make_server) -> None:
    server = make_server()
    for path in ("/health", "/metrics", "/v1/adapters"):
        server.http.get(path)
        server.http.head(path)
    assert spans.get_finished_spans() == ()


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector's address, and the requests that it gets, decoded."""
    got: list[Any] = []

    def collect(request: Request) -> Reply:
        got.append((request.path, request.headers["content-type"], ExportTraceServiceRequest.FromString(request.body)))
        return 200, {}, b""

    with answering(collect) as url:
        yield url, got


@pytest.mark.parametrize("said_by", ["flag", "environment"])
def test_a_collector_gets_them(collector, make_server, make_adapter, monkeypatch, eventually, said_by: str) -> None:
    """As protobuf over HTTP, with the names of the service and of the adapter; what is left is sent at the end."""
    url, got = collector
    opened: list[Tracing] = []

    def open_one(endpoint: str | None) -> Tracing:
        tracing = open_tracing(endpoint)
        assert tracing is not None
        opened.append(tracing)
        return tracing

    monkeypatch.setattr(watching, "open_tracing", open_one)
    if said_by == "environment":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    server = make_server(**{"otlp_traces_endpoint": url} if said_by == "flag" else {})
    server.upload(make_adapter(), "mia")
    assert server.chat(model="mia").status_code == 200
    provider = opened[0]._provider
    # Spans are made after their answers.
    eventually(lambda: provider.force_flush() and b"POST /v1/chat" in b"".join(r.SerializeToString() for *_, r in got))
    provider.get_tracer("x").start_span("the last one").end()
    opened[0].close()
    assert {(path, kind) for path, kind, _ in got} == {("/v1/traces", "application/x-protobuf")}
    resources = [resource for _, _, request in got for resource in request.resource_spans]
    service = {attribute.key: attribute.value.string_value for attribute in resources[0].resource.attributes}
    assert service["service.name"] == "lorasrv"
    sent = {span.name: span for one in resources for scope in one.scope_spans for span in scope.spans}
    assert "the last one" in sent
    chat = sent["POST /v1/chat/completions"]
    told = {attribute.key: attribute.value.string_value for attribute in chat.attributes}
    assert told["lorasrv.adapter.id"] == "mia"
    assert {"load", "queue"} <= {name for name, span in sent.items() if span.parent_span_id == chat.span_id}


@pytest.mark.parametrize("listens", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_collector_that_does_not_answer_delays_the_end_by_little(listens: bool) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        tracing = open_tracing(f"http://127.0.0.1:{silent.getsockname()[1]}", {})
        assert tracing is not None
        tracing._provider.get_tracer("x").start_span("x").end()
        ending = threading.Thread(target=tracing.close)
        ending.start()
        # The exporter would take 7 and 10 seconds.
        ending.join(LAST_SPANS_S + 3)
        assert not ending.is_alive()


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
    with pytest.raises(ConfigError, match=rf"{named_in_error} needs packages .*pip install -e '\.\[otel\]'"):
        open_tracing(flag, environment)
