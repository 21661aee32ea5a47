"""Compute the figures of `top` from samples of /metrics and /v1/pool, as one JSON object per sample."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW_S = 60.0
"""Latencies cover the requests that ended in this window; if none did, all requests."""
PARTS = ("kv", "prefix", "adapters", "free")
_BUCKET = re.compile(r'lorasrv_(\w+)_seconds_bucket\{le="([^"]+)"\}')
_COUNTER = re.compile(r"_(?:total|count)(?:\{|$)")
_LATENCIES = {"first_token": "time_to_first_token", "inter_token": "inter_token", "request": "e2e"}
_RATES = {
    "output_tokens_per_s": "lorasrv_generated_tokens_total",
    "prompt_tokens_per_s": "lorasrv_prompt_tokens_total",
    "steps_per_s": "lorasrv_steps_total",
}
_TOTALS = {
    "adapter_loads_disk": 'lorasrv_adapter_loads_total{tier="disk"}',
    "adapter_loads_host": 'lorasrv_adapter_loads_total{tier="host"}',
    "adapter_evictions": 'lorasrv_adapter_evictions_total{tier="pool"}',
    "preemptions": "lorasrv_preemptions_total",
    "swaps": "lorasrv_swaps_total",
}
_FINISHED = "lorasrv_requests_finished_total{"
_FAILED = "lorasrv_adapter_load_failures_total{"


@dataclass(frozen=True)
class Sample:
    """Hold one sample."""

    # Monotonic.
    time_s: float
    metrics: Mapping[str, float]
    # /v1/pool.
    pool: Mapping[str, Any]


@dataclass
class History:
    """Hold the samples of the last minute."""

    samples: deque[Sample] = field(default_factory=deque)

    def add(self, sample: Sample) -> dict[str, Any]:
        """Return the figures of this sample relative to earlier ones. The history restarts if the server did."""
        if self.samples and _has_fallen(sample, self.samples[-1]):
            self.samples.clear()
        before = self.samples[-1] if self.samples else None
        while len(self.samples) > 1 and sample.time_s - self.samples[0].time_s > WINDOW_S:
            self.samples.popleft()
        oldest = self.samples[0] if self.samples else None
        self.samples.append(sample)
        return _figures(sample, before, oldest)


def _figures(now: Sample, before: Sample | None, oldest: Sample | None) -> dict[str, Any]:
    pool, traffic = now.pool, now.pool["traffic"]
    return {
        "rates": _rates(now, before),
        "requests": {
            "running": int(_total(now, "lorasrv_requests_running")),
            "waiting": int(_total(now, "lorasrv_requests_waiting")),
            "waiting_for_adapter": int(_total(now, "lorasrv_requests_waiting_for_adapter")),
            "ended": int(_sum(now, _FINISHED)),
        },
        "pages": {"total": pool["pages_total"], **{part: pool[f"pages_{part}"] for part in PARTS}},
        "tiers": {
            "resident": int(_total(now, 'lorasrv_adapters_resident{tier="pool"}')),
            "arriving": int(_total(now, "lorasrv_adapters_arriving")),
            "host_cache_bytes": int(_total(now, "lorasrv_host_cache_bytes")),
            "swap_bytes": int(_total(now, "lorasrv_swap_bytes")),
        },
        "totals": {
            **{name: int(_total(now, metric)) for name, metric in _TOTALS.items()},
            "adapter_load_failures": int(_sum(now, _FAILED)),
        },
        "latency_ms": {name: _latency(metric, now, oldest) for name, metric in _LATENCIES.items()},
        "hottest": traffic["hottest"],
    }


def _rates(now: Sample, before: Sample | None) -> dict[str, float | None]:
    if before is None:
        # Without an earlier sample, only the server's own decaying rate is known.
        unknown = dict.fromkeys((*_RATES, "ended_per_s"))
        return {**unknown, "output_tokens_per_s": now.pool["traffic"]["tokens_per_s"]}
    seconds = max(1e-9, now.time_s - before.time_s)
    rates = {name: (_total(now, metric) - _total(before, metric)) / seconds for name, metric in _RATES.items()}
    rates["ended_per_s"] = (_sum(now, _FINISHED) - _sum(before, _FINISHED)) / seconds
    return {name: round(rate, 2) for name, rate in rates.items()}


def _has_fallen(now: Sample, before: Sample) -> bool:
    """Return whether a counter is smaller than before, because the server restarted."""
    counters = ((name, value) for name, value in before.metrics.items() if _COUNTER.search(name))
    return any(now.metrics.get(name, value) < value for name, value in counters)


def _total(sample: Sample, name: str) -> float:
    return sample.metrics.get(name, 0.0)


def _sum(sample: Sample, prefix: str) -> float:
    """Add up the samples of all labels."""
    return sum(value for name, value in sample.metrics.items() if name.startswith(prefix))


def _latency(name: str, now: Sample, oldest: Sample | None) -> dict[str, float] | None:
    """Estimate quantiles from the bucket counts; None if no request ended."""
    counts = _buckets(now, name)
    if oldest is not None:
        earlier = _buckets(oldest, name)
        recent = {bound: count - earlier.get(bound, 0.0) for bound, count in counts.items()}
        counts = recent if max(recent.values(), default=0.0) > 0 else counts
    if max(counts.values(), default=0.0) <= 0:
        return None
    return {f"p{share}": round(1e3 * quantile(counts, share / 100), 1) for share in (50, 95)}


def _buckets(sample: Sample, name: str) -> dict[float, float]:
    found = {}
    for metric, value in sample.metrics.items():
        match = _BUCKET.fullmatch(metric)
        if match is not None and match[1] == name:
            found[float(match[2])] = value
    return found


def quantile(counts: Mapping[float, float], share: float) -> float:
    """Estimate a quantile from cumulative counts by upper bound (the last is infinite), with linear interpolation,
    as Prometheus does.
    """
    bounds = sorted(counts)
    wanted = share * counts[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / max(1e-9, counts[bound] - below)
        lower, below = bound, counts[bound]
    return lower
