"""Export which adapters are in the pool, under vLLM's name, so that a gateway sends their requests here.

`vllm:lora_requests_info` names only adapters with requests. This metric also names adapters that are idle in the pool
(vllm-project/vllm#51433, read by llm-d-router#2792), but not those that are only in host memory.
"""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from api.serving.served_engine import ServedEngine
from lorasrv.errors import EngineDead, NoEngine

LEVEL = "gpu"
"""vLLM's name for the pool's level, even if the pool is not on a GPU."""


class ResidentAdapters(Collector):
    """Export adapters in the pool by id, as of the last call of `look`."""

    def __init__(self, engine: ServedEngine, store: AdapterStore) -> None:
        self._engine = engine
        self._store = store
        # Adapter content -> whether it is pinned.
        self._seen: dict[AdapterKey, bool] = {}

    async def look(self) -> None:
        """Ask the engine for its adapters; an engine that does not run, or computes nothing, has none."""
        try:
            pool = await self._engine.pool_map()
        except (EngineDead, NoEngine):
            self._seen = {}
        else:
            self._seen = {adapter.key: adapter.pinned for adapter in pool.adapters}

    def collect(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "1 for each adapter in the pool, by its id",
            labels=["adapter_name", "level", "pinned"],
        )
        for name, is_pinned in sorted(self._named().items()):
            loaded.add_metric([name, LEVEL, str(is_pinned).lower()], 1)
        yield loaded
        yield GaugeMetricFamily("vllm:num_gpu_loaded_lora_adapters", "Adapters in the pool", len(self._seen))

    def _named(self) -> dict[str, bool]:
        """Return the ids that have a version in the pool, and whether one of these versions is pinned."""
        if not self._seen:
            return {}
        found: dict[str, bool] = {}
        for name, record in self._store.records().items():
            for version in record.versions:
                if version.key in self._seen:
                    found[name] = found.get(name, False) or self._seen[version.key]
        return found
