"""What the adapter store knows by heart: nothing here reads a disk."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adapter_store.store import AdapterStore


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
