"""The engine's figures under Prometheus names: the newest snapshot, and what its thread has counted.

What the adapter store knows by heart: nothing here reads a disk.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from adapter_store.store import AdapterStore
from lorasrv import __version__
from lorasrv.metrics.histogram import Histogram

if TYPE_CHECKING:
    from lorasrv.engine.async_engine import AsyncEngine
    from lorasrv.metrics.engine_stats import EngineStats


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
    "pages_adapters_idle": "Of those, pages of adapters that no running request needs",
    "free_runs": "Gaps between pages in use",
    "longest_free_run": "Pages of the longest gap",
    "adapters_arriving": "Adapters on their way to the pool",
    "weight_bytes": "Bytes of the base's weights",
    "pool_bytes": "Bytes of the pool",
    "host_cache_bytes": "Bytes of adapters kept in host memory",
    "swap_bytes": "Bytes of preempted requests kept in host memory",
    "kv_cache_usage_ratio": "Share of keys and values in the pages that they could have; adapters in use leave fewer",
}
COUNTERS = {
    "requests_arrived": "Requests that have come to the engine",
    "steps": "Engine steps that computed something",
    "prompt_tokens": "Prompt tokens of requests that have begun",
    "cached_tokens": "Prompt tokens that lay in the pool already: hits of the prefix cache",
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
    "prefix_evictions": "Pages of unused prompts that left the pool",
    "requests_failed": "Requests that ended because a step failed",
}
# Fields that map what costs time to its seconds; the metric's name ends in its unit.
COSTS = {
    "step_costs": ("step_cost_seconds", "Time of a step for each part of it, as learnt on this machine"),
    "load_costs": ("load_cost_seconds", "Time of bringing an adapter nearer, a byte, as learnt on this machine"),
}
# One metric each, by tier: of which tier a field of the snapshot tells.
TIERS = {
    "adapters_resident": ("Adapters there now", {"pool": "adapters_resident", "host": "host_cache_adapters"}),
    "adapter_loads": (
        "Adapters loaded, by where they were",
        {"disk": "adapter_loads_disk_total", "host": "adapter_loads_host_total"},
    ),
    "adapter_evictions": (
        "Adapters that had to leave, by where they were",
        {"pool": "adapter_evictions_total", "host": "host_cache_evictions_total"},
    ),
}
ELSEWHERE = frozenset({"requests_finished_total", "adapter_load_failures_total", "adapter_load_seconds_total"})
"""Fields of the snapshot that other figures here tell in more detail."""


class EngineCollector(Collector):
    """Reads one snapshot a scrape; the engine's thread is not disturbed."""

    def __init__(self, engine: "AsyncEngine", base_name: str) -> None:
        self._engine = engine
        self._base_name = base_name

    def collect(self) -> Iterator[Metric]:
        snapshot = self._engine.metrics.snapshot()
        known = {"version": __version__, "model": self._base_name, "quantization": self._engine.quantization}
        yield InfoMetricFamily("lorasrv", "Server and base", known)
        yield GaugeMetricFamily("lorasrv_up", "1 while the engine answers", float(self._engine.is_alive))
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"lorasrv_{name}", text, getattr(snapshot, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"lorasrv_{name}", text, getattr(snapshot, f"{name}_total"))
        yield GaugeMetricFamily(
            "lorasrv_last_step_timestamp_seconds", "Unix time of the engine's last step", _unix(snapshot.last_step_s)
        )
        for name, (metric, text) in COSTS.items():
            costs = GaugeMetricFamily(f"lorasrv_{metric}", text, labels=["part"])
            for part, seconds in getattr(snapshot, name).items():
                costs.add_metric([part], seconds)
            yield costs
        yield from _by_tier(snapshot)
        finished = CounterMetricFamily("lorasrv_requests_finished", "Requests ended", labels=["reason"])
        for reason, count in snapshot.requests_finished_total.items():
            finished.add_metric([str(reason)], count)
        yield finished
        yield from self._of_steps()

    def _of_steps(self) -> Iterator[Metric]:
        book = self._engine.book
        yield histogram("step_seconds", "Time of a step", book.step_seconds)
        yield histogram("batch_distinct_adapters", "Different adapters in a step", book.distinct_adapters)
        loads = HistogramMetricFamily(
            "lorasrv_adapter_load_seconds",
            "Time of bringing an adapter one tier nearer: from disk to host memory, from there to the pool",
            labels=["tier"],
        )
        for tier, seconds in book.load_seconds.items():
            loads.add_metric([tier], seconds.cumulative(), seconds.sum)
        yield loads
        failures = CounterMetricFamily("lorasrv_adapter_load_failures", "Adapter loads that failed", labels=["reason"])
        for reason, count in dict(book.failures).items():
            failures.add_metric([reason], count)
        yield failures


def histogram(name: str, text: str, counted: Histogram) -> HistogramMetricFamily:
    """One without labels."""
    return HistogramMetricFamily(f"lorasrv_{name}", text, counted.cumulative(), counted.sum)


def _by_tier(snapshot: "EngineStats") -> Iterator[Metric]:
    for name, (text, fields) in TIERS.items():
        is_gauge = name == "adapters_resident"
        kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily if is_gauge else CounterMetricFamily
        family = kind(f"lorasrv_{name}", text, labels=["tier"])
        for tier, field in fields.items():
            family.add_metric([tier], getattr(snapshot, field))
        yield family


def _unix(monotonic_s: float) -> float:
    """0 is never."""
    return round(time.time() - (time.monotonic() - monotonic_s), 3) if monotonic_s else 0.0


class StoreCollector(Collector):
    """Counts of what is stored."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("lorasrv_adapters_registered", "Adapter ids in the store", len(self._store.records()))
        yield GaugeMetricFamily(
            "lorasrv_adapters_quarantined",
            "Contents found damaged on the disk, refused until they are uploaded again",
            len(self._store.quarantined()),
        )
