"""The engine's figures under Prometheus names, read when somebody asks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from adapter_store.store import AdapterStore
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
    "pages_kv": "Pages of running requests' keys and values",
    "pages_prefix": "Pages of prompts that no request uses and a later one may share",
    "pages_adapters": "Pages that hold adapters",
    "free_runs": "Gaps between pages in use",
    "longest_free_run": "Pages of the longest gap",
    "adapters_resident": "Adapters in the pool",
    "adapters_arriving": "Adapters on their way to the pool",
    "weight_bytes": "Bytes of the base's weights",
    "pool_bytes": "Bytes of the pool",
    "host_cache_bytes": "Bytes of adapters kept in host memory",
    "swap_bytes": "Bytes of preempted requests kept in host memory",
}
COUNTERS = {
    "steps": "Engine steps that computed something",
    "prompt_tokens": "Prompt tokens of requests that have begun",
    "cached_tokens": "Prompt tokens that lay in the pool already",
    "generated_tokens": "Tokens generated",
    "requests_due": "Times that a request had waited so long that it went before all others",
    "answers_predicted": "Ended answers whose length had been predicted",
    "answers_within_prediction": "Those of them that were no longer than predicted",
    "predicted_tokens": "Tokens that were predicted for them",
    "tokens_of_predicted": "Tokens that they had",
    "preemptions": "Requests set back to be continued later",
    "swaps": "Preempted requests whose pages went to host memory",
    "moved_pages": "Pages moved to make room in one piece",
    "copied_pages": "Shared pages copied before they were written",
    "adapter_load_seconds": "Time spent on bringing adapters to host memory",
    "adapter_load_failures": "Adapter loads that failed",
    "adapter_evictions": "Adapters that left the pool",
    "prefix_evictions": "Pages of unused prompts that left the pool",
}
LOAD_TIERS = ("disk", "host")
# Fields that map what costs time to its seconds; the metric's name ends in its unit.
COSTS = {
    "step_costs": ("step_cost_seconds", "Time of a step for each part of it, as learnt on this machine"),
    "load_costs": ("load_cost_seconds", "Time of bringing an adapter nearer, a byte, as learnt on this machine"),
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
        for name, (metric, text) in COSTS.items():
            costs = GaugeMetricFamily(f"lorasrv_{metric}", text, labels=["part"])
            for part, seconds in getattr(snapshot, name).items():
                costs.add_metric([part], seconds)
            yield costs
        loads = CounterMetricFamily("lorasrv_adapter_loads", "Adapters loaded, by where they were", labels=["tier"])
        for tier in LOAD_TIERS:
            loads.add_metric([tier], getattr(snapshot, f"adapter_loads_{tier}_total"))
        yield loads
        finished = CounterMetricFamily("lorasrv_requests_finished", "Requests ended", labels=["reason"])
        for reason, count in snapshot.requests_finished_total.items():
            finished.add_metric([str(reason)], count)
        yield finished


class StoreCollector(Collector):
    """What the adapter store knows by heart: nothing here reads a disk."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "lorasrv_adapters_quarantined",
            "Contents found damaged on the disk, refused until they are uploaded again",
            len(self._store.quarantined()),
        )
