"""Answer questions about another server by replaying a trace: how many adapters fit, and which change helps.
Torch-free.

Each question takes a few replays. The same seed gives the same answer.
"""

import itertools
import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lorasrv.config import POLICIES, MemoryOptions
from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.planner.report import SimulationStats, predicted
from lorasrv.offline.planner.sim_replica import SimServer, resized
from lorasrv.offline.planner.simulator import replay

MAX_ZIPF = 4.0
PRECISION = 1.1
"""Relative precision of the number of adapters."""
WORTH_IT = 0.05
MIN_POOL_PAGES = 4
SPREAD_MARK = "\x00"
"""Occurs in no adapter's name."""
Tell = Callable[[str], None]
"""Called with a description of the next replay."""


# Popularity.
def fit_zipf(counts: Iterable[int]) -> float:
    """Return the maximum-likelihood Zipf exponent of these counts; 0 if all are equal."""
    ordered = sorted(counts, reverse=True)
    if len(ordered) < 2:
        return 0.0
    logs = [math.log(rank) for rank in range(1, len(ordered) + 1)]
    mean = sum(count * log for count, log in zip(ordered, logs, strict=True)) / sum(ordered)
    low, high = 0.0, MAX_ZIPF
    for _ in range(50):
        # The likelihood is greatest where the law's mean of log(rank) equals that of the counts; the mean falls with s.
        s = (low + high) / 2
        weights = [math.exp(-s * log) for log in logs]
        expected = sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights)
        low, high = (s, high) if expected > mean else (low, s)
    return round((low + high) / 2, 3)


@dataclass(frozen=True)
class Popularity:
    """Model which adapters requests name, by Zipf's law."""

    # The trace's adapters, the most popular first.
    names: Sequence[str]
    exponent: float

    @classmethod
    def of(cls, trace: Sequence[TraceRequest]) -> "Popularity":
        counts = Counter(r.adapter for r in trace if r.adapter is not None)
        return cls([name for name, _ in counts.most_common()], fit_zipf(counts.values()))

    def spread(self, trace: Sequence[TraceRequest], num_adapters: int) -> list[TraceRequest]:
        """Distribute the trace's requests over another number of adapters.

        New adapters take the sizes of the trace's in turn. Each request keeps its quantile of the popularity whatever
        the number, so that different numbers are comparable.
        """
        rng = random.Random(0)
        ends = list(itertools.accumulate(1 / rank**self.exponent for rank in range(1, num_adapters + 1)))

        def moved(request: TraceRequest) -> TraceRequest:
            share = rng.random()
            if request.adapter is None:
                return request
            number = min(num_adapters - 1, bisect_left(ends, share * ends[-1]))
            return replace(request, adapter=spread_name(self.names[number % len(self.names)], number))

        return [moved(request) for request in trace]


def spread_name(like: str, number: int) -> str:
    """Return the name of a new adapter with the size of `like`."""
    return f"{like}{SPREAD_MARK}{number}"


def name_of_size(adapter: str) -> str:
    """Return the trace's adapter with the size of this one, which `spread` has named."""
    return adapter.rpartition(SPREAD_MARK)[0] or adapter


# Number of adapters.
@dataclass(frozen=True)
class Point:
    """Hold the figures of a replay with a number of adapters."""

    adapters: int
    figures: SimulationStats


@dataclass(frozen=True)
class Capacity:
    """Report how many adapters fit."""

    # Largest number found whose p99 TTFT stays within `limit_ms`; None if one adapter exceeds it.
    fits: int | None
    # False: more would fit as well, as each request had an adapter of its own already.
    is_bound: bool
    limit_ms: float
    exponent: float
    points: Sequence[Point]


def capacity(server: SimServer, trace: Sequence[TraceRequest], limit_ms: float, tell: Tell) -> Capacity:
    """Find the largest number of adapters within a TTFT limit, by doubling and bisection.

    A refused request counts as an infinite TTFT.
    """
    popularity = Popularity.of(trace)
    points: dict[int, Point] = {}

    def fits(count: int) -> bool:
        if count not in points:
            tell(f"{count} adapters")
            points[count] = Point(count, predicted(replay(server, popularity.spread(trace, count))))
        figures = points[count].figures
        refused = figures.num_refused / max(1, figures.num_refused + figures.requests)
        return refused <= 0.01 and figures.ttft_p99_ms <= limit_ms

    largest = max(1, sum(r.adapter is not None for r in trace))
    low, high = _bracket(fits, min(max(1, len(popularity.names)), largest), largest)
    while low and high and high > PRECISION * low and high - low > 1:
        middle = round(math.sqrt(low * high))
        middle = min(high - 1, max(low + 1, middle))
        low, high = (middle, high) if fits(middle) else (low, middle)
    ordered = [points[count] for count in sorted(points)]
    return Capacity(low or None, high is not None, limit_ms, popularity.exponent, ordered)


def _bracket(fits: Callable[[int], bool], start: int, largest: int) -> tuple[int, int | None]:
    """Return a number that fits (0: none) and a larger one that does not (None: all fit)."""
    count = start
    if fits(count):
        while count < largest:
            following = min(2 * count, largest)
            if not fits(following):
                return count, following
            count = following
        return count, None
    while count > 1:
        smaller = count // 2
        if fits(smaller):
            return smaller, count
        count = smaller
    return 0, count


# Changes to try.
@dataclass(frozen=True)
class WhatIf:
    """Hold the figures of a replay with one option changed."""

    name: str
    flags: str
    figures: SimulationStats


def changes(server: SimServer, trace: Sequence[TraceRequest], tell: Tell) -> list[WhatIf]:
    """Replay the trace once for each change."""
    done = []
    for name, flags, changed in _changed(server):
        tell(name)
        done.append(WhatIf(name, flags, predicted(replay(changed, trace))))
    return done


def best_change(now: SimulationStats, tried: Sequence[WhatIf], target_itl_ms: float | None = None) -> WhatIf | None:
    """Return the harmless change that lowers the p99 TTFT most, by more than 5 %; None if there is none.

    A change is harmless if it costs at most 5 % of throughput, refuses no more requests, and keeps the p99 TPOT within
    5 % or within the target.
    """
    allowed_ms = max((1 + WORTH_IT) * now.tpot_p99_ms, target_itl_ms or 0.0)
    good = [c for c in tried if _is_harmless(now, c.figures, allowed_ms)]
    best = min(good, key=lambda c: c.figures.ttft_p99_ms, default=None)
    if best is None or not best.figures.ttft_p99_ms < (1 - WORTH_IT) * now.ttft_p99_ms:
        return None
    return best


def _is_harmless(now: SimulationStats, then: SimulationStats, allowed_ms: float) -> bool:
    return (
        then.tok_per_s >= (1 - WORTH_IT) * now.tok_per_s
        and not then.tpot_p99_ms > allowed_ms
        and then.num_refused <= now.num_refused
    )


def _changed(server: SimServer) -> Iterable[tuple[str, str, SimServer]]:
    pool = server.geometry.num_pages * server.geometry.block_bytes
    for times, name in ((2, "pool x 2"), (0.5, "pool / 2")):
        size = int(times * pool)
        if size >= MIN_POOL_PAGES * server.geometry.block_bytes:
            yield name, f"--pool-bytes {size}", resized(server, size)
    for times, name in ((2, "host cache x 2"), (0.5, "host cache / 2")):
        memory = _with_host_cache(server.memory, times)
        yield name, f"--host-cache-bytes {memory.host_cache_bytes}", replace(server, memory=memory)
    for policy in POLICIES:
        if policy != server.scheduler.scheduling_policy:
            options = replace(server.scheduler, scheduling_policy=policy)
            yield f"policy {policy}", f"--policy {policy}", replace(server, scheduler=options)
    for times, name in ((2, "max seqs x 2"), (0.5, "max seqs / 2")):
        seqs = max(1, int(times * server.scheduler.max_num_seqs))
        tokens = max(seqs, server.scheduler.max_num_batched_tokens)
        options = replace(server.scheduler, max_num_seqs=seqs, max_num_batched_tokens=tokens)
        yield name, f"--max-num-seqs {seqs}", replace(server, scheduler=options)


def _with_host_cache(memory: MemoryOptions, times: float) -> MemoryOptions:
    return replace(memory, host_cache_bytes=max(1, int(times * memory.host_cache_bytes)))
