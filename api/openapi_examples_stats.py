"""The example of /v1/adapters/{id}/stats."""

from typing import Any

from api.openapi import Example

_FIRST = {"count": 9, "mean_ms": 41.2, "p50_ms": 35.0, "p95_ms": 92.5}
_USAGE: dict[str, Any] = {
    "requests": 10,
    "errors": 0,
    "refused": 0,
    "aborted": 1,
    "fallbacks": 0,
    "prompt_tokens": 812,
    "cached_tokens": 640,
    "generated_tokens": 590,
    "compute_seconds": 4.021337,
    "disk_loads": 1,
    "disk_bytes": 1966080,
    "pool_copies": 1,
    "pool_bytes": 1966080,
    "resident_byte_hours": 327680.0,
    "found": {"resident": 9, "host": 0, "disk": 1},
    "hit_ratio": {"resident": 0.9, "host": 0.0, "disk": 0.1},
    "ttft": {"hot": _FIRST, "cold": {**_FIRST, "count": 1}},
    "first_used": 1795323933,
    "last_used": 1795327533,
}
_DIGEST = "sha256:cc888f2667f09e1f243dfc94a139c1e1e83e7201f82b409002ef3e669017b491"

STATS_EXAMPLES = {
    ("GET", "/v1/adapters/{adapter_id}/stats"): Example(
        "Show what an adapter was asked and what it cost",
        {
            "object": "adapter.stats",
            "id": "mia",
            **_USAGE,
            "versions": [{"version": 1, "digest": _DIGEST, **_USAGE}],
        },
        parameters={"adapter_id": "mia"},
    ),
}
