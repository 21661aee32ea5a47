"""docs/metrics.md, the tables of it written from the collectors: `python tests/support/metrics_page.py`."""

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from prometheus_client.core import Metric

from api.asgi.limits import no_cuts
from api.config.settings import ServerSettings
from api.observability.metrics.registry import collected, make_registry
from api.observability.metrics.requests import HttpFigures
from api.serving.services import Services
from lorasrv.metrics.engine_stats import EngineMetrics, EngineStats
from lorasrv.metrics.request_stats import RequestStats
from lorasrv.metrics.step_stats import StepStats

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: {} -->", "<!-- end -->"


def metrics_of_a_new_server() -> list[Metric]:
    """All of them, before anything has happened."""
    engine = SimpleNamespace(
        metrics=EngineMetrics(EngineStats()),
        request_stats=RequestStats(),
        queue_limiter=SimpleNamespace(num_tokens=0),
        step_stats=StepStats(),
        quantization="int8",
        is_alive=True,
        page_size_tokens=16,
    )
    store = SimpleNamespace(records=dict, quarantined=frozenset)
    settings = ServerSettings(metrics_compat="vllm")
    parts = {"engine": engine, "store": store, "settings": settings, "connections_cut": no_cuts()}
    services = SimpleNamespace(**parts, base_name="base")
    return collected(make_registry(cast(Services, services), HttpFigures()))


def tables() -> dict[str, str]:
    """Those of the page."""
    kinds: dict[str, list[Metric]] = {"ours": [], "vllm": []}
    for metric in metrics_of_a_new_server():
        kinds["vllm" if metric.name.startswith("vllm:") else "ours"].append(metric)
    return {kind: table(metrics) for kind, metrics in kinds.items()}


def table(metrics: Iterable[Metric]) -> str:
    """A row for each, sorted by name."""
    rows = sorted(((shown_name(metric), metric) for metric in metrics), key=lambda row: row[0])
    lines = [f"| `{name}` | {metric.type} | {labels(metric)} | {metric.documentation} |" for name, metric in rows]
    return "\n".join(["| Name | Kind | Labels | What |", "|---|---|---|---|", *lines])


def shown_name(metric: Metric) -> str:
    """As it stands in /metrics."""
    return metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")


def labels(metric: Metric) -> str:
    known = getattr(metric, "_labelnames", ()) or (tuple(metric.samples[0].labels) if metric.type == "info" else ())
    return " ".join(f"`{name}`" for name in known)


def fresh(page: str) -> str:
    """The page with these tables in their places."""
    for name, text in tables().items():
        begin = BEGIN.format(name)
        pattern = re.escape(begin) + r".*?" + re.escape(END)
        assert re.search(pattern, page, re.DOTALL), f"{PAGE} has no place for {name}: {begin} ... {END}"
        page = re.sub(pattern, lambda _, new=f"{begin}\n{text}\n{END}": new, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    PAGE.write_text(fresh(PAGE.read_text("utf-8")), "utf-8")
