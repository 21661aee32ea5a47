"""Models, health, figures, and the answer to a path or method that there is not."""

import errno
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from answers import coded, error_of
from prometheus_client.parser import text_string_to_metric_families

from adapter_store.storage.blobs import PROBE_BYTES
from api.observability.metrics.engine import CALIBRATION, DRAFTS, TIERS
from api.serving.services import StoreProbe
from lorasrv.engine.watchdog import Heartbeat
from lorasrv.metrics.engine_stats import EngineStats

ELSEWHERE = frozenset(
    {
        "requests_finished_total",
        "adapter_load_failures_total",
        "adapter_load_seconds_total",
        "snapshots_refused_total",
        "peer_prompts_refused_total",
    }
)
"""Fields of the snapshot that other metrics show in more detail."""


class TestModels:
    def test_base_first_then_adapters(self, server, make_adapter) -> None:
        for name in ("zoe", "amy"):
            server.upload(make_adapter(), name)
        body = server.http.get("/v1/models").json()
        base, amy, zoe = body["data"]
        assert (base["id"], base["parent"], base["max_model_len"]) == ("tiny-base", None, 512)
        assert (amy["id"], zoe["id"], amy["parent"]) == ("amy", "zoe", "tiny-base")
        assert amy["root"].startswith("sha256:")
        assert {model["object"] for model in body["data"]} == {"model"}

    def test_one(self, server, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        assert server.http.get("/v1/models/tiny-base").json()["parent"] is None
        by_version = server.http.get("/v1/models/mia@1").json()
        assert (by_version["id"], by_version["root"]) == ("mia@1", server.http.get("/v1/models/mia").json()["root"])
        response = server.http.get("/v1/models/mio")
        assert (coded(response), "mia" in error_of(response)["message"]) == ((404, "model_not_found"), True)

    def test_served_name(self, make_server) -> None:
        server = make_server(served_model_name="house-model")
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "house-model"
        assert [server.chat(model=name).status_code for name in ("house-model", "tiny-base")] == [200, 404]


class TestHealth:
    @pytest.fixture
    def store_probe(self, server, dispatcher) -> StoreProbe:
        """The server's check of its disk, whose result is shared by no later probe."""
        probe = dispatcher[0].app.state.services.store_probe
        probe._shared_s = 0.0
        return probe

    def test_alive_and_dead(self, server, engine) -> None:
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/ready").json() == {"status": "ready", "model": "tiny-base"}
        engine.is_alive = False
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/ready").headers["retry-after"] == "10"

    def test_the_bare_address(self, server, engine) -> None:
        """A browser finds the console, below any prefix of a proxy; a TGI client finds the health."""
        browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
        shown = server.http.get("/", headers=browser)
        assert (shown.status_code, shown.headers["location"]) == (307, "console")
        assert server.http.get("/", headers=browser, follow_redirects=True).text == server.http.get("/console").text
        assert (server.http.get("/").status_code, server.http.get("/").json()) == (200, {"status": "ok"})
        engine.is_alive = False
        assert server.http.get("/").status_code == 503

    def test_asked_by_head(self, server) -> None:
        """What GET says, without the body; on a connection that goes on being used."""
        for path in ("/", "/health", "/ready", "/ping", "/v1/models", "/openapi.json", "/nowhere"):
            asked, told = server.http.head(path), server.http.get(path)
            assert (asked.status_code, asked.content) == (told.status_code, b"")
            assert asked.headers["content-length"] == told.headers["content-length"]
        assert server.http.head("/v1/completions").status_code == 405
        shown = server.http.get("/metrics").text
        assert 'lorasrv_http_requests_total{method="HEAD",route="/health",status="200"} 1.0' in shown

    @pytest.mark.usefixtures("store_probe")
    def test_a_store_that_takes_no_uploads_is_alive_but_not_ready(self, server, tmp_path: Path) -> None:
        root = tmp_path / "store"
        (root / "tmp").rename(root / "gone")
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/ready").json() == {"status": "store not writable"}
        (root / "gone").rename(root / "tmp")
        assert server.http.get("/ready").status_code == 200

    @pytest.mark.usefixtures("store_probe")
    def test_a_full_disk_is_alive_but_not_ready(self, server, tmp_path: Path, monkeypatch) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            assert server.http.get("/health").status_code == 200
            assert server.http.get("/ready").json() == {"status": "store not writable"}
        assert server.http.get("/ready").status_code == 200
        assert list((tmp_path / "store" / "tmp").iterdir()) == []

    def test_many_probes_write_once(self, server, store_probe, monkeypatch) -> None:
        """Anybody may ask, without a key; that must not keep the disk busy."""
        store_probe._shared_s = 3600.0
        written: list[int] = []
        monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, length: written.append(length))
        with ThreadPoolExecutor(8) as clients:
            answers = [one.result() for one in [clients.submit(server.http.get, "/ready") for _ in range(40)]]
        assert [answer.status_code for answer in answers] == [200] * 40
        assert written == [PROBE_BYTES]

    def test_a_disk_that_does_not_answer_delays_no_other_check(self, server, store_probe, monkeypatch) -> None:
        asked, go_on = threading.Event(), threading.Event()

        class Hanging:
            def check_writable(self) -> None:
                asked.set()
                assert go_on.wait(30)

        monkeypatch.setattr(store_probe, "_store", Hanging())
        monkeypatch.setattr(store_probe, "_timeout_s", 0.2)
        with ThreadPoolExecutor(1) as other:
            ready = other.submit(server.http.get, "/ready")
            assert asked.wait(10)
            assert server.http.get("/health").status_code == 200
            assert ready.result().json() == {"status": "store not writable"}
            assert server.http.get("/ready").status_code == 503
        go_on.set()

    def test_a_silent_process_of_the_model_is_alive_but_not_ready(self, server, engine) -> None:
        engine.silence = "rank 1 is silent"
        assert server.http.get("/health").status_code == 200
        answer = server.http.get("/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "rank 1 is silent")

    def test_stalled_is_not_idle(self, server, engine) -> None:
        engine.heartbeat = Heartbeat(lambda: now)
        engine.heartbeat.on_step_computed()
        now = 0.0
        engine.heartbeat.rest()
        now = 1000.0
        assert server.http.get("/health").status_code == 200
        engine.heartbeat.beat()
        assert server.http.get("/health").status_code == 200
        now = 2000.0
        for path in ("/health", "/ready"):
            answer = server.http.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "engine stalled")
        engine.heartbeat.beat()
        assert server.http.get("/health").status_code == 200


class TestFigures:
    def families(self, server: Any) -> dict[str, Any]:
        response = server.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(response.text)}

    def test_figures_of_the_engine(self, server, engine) -> None:
        engine.request_stats.finished["stop"] = 3
        families = self.families(server)
        wanted = {"lorasrv_pages_total": [10], "lorasrv_pages_free": [7], "lorasrv_up": [1]}
        assert {name: [sample.value for sample in families[name].samples] for name in wanted} == wanted
        assert families["lorasrv_requests_finished"].samples[0].labels == {"reason": "stop"}
        assert all(name.startswith("lorasrv") and family.documentation for name, family in families.items())

    def test_no_field_of_the_snapshot_is_forgotten(self, server, engine) -> None:
        by_label = {
            "requests_finished_total",
            "step_costs",
            "load_costs",
            *(f"{name}_total" for name in (*DRAFTS, *CALIBRATION)),
        }
        by_tier = {field: (name, tier) for name, (_, tiers) in TIERS.items() for tier, field in tiers.items()}
        names = set(EngineStats.__dataclass_fields__) - by_label - {"last_step_s"} - ELSEWHERE
        published = {name: 1000.0 + number for number, name in enumerate(sorted(names))}
        engine.metrics.publish(EngineStats(**published))
        samples = [sample for family in self.families(server).values() for sample in family.samples]
        shown = {sample.name.removeprefix("lorasrv_"): sample.value for sample in samples if not sample.labels}
        labelled = {(sample.name, sample.labels.get("tier")): sample.value for sample in samples}
        for field, (name, tier) in by_tier.items():
            counted = "" if field in ("adapters_resident", "host_cache_adapters") else "_total"
            shown[field] = labelled[f"lorasrv_{name}{counted}", tier]
        assert {name: shown.get(name) for name in names} == published

    def test_costs_and_loads_by_label(self, server, engine) -> None:
        costs, loads = {"step": 0.25, "token": 1.5e-05}, {"load_byte": 2e-9}
        counts = {"adapter_loads_disk_total": 2, "adapter_loads_host_total": 5}
        engine.metrics.publish(EngineStats(step_costs=costs, load_costs=loads, **counts))
        families = self.families(server)
        for name, label, wanted in (
            ("step_cost_seconds", "part", costs),
            ("load_cost_seconds", "part", loads),
            ("adapter_loads", "tier", {"disk": 2.0, "host": 5.0}),
        ):
            assert {s.labels[label]: s.value for s in families[f"lorasrv_{name}"].samples} == wanted
        assert server.http.get("/metrics").text.count("# TYPE lorasrv_adapter_loads_total counter") == 1

    def test_version_and_info(self, server) -> None:
        assert re.fullmatch(r"\d+\.\d+\.\d+", server.http.get("/version").json()["version"])
        info = server.http.get("/info").json()
        assert (info["model_id"], info["max_total_tokens"]) == ("tiny-base", 512)
        assert info["operations"]["sampled_token"] == 2 * 8 * 384
        assert {"weight_bytes", "kv_token_bytes"} <= info.keys()


class TestUnknown:
    ROUTES = (
        *(f"/v1/{name}" for name in ("models", "adapters", "chat/completions", "completions", "pool")),
        "/health",
        "/metrics",
    )

    @pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
    def test_every_method_has_an_answer_in_shape(self, server, method: str) -> None:
        for path in self.ROUTES:
            response = server.http.request(method, path)
            assert response.status_code in (200, 400, 405, 415), (method, path)
            if response.status_code != 200:
                assert response.json()["error"]["type"] == "invalid_request_error"
            if response.status_code == 405:
                assert response.headers["allow"]

    @pytest.mark.parametrize(
        "path", ["/v1/embeddings", "//v1/models", "/v1/models/", "/v1/../metrics2", "/docs", "/v1/models/a/b"]
    )
    def test_unknown_paths(self, server, path: str) -> None:
        response = server.http.get(path)
        assert (response.status_code, set(error_of(response))) == (404, {"message", "type", "param", "code"})
