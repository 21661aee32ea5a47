"""Build the points of a sweep from shared settings; each point is a load."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from api.cli.bench.client import BenchRequest
from api.cli.bench.load import Load, ScheduledCall, closed_loop, open_loop, poisson
from api.cli.bench.prompts import Prompts, Ruler, counted_texts
from api.cli.bench.workload import Law, Lengths
from lorasrv.metrics.trace import TraceRequest

LEAST_REQUESTS, REQUESTS_A_CLIENT, REQUESTS_AT_RATE = 8, 2, 64


@dataclass(frozen=True, slots=True)
class Point:
    """Describe a load: `concurrency` clients, or `rate` requests per second, or else the times of a trace."""

    # Number of adapters that take part; 0: the base alone; None: the names of the trace.
    adapters: int | None
    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        who = {None: "names of the trace", 0: "base only", 1: "1 adapter"}.get(
            self.adapters, f"{self.adapters} adapters"
        )
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}, {who}"
        return f"{self.rate:g}/s, {who}" if self.rate is not None else f"trace, {who}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Hold the settings that all points share."""

    # Most popular first.
    names: Sequence[str]
    base: str
    law: Law = Law("distinct")  # noqa: RUF009 - frozen
    prompt: Lengths = Lengths("fixed", 64)  # noqa: RUF009 - frozen
    output: Lengths = Lengths("fixed", 64)  # noqa: RUF009 - frozen
    # None: as many as the load needs.
    requests: int | None = None
    shared_prefix: int = 0
    warmup: int = 2
    seed: int = 0
    trace: Sequence[TraceRequest] | None = None

    def num_requests(self, point: Point) -> int:
        """Return the number of requests of a point."""
        if self.trace is not None:
            return min(len(self.trace), self.requests or len(self.trace))
        if self.requests is not None:
            return self.requests
        if point.concurrency is None:
            return REQUESTS_AT_RATE
        return max(LEAST_REQUESTS, REQUESTS_A_CLIENT * point.concurrency)

    def to_dict(self, point: Point) -> dict[str, Any]:
        """Return the settings of one point as JSON data."""
        arrival = "concurrency" if point.concurrency else "rate" if point.rate else "trace"
        lengths = {} if self.trace is not None else {"prompt": _spelled(self.prompt), "output": _spelled(self.output)}
        return {
            "arrival": arrival,
            "concurrency": point.concurrency,
            "rate": point.rate,
            "adapters": point.adapters,
            "law": None if self.trace is not None else str(self.law),
            **lengths,
            "requests": self.num_requests(point),
            "shared_prefix": self.shared_prefix,
            "warmup": self.warmup,
            "seed": self.seed,
        }


def make_requests(point: Point, settings: Settings, ruler: Ruler) -> list[BenchRequest]:
    """Build the requests of a point.

    Names, lengths, words and times have separate seeds: changing one distribution does not change the other draws.
    """
    prompts = Prompts(ruler, _rng(settings, "words"))
    count = settings.num_requests(point)
    times = poisson(point.rate, count, _rng(settings, "times")) if point.rate is not None else None
    if settings.trace is not None:
        return _from_trace(settings.trace[:count], point, settings, prompts, times)
    names = _names(point, settings, count)
    inputs, outputs = _rng(settings, "prompts"), _rng(settings, "answers")
    return [
        BenchRequest(
            model=name,
            prompt=prompts.make(settings.prompt.draw(inputs), settings.shared_prefix),
            max_tokens=settings.output.draw(outputs),
            has_adapter=name != settings.base,
            at_s=times[number] if times is not None else None,
        )
        for number, name in enumerate(names)
    ]


async def measure_ruler(send: ScheduledCall, model: str) -> Ruler:
    """Measure a server's tokenizer by letting it count two texts.

    Raises:
        NoAnswer: the server does not answer, for the given reason.
    """
    counts = []
    for text in counted_texts():
        outcome = await send(BenchRequest(model, text, 1))
        if outcome.failure is not None:
            raise NoAnswer(outcome.failure, outcome.detail)
        counts.append(outcome.prompt_tokens)
    return Ruler.of(*counts)


class NoAnswer(Exception):
    """Report a server that does not answer even one token: the kind of failure, and its detail."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure = failure


async def run_point(
    send: ScheduledCall,
    point: Point,
    requests: Sequence[BenchRequest],
    warmup: int,
    load: Load,
    on_progress: Callable[[int], None],
) -> None:
    """Warm up, then run the load. After an interruption, `load` has the results so far."""
    warm = [BenchRequest(requests[n % len(requests)].model, "warm up", requests[0].max_tokens) for n in range(warmup)]
    if warm:
        await closed_loop(send, warm, point.concurrency or 1, Load())
    if point.concurrency is not None:
        await closed_loop(send, requests, point.concurrency, load, on_progress)
    else:
        await open_loop(send, requests, load, on_progress)


def trace_names(trace: Sequence[TraceRequest]) -> list[str]:
    """Return the adapters of a trace, the most popular first."""
    counted = Counter(request.adapter for request in trace if request.adapter is not None)
    return sorted(counted, key=lambda name: (-counted[name], name))


def _names(point: Point, settings: Settings, count: int) -> list[str]:
    if not point.adapters:
        return [settings.base] * count
    return [settings.names[k] for k in settings.law.pick(point.adapters, count, _rng(settings, "names"))]


def _from_trace(
    trace: Sequence[TraceRequest], point: Point, settings: Settings, prompts: Prompts, times: list[float] | None
) -> list[BenchRequest]:
    served = {name: _stand_in(k, name, point, settings) for k, name in enumerate(trace_names(trace))}
    # As in `lorasrv plan`: prompts of an adapter share as many tokens as were cached when the trace was recorded.
    most: dict[str | None, int] = {}
    for request in trace:
        most[request.adapter] = max(most.get(request.adapter, 0), request.cached_tokens)
    seen: set[str | None] = set()
    begun_s = min(request.arrival_s for request in trace)
    requests = []
    for number, request in enumerate(trace):
        name = settings.base if request.adapter is None else served[request.adapter]
        shared = request.cached_tokens if request.adapter in seen else min(most[request.adapter], request.prompt_tokens)
        seen.add(request.adapter)
        requests.append(
            BenchRequest(
                model=name,
                prompt=prompts.make(request.prompt_tokens, settings.shared_prefix or shared, request.adapter or ""),
                max_tokens=request.output_tokens,
                has_adapter=name != settings.base,
                at_s=request.arrival_s - begun_s if times is None else times[number],
            )
        )
    return requests


def _stand_in(rank: int, name: str, point: Point, settings: Settings) -> str:
    """Return the model to use for the trace's adapter with this popularity rank."""
    if point.adapters is None:
        return name
    return settings.names[rank % point.adapters] if point.adapters else settings.base


def _rng(settings: Settings, what: str) -> random.Random:
    return random.Random(f"{settings.seed} {what}")


def _spelled(lengths: Lengths) -> str:
    if lengths.kind == "fixed":
        return f"{lengths.a:g}"
    numbers = [lengths.a, lengths.b] + ([lengths.most] if lengths.kind == "lognormal" else [])
    return ":".join([lengths.kind, *(f"{number:g}" for number in numbers)])
