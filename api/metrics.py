"""The engine's figures under Prometheus names, read when somebody asks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from lorasrv import __version__

if TYPE_CHECKING:
    from lorasrv.async_engine import AsyncEngine

# Help texts of EngineSnapshot's fields; the metric is `lorasrv_` and the field's name.
GAUGES = {
    "requests_running": "Requests being computed",
    "requests_waiting": "Requests waiting for room",
    "requests_waiting_for_adapter": "Requests waiting for their adapter to be loaded",
    "pages_total": "Pages of the pool",
    "pages_free": "Pages that nobody holds",
    "pages_kv": "Pages that hold KV blocks",
    "pages_adapters": "Pages that hold adapters",
    "adapters_resident": "Adapters in the pool",
    "weight_bytes": "Bytes of the base's weights",
    "pool_bytes": "Bytes of the pool",
    "host_cache_bytes": "Bytes of adapters kept in host memory",
}
COUNTERS = {
    "steps": "Engine steps that computed something",
    "prompt_tokens": "Prompt tokens computed",
    "generated_tokens": "Tokens generated",
    "preemptions": "Requests set back to be computed again",
    "adapter_loads": "Adapters brought to host memory or the pool",
    "adapter_load_failures": "Adapter loads that failed",
    "adapter_evictions": "Adapters that left the pool",
}


class EngineCollector(Collector):
    """Reads one snapshot a scrape; the engine thread is not disturbed."""

    def __init__(self, engine: "AsyncEngine", base_name: str) -> None:
        self._engine = engine
        self._base_name = base_name

    def collect(self) -> Iterator[Metric]:
        snapshot = self._engine.metrics.snapshot()
        yield InfoMetricFamily("lorasrv", "Server and base", {"version": __version__, "model": self._base_name})
        yield GaugeMetricFamily("lorasrv_up", "1 while the engine answers", float(self._engine.is_alive))
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"lorasrv_{name}", text, getattr(snapshot, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"lorasrv_{name}", text, getattr(snapshot, f"{name}_total"))
        finished = CounterMetricFamily("lorasrv_requests_finished", "Requests ended", labels=["reason"])
        for reason, count in snapshot.requests_finished_total.items():
            finished.add_metric([str(reason)], count)
        yield finished
