"""Export metrics under vLLM's names (`--metrics-compat vllm`), for dashboards made for vLLM and for gateways.

Names, labels and units are as vLLM documents them. `lora_requests_info` follows the model server protocol of the
Gateway API inference extension: the value is the sample's time, the labels are lists separated by commas.
"""

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from api.serving.served_engine import ServedEngine
from lorasrv.outputs import FinishReason

SUCCESSES = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


class VllmCollector(Collector):
    """Export the metrics. `max_lora` is the most adapters in one step."""

    def __init__(self, engine: ServedEngine, base_name: str, max_lora: int) -> None:
        self._engine = engine
        self._base_name = base_name
        self._max_lora = max_lora

    def collect(self) -> Iterator[Metric]:
        stats, traffic = self._engine.metrics.stats(), self._engine.request_stats
        waiting = stats.requests_waiting + stats.requests_waiting_for_adapter
        yield self._gauge("num_requests_running", "Requests in the running batch", stats.requests_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue", waiting)
        usage = stats.kv_cache_usage_ratio
        yield self._gauge("kv_cache_usage_perc", "KV cache usage; 1 is full", usage)
        yield self._counter("prompt_tokens", "Prompt tokens", stats.prompt_tokens_total)
        yield self._counter("generation_tokens", "Generated tokens", stats.generated_tokens_total)
        yield self._counter("num_preemptions", "Preemptions", stats.preemptions_total)
        for name, text, counted in (
            ("time_to_first_token_seconds", "Time to the first token", traffic.first_token),
            ("inter_token_latency_seconds", "Time between two output tokens", traffic.inter_token),
            ("e2e_request_latency_seconds", "Time from arrival to the last token", traffic.request),
            ("request_queue_time_seconds", "Time in the queue", traffic.queue),
        ):
            durations = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            durations.add_metric([self._base_name], counted.cumulative(), counted.sum)
            yield durations
        ended = CounterMetricFamily(
            "vllm:request_success", "Finished requests", labels=["model_name", "finished_reason"]
        )
        for reason in SUCCESSES:
            ended.add_metric([self._base_name, str(reason)], traffic.finished[reason])
        yield ended
        yield self._loras()
        cache = GaugeMetricFamily("vllm:cache_config_info", "KV cache layout", labels=["block_size", "num_gpu_blocks"])
        cache.add_metric([str(self._engine.page_size_tokens), str(stats.pages_total)], 1)
        yield cache

    def _loras(self) -> Metric:
        names = {True: set[str](), False: set[str]()}
        for adapter_id, has_begun in self._engine.request_stats.open():
            if adapter_id:
                names[has_begun].add(adapter_id)
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests; the value is the Unix time of the scrape",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        lists = [",".join(sorted(names[has_begun])) for has_begun in (True, False)]
        family.add_metric([str(self._max_lora), *lists], time.time())
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._base_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._base_name], value)
        return family
