"""Write the tables of docs/metrics.md from the collectors: `python tests/support/metrics_page.py`."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from page_parts import table, with_parts
from prometheus_client.core import Metric

from adapter_store.store import AdapterStore
from api.asgi.limits import no_cuts
from api.config.settings import ServerSettings
from api.observability.metrics.registry import collected, make_registry
from api.observability.metrics.requests import HttpFigures
from api.observability.metrics.resident_adapters import ResidentAdapters
from api.serving.served_engine import ServedEngine
from api.serving.services import Services
from lorasrv.metrics.engine_stats import EngineMetrics, EngineStats
from lorasrv.metrics.request_stats import RequestStats
from lorasrv.metrics.step_stats import StepStats
from lorasrv.worker.disk_threads import DiskReadStats

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def metrics_of_a_new_server() -> list[Metric]:
    """Return all metrics, before any event."""
    engine = SimpleNamespace(
        metrics=EngineMetrics(EngineStats()),
        request_stats=RequestStats(),
        queue_limiter=SimpleNamespace(num_tokens=0),
        step_stats=StepStats(),
        quantization="int8",
        is_alive=True,
        page_size_tokens=16,
        disk_reads=DiskReadStats,
    )
    store = SimpleNamespace(records=dict, quarantined=frozenset)
    settings = ServerSettings(metrics_compat="vllm")
    parts = {"engine": engine, "store": store, "settings": settings, "connections_cut": no_cuts()}
    services = SimpleNamespace(**parts, base_name="base")
    residents = ResidentAdapters(cast(ServedEngine, engine), cast(AdapterStore, store))
    return collected(make_registry(cast(Services, services), HttpFigures(), residents))


def shown_name(metric: Metric) -> str:
    """Return the name as in /metrics."""
    return metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")


def fresh(page: str) -> str:
    """Return the page with its tables replaced."""
    rows: dict[str, list[tuple[str, ...]]] = {"ours": [], "vllm": []}
    for metric in sorted(metrics_of_a_new_server(), key=shown_name):
        kind = "vllm" if metric.name.startswith("vllm:") else "ours"
        rows[kind].append((f"`{shown_name(metric)}`", metric.type, _labels(metric), metric.documentation))
    return with_parts(page, {kind: table(("Name", "Kind", "Labels", "What"), rows[kind]) for kind in rows})


def _labels(metric: Metric) -> str:
    known = getattr(metric, "_labelnames", ()) or (tuple(metric.samples[0].labels) if metric.type == "info" else ())
    return " ".join(f"`{name}`" for name in known)


if __name__ == "__main__":
    PAGE.write_text(fresh(PAGE.read_text("utf-8")), "utf-8")
