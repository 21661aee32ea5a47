"""Register all collectors of one server and render their text."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from api.observability.metrics.engine import EngineCollector, StoreCollector
from api.observability.metrics.requests import EdgeCollector, HttpFigures, TopAdapters, TrafficCollector
from api.observability.metrics.resident_adapters import ResidentAdapters
from api.observability.metrics.vllm_names import VllmCollector
from api.serving.services import Services


def make_registry(services: Services, http: HttpFigures, residents: ResidentAdapters | None) -> CollectorRegistry:
    """Build the registry that `/metrics` shows, and start listening to the engine's requests."""
    engine = services.engine
    top = TopAdapters(services.settings.metrics_adapters)
    engine.request_stats.listeners.append(top.on_request_finished)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, services.base_name))
    edge = EdgeCollector(services.connections_cut)
    for collector in (TrafficCollector(engine), http, edge, top, StoreCollector(services.store)):
        registry.register(collector)
    if services.settings.metrics_compat == "vllm":
        registry.register(VllmCollector(engine, services.base_name, services.settings.max_num_seqs))
    if residents is not None:
        registry.register(residents)
    return registry


def collected(registry: CollectorRegistry) -> list[Metric]:
    """Collect the current metrics, in the event loop's thread, which owns them."""
    return list(registry.collect())


def as_text(metrics: Iterable[Metric]) -> bytes:
    """Render Prometheus text, in any thread."""
    registry = CollectorRegistry()
    registry.register(_GivenMetrics(metrics))
    return generate_latest(registry)


class _GivenMetrics(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics
