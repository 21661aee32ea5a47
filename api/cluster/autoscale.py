"""Compute how many replicas the work needs. Ray Serve asks periodically, and waits before it acts."""

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from lorasrv.engine.replica_load import ReplicaLoad

UP_AFTER_S = 15.0
DOWN_AFTER_S = 300.0
ADAPTER_SHARE = 0.5
"""Largest share of a pool that adapters in use may take, so that their requests have pages, too."""

LOOK_BACK_S = 20.0
"""Time over which Serve averages the figures, which arrive every 10 s."""
FIGURES = tuple(field.name for field in fields(ReplicaLoad))


class BacklogPolicy:
    """Implement Ray Serve's autoscaling policy: as many replicas as the work needs. Ray copies the object by value."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, unchanged before the first report, and the empty state that Ray expects."""
        by_name = context.aggregated_metrics or {}
        known = set.intersection(*(set(by_name.get(name, {})) for name in FIGURES))
        loads = [ReplicaLoad(**{name: by_name[name][one] for name in FIGURES}) for one in known]
        return replicas_for(loads, self._target_s) if loads else context.target_num_replicas, {}


def replicas_for(loads: Iterable[ReplicaLoad], target_s: float) -> int:
    """Return the number of replicas, at least one, with which each has at most `target_s` seconds of work ahead and
    their pools hold the adapters in use.
    """
    known = list(loads)
    for_work = math.ceil(sum(load.seconds_ahead for load in known) / target_s)
    pool_bytes = min((load.pool_bytes for load in known), default=0)
    adapter_bytes = sum(load.adapter_bytes for load in known)
    for_adapters = math.ceil(adapter_bytes / (ADAPTER_SHARE * pool_bytes)) if pool_bytes else 0
    return max(1, for_work, for_adapters)
