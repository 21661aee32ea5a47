"""Export requests as clients see them: waiting times and refusals by route, key and adapter."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from adapter_store.registry.references import OTHERS
from api.observability.access_middleware import RequestInfo
from api.observability.metrics.engine import histogram
from api.serving.served_engine import ServedEngine
from lorasrv.metrics.histogram import Histogram
from lorasrv.metrics.request_stats import FinishedRequestStats

# Histograms of RequestStats; the metric's name ends in its unit.
DURATIONS = {
    "queue": ("queue_seconds", "Time from arrival to the first step, without the wait for the adapter"),
    "first_token": ("time_to_first_token_seconds", "Time from arrival to the first token"),
    "inter_token": ("inter_token_seconds", "Time between two output tokens"),
    "request": ("e2e_seconds", "Time from arrival to the last token"),
}
MAX_KEYS = 200


class TrafficCollector(Collector):
    """Export the event loop's statistics of engine requests."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        traffic = self._engine.request_stats
        for field, (name, text) in DURATIONS.items():
            yield histogram(name, text, getattr(traffic, field))
        yield GaugeMetricFamily(
            "lorasrv_tokens_waiting",
            "Prompt tokens of requests without an output token yet; several choices count once",
            self._engine.queue_limiter.num_tokens,
        )
        rejected = CounterMetricFamily("lorasrv_rejected", "Requests refused or timed out", labels=["reason"])
        aborted = CounterMetricFamily(
            "lorasrv_aborted",
            "Requests aborted before they finished; reason client: the client disconnected",
            labels=["reason"],
        )
        for family, counts in ((rejected, traffic.rejected), (aborted, traffic.aborted)):
            for reason, count in counts.items():
                family.add_metric([reason], count)
            yield family


class HttpFigures(Collector):
    """Count requests by route and status, and by key, once their responses have been sent."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._keys: Counter[str] = Counter()

    def on_response_ended(self, seen: RequestInfo) -> None:
        """Count a request whose response has been sent, or whose client has disconnected."""
        self._requests[seen.method, seen.route, str(seen.status)] += 1
        if seen.route not in self._seconds:
            self._seconds[seen.route] = Histogram()
        self._seconds[seen.route].add(seen.seconds)
        key = seen.principal
        self._keys[key if key in self._keys or len(self._keys) < MAX_KEYS else OTHERS] += 1

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "lorasrv_http_requests", "HTTP requests answered", labels=["method", "route", "status"]
        )
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        seconds = HistogramMetricFamily(
            "lorasrv_http_request_seconds", "Time from request to end of response", labels=["route"]
        )
        for route, counted in self._seconds.items():
            seconds.add_metric([route], counted.cumulative(), counted.sum)
        yield seconds
        keys = CounterMetricFamily(
            "lorasrv_key_requests",
            f"HTTP requests by key; keys after the first {MAX_KEYS} count as other",
            labels=["key"],
        )
        for key, count in self._keys.items():
            keys.add_metric([key], count)
        yield keys


class EdgeCollector(Collector):
    """Export connections closed below the application, before a route was called or during a response."""

    def __init__(self, cuts: Mapping[str, int]) -> None:
        self._cuts = cuts

    def collect(self) -> Iterator[Metric]:
        yield connections_cut(self._cuts)


def connections_cut(cuts: Mapping[str, int]) -> Metric:
    """Return the metric of closed connections by cause."""
    family = CounterMetricFamily(
        "lorasrv_connections_cut", "Connections closed because of a client limit", labels=["reason"]
    )
    for reason, count in cuts.items():
        family.add_metric([reason], count)
    return family


RANK_OVER_S = 600.0
PROMOTION = 2.0
MAX_RANKED = 8192


@dataclass(slots=True)
class _Shown:
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0

    def add(self, request: FinishedRequestStats) -> None:
        """Count a request, and its tokens and time if the adapter answered, as in the ledger."""
        self.requests += 1
        if request.fell_back or not request.is_answered:
            return
        if not request.is_further:
            self.prompt_tokens += request.prompt_tokens
        self.generated_tokens += request.generated_tokens
        if request.first_token_s is not None:
            self.first_tokens += 1
            self.first_token_s += request.first_token_s


class TopAdapters(Collector):
    """Export a series for each of the adapters with the most traffic, and one for all others, because a series for
    every adapter would be too many.

    The series is chosen when a request ends, and its counts are never moved to another one: a series only increases
    while it is shown, and begins at 0 if it returns. An adapter replaces the named adapter with the least recent
    traffic once it has `PROMOTION` times as much.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._began_s = clock()
        self._shown: dict[str, _Shown] = {}
        self._other = _Shown()
        self._scores: dict[str, float] = {}

    def on_request_finished(self, request: FinishedRequestStats) -> None:
        """Count a finished request, except for the base's. An adapter named `other`, which earlier versions of lorasrv
        allowed, counts with the others."""
        name = request.adapter_id
        if not name:
            return
        if name == OTHERS:
            self._other.add(request)
            return
        # Newer requests weigh more, so that the weight of older ones need not be reduced.
        age = (self._clock() - self._began_s) / RANK_OVER_S
        if age > 500:
            self._begin_anew()
            age = 0.0
        score = self._scores.pop(name, 0.0) + (1 + request.generated_tokens) * math.exp(age)
        self._scores[name] = score
        if len(self._scores) > MAX_RANKED:
            self._forget_one()
        if name not in self._shown:
            self._may_show(name, score)
        self._shown.get(name, self._other).add(request)

    def collect(self) -> Iterator[Metric]:
        rows = {**self._shown, OTHERS: self._other}
        counted = {
            "requests": "Finished requests",
            "prompt_tokens": "Prompt tokens of answered requests",
            "generated_tokens": "Generated tokens",
        }
        for field, text in counted.items():
            family = CounterMetricFamily(
                f"lorasrv_adapter_{field}",
                f"{text} of the busiest adapters and of all others",
                labels=["adapter"],
            )
            for name, shown in rows.items():
                family.add_metric([name], getattr(shown, field))
            yield family
        first = SummaryMetricFamily(
            "lorasrv_adapter_time_to_first_token_seconds",
            "Time from arrival to the first token, for the busiest adapters and all others",
            labels=["adapter"],
        )
        for name, shown in rows.items():
            first.add_metric([name], shown.first_tokens, shown.first_token_s)
        yield first

    def _may_show(self, name: str, score: float) -> None:
        if len(self._shown) < self._most:
            self._shown[name] = _Shown()
            return
        if not self._shown:
            return
        least = min(self._shown, key=lambda shown: self._scores.get(shown, 0.0))
        if score >= PROMOTION * self._scores.get(least, 0.0):
            del self._shown[least]
            self._shown[name] = _Shown()

    def _begin_anew(self) -> None:
        """Rescale the scores before they exceed the range of a float."""
        shrunk = math.exp((self._began_s - self._clock()) / RANK_OVER_S)
        self._scores = {name: score * shrunk for name, score in self._scores.items()}
        self._began_s = self._clock()

    def _forget_one(self) -> None:
        """Drop the score of the unnamed adapter that was least recently requested."""
        del self._scores[next(name for name in self._scores if name not in self._shown)]
