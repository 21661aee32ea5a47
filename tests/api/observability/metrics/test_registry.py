"""/metrics: every name documented, what is by adapter bounded and never going down, vLLM's names, the dashboard."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import TEXT
from metrics_page import PAGE, fresh, metrics_of_a_new_server, shown_name
from prometheus_client.parser import text_string_to_metric_families

from adapter_store.spec import AdapterKey
from api.observability.metrics.registry import collected
from api.observability.metrics.requests import HttpFigures, TopAdapters
from lorasrv.engine.pool_map import AdapterPages
from lorasrv.errors import EngineDead
from lorasrv.metrics.engine_stats import EngineStats
from lorasrv.metrics.request_stats import FinishedRequestStats
from lorasrv.outputs import FinishReason, RequestId
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams

DASHBOARD = PAGE.parent / "grafana" / "lorasrv.json"
NAME = re.compile(r"\b(?:lorasrv_|vllm:)\w+")


def samples(server: Any) -> dict[str, float]:
    """Of /metrics, by name and labels as they are written there."""
    lines = server.http.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


class TestNames:
    def test_the_page_has_every_one(self, make_server, dispatcher) -> None:
        page = PAGE.read_text("utf-8")
        assert page == fresh(page), "stale: python tests/support/metrics_page.py"
        make_server(metrics_compat="vllm")
        shown = {shown_name(metric) for metric in collected(dispatcher[0].app.state.registry)}
        assert shown == {shown_name(metric) for metric in metrics_of_a_new_server()}

    def test_they_are_spelled_as_prometheus_wants_them(self) -> None:
        found = [metric for metric in metrics_of_a_new_server() if not metric.name.startswith("vllm:")]
        names = [shown_name(metric) for metric in found]
        assert len(set(names)) == len(names)
        for metric in found:
            assert metric.name.startswith("lorasrv")
            assert metric.documentation
            if metric.type in ("histogram", "summary"):
                assert metric.name.endswith(("_seconds", "_adapters")), metric.name
            assert not metric.name.endswith(("_ms", "_total")) or metric.name == "lorasrv_pages_total", metric.name


class TestRequests:
    def test_routes_are_templates_and_keys_are_ids(self, server, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        assert server.http.get("/v1/adapters/mia").status_code == 200
        assert server.http.get("/v1/adapters/secret-name").status_code == 404
        assert server.http.get("/no/such/route?x=1").status_code == 404
        assert server.chat().status_code == 200
        assert server.http.post("/v1/chat/completions", json={}).status_code == 400
        shown = samples(server)
        count = 'lorasrv_http_requests_total{{method="{}",route="{}",status="{}"}}'.format
        assert shown[count("GET", "/v1/adapters/{adapter_id}", 200)] == 1
        assert shown[count("GET", "/v1/adapters/{adapter_id}", 404)] == 1
        assert shown[count("POST", "/v1/chat/completions", 200)] == 1
        assert shown[count("POST", "/v1/chat/completions", 400)] == 1
        assert shown[count("GET", "none", 404)] == 1
        assert shown['lorasrv_http_request_seconds_count{route="/v1/chat/completions"}'] == 2
        assert shown['lorasrv_key_requests_total{key="anonymous"}'] == sum(
            value for name, value in shown.items() if name.startswith("lorasrv_http_requests_total")
        )
        assert not [name for name in shown if "secret-name" in name or "no/such" in name]

    def test_keys_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("api.observability.metrics.requests.MAX_KEYS", 2)
        figures = HttpFigures()
        for key in ("a", "b", "c", "d", "a"):
            figures.on_response_ended(SimpleNamespace(method="GET", route="/", status=200, seconds=0.1, principal=key))  # type: ignore[arg-type]
        assert dict(figures._keys) == {"a": 2, "b": 1, "other": 2}

    def test_what_clients_wait_for(self, server, engine) -> None:
        engine.request_stats.on_refused(ValueError())
        server.chat()
        shown = samples(server)
        for name in ("queue", "time_to_first_token", "e2e"):
            assert shown[f"lorasrv_{name}_seconds_count"] == 1, name
        assert shown["lorasrv_inter_token_seconds_count"] == len(TEXT) - 1
        assert shown['lorasrv_rejected_total{reason="value_error"}'] == 1
        assert shown["lorasrv_tokens_waiting"] == 0
        engine.queue_limiter.num_tokens = 7
        assert samples(server)["lorasrv_tokens_waiting"] == 7, "what --max-queued-tokens bounds"

    def test_the_store_and_the_engine(self, server, engine, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        engine.step_stats.on_load_failed("disk")
        engine.step_stats.on_adapter_loaded(AdapterKey("k"), 0.25, 100)
        pages = {"pages_total": 100, "pages_kv": 30, "pages_adapters": 50, "pages_adapters_idle": 10}
        engine.metrics.publish(EngineStats(**pages, adapters_resident=5))
        shown = samples(server)
        expected = {
            "lorasrv_adapters_registered": 1,
            'lorasrv_adapters_resident{tier="pool"}': 5,
            'lorasrv_adapter_load_failures_total{reason="disk"}': 1,
            'lorasrv_adapter_load_seconds_sum{tier="disk"}': 0.25,
            "lorasrv_kv_cache_usage_ratio": 0.5,
            "lorasrv_last_step_timestamp_seconds": 0,
        }
        assert {name: shown[name] for name in expected} == expected


def ended(name: str, tokens: int = 1) -> FinishedRequestStats:
    told = ("r", name, AdapterKey(name), "p", FinishReason.STOP, "", 0.0, 1.0, 10)
    return FinishedRequestStats(*told, generated_tokens=tokens, first_token_s=0.5)


class TestTopAdapters:
    @pytest.fixture
    def now(self) -> SimpleNamespace:
        return SimpleNamespace(s=0.0)

    @pytest.fixture
    def top(self, now: SimpleNamespace) -> TopAdapters:
        return TopAdapters(2, lambda: now.s)

    @staticmethod
    def shown(top: TopAdapters) -> dict[str, dict[str, float]]:
        rows = {metric.name: metric for metric in top.collect()}
        tokens = rows["lorasrv_adapter_generated_tokens"].samples
        return {sample.labels["adapter"]: sample.value for sample in tokens}  # type: ignore[misc]

    def test_the_first_have_names_and_the_rest_is_one(self, top: TopAdapters) -> None:
        for name in ("a", "b", "c", "d", "a", ""):
            top.on_request_finished(ended(name, 10))
        assert self.shown(top) == {"a": 20, "b": 10, "other": 20}
        [first] = [metric for metric in top.collect() if metric.type == "summary"]
        assert {s.labels["adapter"]: s.value for s in first.samples if s.name.endswith("_sum")}["other"] == 1.0

    def test_what_the_base_answers_is_no_answer_of_the_adapter(self, top: TopAdapters) -> None:
        top.on_request_finished(replace(ended("a", 10), fell_back=True))
        counted = {s.name: s.value for metric in top.collect() for s in metric.samples if s.labels["adapter"] == "a"}
        assert {name for name, value in counted.items() if value} == {"lorasrv_adapter_requests_total"}

    def test_one_that_becomes_busy_takes_a_name_and_nothing_goes_down(self, top: TopAdapters) -> None:
        names = ["a"] * 5 + ["b"] * 2 + ["c"] * 30 + ["b"] * 3 + ["a"] * 2
        before = self.shown(top)
        for name in names:
            top.on_request_finished(ended(name, 1))
            after = self.shown(top)
            went = {key: value for key, value in before.items() if after.get(key, value) < value}
            assert went == {}
            before = after
        assert set(before) == {"a", "c", "other"}
        assert (before["a"], before["c"]) == (7, 27)
        assert before["other"] == 3 + 3, "of c before it had a name, of b after it had lost it"

    def test_what_was_long_ago_weighs_little(self, top: TopAdapters, now: SimpleNamespace) -> None:
        for name in ("a", "b"):
            top.on_request_finished(ended(name, 1000))
        now.s += 6 * 600
        for _ in range(4):
            top.on_request_finished(ended("c", 2))
        assert "c" in self.shown(top)

    def test_time_does_not_overflow(self, top: TopAdapters, now: SimpleNamespace) -> None:
        for _ in range(5):
            now.s += 400 * 600
            top.on_request_finished(ended("a"))
        assert math.isfinite(top._scores["a"])
        assert self.shown(top)["a"] == 5

    def test_an_adapter_that_is_called_other_is_one_of_them(self, top: TopAdapters) -> None:
        """It would take the place of all others, whose figures would be lost."""
        for name in ("other", "a", "b", "c", "other"):
            top.on_request_finished(ended(name, 10))
        assert self.shown(top) == {"a": 10, "b": 10, "other": 30}

    def test_it_does_not_grow_for_ever(self, top: TopAdapters, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("api.observability.metrics.requests.MAX_RANKED", 10)
        for number in range(100):
            top.on_request_finished(ended(f"a{number}"))
        assert len(top._scores) <= 10
        assert len(self.shown(top)) == 3

    def test_none(self) -> None:
        top = TopAdapters(0)
        top.on_request_finished(ended("a", 3))
        assert self.shown(top) == {"other": 3}


class TestVllmNames:
    def test_what_dashboards_and_gateways_read(self, make_server, engine) -> None:
        assert "vllm:" not in make_server().http.get("/metrics").text
        server = make_server(metrics_compat="vllm", max_num_seqs=8)
        server.chat()
        waits = {"requests_running": 2, "requests_waiting": 1, "requests_waiting_for_adapter": 3}
        totals = {"prompt_tokens_total": 7, "generated_tokens_total": 9}
        engine.request_stats.finished["stop"] = 4
        engine.metrics.publish(EngineStats(pages_total=10, pages_kv=5, **waits, **totals))
        for number, name in enumerate(("tom", "mia", "", "eva")):
            message = EngineCoreRequest(RequestId(f"r{number}"), (1,), 9, SamplingParams(), adapter_id=name)
            engine.request_stats.on_accepted([message], 0.0)
        engine.request_stats._open[RequestId("r0")].first_s = engine.request_stats._open[RequestId("r1")].first_s = 0.0
        shown = samples(server)
        model = 'model_name="tiny-base"'
        expected = {
            "num_requests_running": 2,
            "num_requests_waiting": 4,
            "kv_cache_usage_perc": 0.5,
            "prompt_tokens_total": 7,
            "generation_tokens_total": 9,
            "time_to_first_token_seconds_count": 1,
            "e2e_request_latency_seconds_count": 1,
        }
        assert {name: shown[f"vllm:{name}{{{model}}}"] for name in expected} == expected
        assert shown[f'vllm:request_success_total{{finished_reason="stop",{model}}}'] == 4
        lists = 'max_lora="8",running_lora_adapters="mia,tom",waiting_lora_adapters="eva"'
        assert shown[f"vllm:lora_requests_info{{{lists}}}"] > 1.7e9

    def test_idle_adapters_in_the_pool_are_named(self, make_server, engine, store, make_adapter) -> None:
        """By id, all versions as one; not by the traffic that they have."""
        server = make_server(metrics_compat="vllm")
        for number, name in enumerate(("mia", "tom", "mia")):
            assert server.upload(make_adapter(f"a{number}", seed=number), name).status_code < 300
        keys = [version.key for version in store.records()["mia"].versions]
        in_pool = [AdapterPages(key, "ready", 1, (), 1, 1, 0, key == keys[-1]) for key in keys]
        engine.pool = replace(engine.pool, adapters=tuple(in_pool))
        shown = {
            name: value for name, value in samples(server).items() if "lora_adapter" in name and "info" not in name
        }
        mia = 'vllm:lora_adapter_loaded{adapter_name="mia",level="gpu",pinned="true"}'
        assert shown == {mia: 1, "vllm:num_gpu_loaded_lora_adapters": 2}
        engine.ask_error = EngineDead("gone")
        assert "vllm:lora_adapter_loaded" not in samples(server)


class TestDashboard:
    def test_every_panel_asks_for_what_is_there(self, make_server, engine, make_adapter) -> None:
        server = make_server()
        server.upload(make_adapter(), "mia")
        server.chat(model="mia")
        engine.step_stats.on_load_failed("disk")
        engine.request_stats.on_refused(ValueError())
        engine.request_stats.aborted["client"] += 1
        found = {
            sample.name
            for metric in text_string_to_metric_families(server.http.get("/metrics").text)
            for sample in metric.samples
        }
        asked = {
            (panel["title"], name)
            for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]
            for target in panel.get("targets", ())
            for name in NAME.findall(target["expr"])
        }
        assert len({title for title, _ in asked}) >= 12
        assert sorted((title, name) for title, name in asked if name not in found) == []
