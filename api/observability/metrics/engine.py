"""Export the engine's newest statistics and its thread's counters under Prometheus names, and the store's counts.

Nothing here reads from disk.
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
from api.serving.served_engine import ServedEngine
from lorasrv import __version__
from lorasrv.metrics.histogram import Histogram

if TYPE_CHECKING:
    from lorasrv.metrics.engine_stats import EngineStats


# Help texts of EngineStats' fields; the metric is `lorasrv_` and the field's name.
GAUGES = {
    "requests_running": "Requests in the running batch",
    "requests_waiting": "Requests in the queue, without those waiting for their adapter",
    "requests_waiting_for_adapter": "Requests waiting for their adapter to be loaded",
    "pages_total": "Pages in the pool",
    "pages_free": "Free pages",
    "pages_kv": "Pages that hold the KV cache of running requests",
    "pages_prefix": "Prefix-cache pages that no running request uses",
    "pages_adapters": "Pages that hold adapters",
    "pages_adapters_idle": "Pages that hold adapters no running request uses; part of lorasrv_pages_adapters",
    "free_runs": "Runs of consecutive free pages",
    "longest_free_run": "Length of the longest run of free pages, in pages",
    "adapters_arriving": "Adapters being loaded into the pool",
    "weight_bytes": "Bytes of the base model's weights",
    "pool_bytes": "Size of the pool in bytes",
    "host_cache_bytes": "Bytes of adapters in the host cache",
    "swap_bytes": "Bytes of swapped-out KV cache in host memory",
    "snapshot_bytes": "Bytes of snapshots of personas' prompts on the disk",
    "page_leases": "Leases of prefix pages that other replicas may read",
    "corpus_bytes": "Bytes of past answers that new ones are drafted from",
    "min_draft_chance": "Chance that a draft token had to exceed to be verified in the newest step with answers",
    "kv_cache_usage_ratio": "KV pages of running requests, as a share of all pages but those of adapters in use",
}
COUNTERS = {
    "requests_arrived": "Requests received by the engine",
    "steps": "Engine steps that computed at least one token",
    "prompt_tokens": "Prompt tokens of requests that have started, each choice for itself",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "generated_tokens": "Generated tokens",
    "requests_due": "Times a request reached the starvation bound and was scheduled first",
    "answers_predicted": "Finished answers whose length had been predicted",
    "answers_within_prediction": "Finished answers no longer than predicted",
    "predicted_tokens": "Predicted tokens of finished answers",
    "tokens_of_predicted": "Generated tokens of finished answers whose length had been predicted",
    "preemptions": "Preemptions",
    "swaps": "Preemptions that swapped the KV cache to host memory",
    "moved_pages": "Pages moved to make a contiguous run",
    "copied_pages": "Shared pages copied before a write",
    "prefix_evictions": "Prefix-cache pages evicted",
    "requests_failed": "Requests ended by a failed step",
    "snapshots_made": "Snapshots of personas' prompts written to the disk",
    "snapshots_restored": "Snapshots of personas' prompts restored into the prefix cache",
    "snapshot_bytes_restored": "Bytes of keys and values restored from snapshots",
    "peer_pages_sent": "Prefix pages leased to other replicas",
    "peer_pages_received": "Prefix pages received from other replicas",
    "peer_prompts_received": "Prompts of which pages were received from another replica",
    "late_kernels": "Kernels of a GPU that were compiled or loaded after the warm-up, while requests waited",
}
# Fields that map parts of the cost model to seconds; the metric's name ends in its unit.
COSTS = {
    "step_costs": ("step_cost_seconds", "Estimated step time per unit of each cost part, learned on this machine"),
    "load_costs": (
        "load_cost_seconds",
        "Estimated time per byte of loading or copying an adapter, learned on this machine",
    ),
}
# Fields that map drafters to counts by depth.
DRAFTS = {
    "draft_tokens": "Draft tokens verified by steps; depth 1 follows the last known token",
    "accepted_draft_tokens": "Draft tokens that were right, and are part of answers",
}
# Fields that map tenths of an expected chance to counts.
CALIBRATION = {
    "draft_tokens_by_chance": "Verified draft tokens by the chance of being right that was expected, in steps of 0.1",
    "accepted_draft_tokens_by_chance": "Of these, tokens that were right",
    "expected_draft_tokens_by_chance": "Of these, the sum of the expected chances: how many should have been right",
}
# Fields that map reasons to counts.
REFUSALS = {
    "snapshots_refused": "Snapshots of personas' prompts that were not made or not restored",
    "peer_prompts_refused": "Prompts whose pages another replica was asked for and that were computed here",
}
# A metric for several fields, one per tier.
TIERS = {
    "adapters_resident": ("Adapters in each tier", {"pool": "adapters_resident", "host": "host_cache_adapters"}),
    "adapter_loads": (
        "Adapter loads, by the tier they came from",
        {"disk": "adapter_loads_disk_total", "host": "adapter_loads_host_total"},
    ),
    "adapter_evictions": (
        "Adapter evictions, by the tier they left",
        {"pool": "adapter_evictions_total", "host": "host_cache_evictions_total"},
    ),
}


class EngineCollector(Collector):
    """Read the statistics once per scrape, without disturbing the engine's thread."""

    def __init__(self, engine: ServedEngine, base_name: str) -> None:
        self._engine = engine
        self._base_name = base_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.metrics.stats()
        known = {"version": __version__, "model": self._base_name, "quantization": self._engine.quantization}
        yield InfoMetricFamily("lorasrv", "Server version and base model", known)
        yield GaugeMetricFamily("lorasrv_up", "1 while the engine answers", float(self._engine.is_alive))
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"lorasrv_{name}", text, getattr(stats, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"lorasrv_{name}", text, getattr(stats, f"{name}_total"))
        yield GaugeMetricFamily(
            "lorasrv_last_step_timestamp_seconds", "Unix time of the last engine step", _unix(stats.last_step_s)
        )
        for name, (metric, text) in COSTS.items():
            costs = GaugeMetricFamily(f"lorasrv_{metric}", text, labels=["part"])
            for part, seconds in getattr(stats, name).items():
                costs.add_metric([part], seconds)
            yield costs
        yield from _by_tier(stats)
        yield from _of_drafts(stats)
        reads = self._engine.disk_reads()
        late = "Reads of adapters that took longer than --load-timeout-s"
        yield CounterMetricFamily("lorasrv_disk_reads_timed_out", late, reads.num_given_up)
        yield GaugeMetricFamily("lorasrv_disk_reads_hung", f"{late} and have not returned", reads.num_hung)
        finished = CounterMetricFamily("lorasrv_requests_finished", "Finished requests", labels=["reason"])
        for reason, count in self._engine.request_stats.finished.items():
            finished.add_metric([str(reason)], count)
        yield finished
        for name, text in REFUSALS.items():
            refused = CounterMetricFamily(f"lorasrv_{name}", text, labels=["reason"])
            for reason, count in getattr(stats, f"{name}_total").items():
                refused.add_metric([reason], count)
            yield refused
        yield from self._of_steps()

    def _of_steps(self) -> Iterator[Metric]:
        steps = self._engine.step_stats
        yield histogram("step_seconds", "Step time", steps.step_seconds)
        yield histogram("batch_distinct_adapters", "Distinct adapters in a step", steps.distinct_adapters)
        loads = HistogramMetricFamily(
            "lorasrv_adapter_load_seconds",
            "Adapter load time, by the tier it came from: disk to host memory, host memory to pool",
            labels=["tier"],
        )
        for tier, seconds in steps.load_seconds.items():
            loads.add_metric([tier], seconds.cumulative(), seconds.sum)
        yield loads
        failures = CounterMetricFamily("lorasrv_adapter_load_failures", "Failed adapter loads", labels=["reason"])
        for reason, count in dict(steps.failures).items():
            failures.add_metric([reason], count)
        yield failures


def histogram(name: str, text: str, counted: Histogram) -> HistogramMetricFamily:
    """Build a histogram metric without labels."""
    return HistogramMetricFamily(f"lorasrv_{name}", text, counted.cumulative(), counted.sum)


def _by_tier(stats: "EngineStats") -> Iterator[Metric]:
    for name, (text, fields) in TIERS.items():
        is_gauge = name == "adapters_resident"
        kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily if is_gauge else CounterMetricFamily
        family = kind(f"lorasrv_{name}", text, labels=["tier"])
        for tier, field in fields.items():
            family.add_metric([tier], getattr(stats, field))
        yield family


def _of_drafts(stats: "EngineStats") -> Iterator[Metric]:
    for name, text in DRAFTS.items():
        drafts = CounterMetricFamily(f"lorasrv_{name}", text, labels=["drafter", "depth"])
        for drafter, counts in getattr(stats, f"{name}_total").items():
            for depth, count in sorted(counts.items()):
                drafts.add_metric([drafter, str(depth)], count)
        yield drafts
    for name, text in CALIBRATION.items():
        expected = CounterMetricFamily(f"lorasrv_{name}", text, labels=["chance"])
        for tenth, count in sorted(getattr(stats, f"{name}_total").items()):
            expected.add_metric([f"{tenth / 10}"], count)
        yield expected


def _unix(monotonic_s: float) -> float:
    """Convert a monotonic time to Unix time; 0 means never."""
    return round(time.time() - (time.monotonic() - monotonic_s), 3) if monotonic_s else 0.0


class StoreCollector(Collector):
    """Export counts of stored adapters."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("lorasrv_adapters_registered", "Adapter ids in the store", len(self._store.records()))
        yield GaugeMetricFamily(
            "lorasrv_adapters_quarantined",
            "Adapters found damaged on disk and refused until they are uploaded again",
            len(self._store.quarantined()),
        )
