"""What a trace says about another server: how many adapters would fit, and which change would help. No torch.

Replays answer it, a few for each question. The same seed gives the same answer.
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
from lorasrv.offline.planner.simulator import SimServer, replay, resized

MAX_ZIPF = 4.0
PRECISION = 1.1
"""The number of adapters is found to within so much."""
WORTH_IT = 0.05
MIN_POOL_PAGES = 4
SPREAD_MARK = "\x00"
"""No name of an adapter has it."""
Tell = Callable[[str], None]
"""Told what is replayed now."""


# Popularity.
def fit_zipf(counts: Iterable[int]) -> float:
    """The exponent under which these counts, the largest first, are most likely; 0 if all are asked for alike."""
    ordered = sorted(counts, reverse=True)
    if len(ordered) < 2:
        return 0.0
    logs = [math.log(rank) for rank in range(1, len(ordered) + 1)]
    mean = sum(count * log for count, log in zip(ordered, logs, strict=True)) / sum(ordered)
    low, high = 0.0, MAX_ZIPF
    for _ in range(50):
        # The likelihood is greatest where the law's own mean of log(rank) is that of the counts; it falls with s.
        s = (low + high) / 2
        weights = [math.exp(-s * log) for log in logs]
        expected = sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights)
        low, high = (s, high) if expected > mean else (low, s)
    return round((low + high) / 2, 3)


@dataclass(frozen=True)
class Popularity:
    """Whom requests ask for: adapters by Zipf's law. `names` are the trace's own, the most popular first."""

    names: Sequence[str]
    exponent: float

    @classmethod
    def of(cls, trace: Sequence[TraceRequest]) -> "Popularity":
        counts = Counter(r.adapter for r in trace if r.adapter is not None)
        return cls([name for name, _ in counts.most_common()], fit_zipf(counts.values()))

    def spread(self, trace: Sequence[TraceRequest], num_adapters: int, seed: int = 0) -> list[TraceRequest]:
        """The same requests for other adapters, so many of them. They are as large as the trace's, in turns, and a
        request asks for the same share of the popularity whatever the number, so that numbers can be compared.
        """
        rng = random.Random(seed)
        ends = list(itertools.accumulate(1 / rank**self.exponent for rank in range(1, num_adapters + 1)))

        def moved(request: TraceRequest) -> TraceRequest:
            share = rng.random()
            if request.adapter is None:
                return request
            number = min(num_adapters - 1, bisect_left(ends, share * ends[-1]))
            return replace(request, adapter=spread_name(self.names[number % len(self.names)], number))

        return [moved(request) for request in trace]


def spread_name(like: str, number: int) -> str:
    """What an adapter is called that is as large as that one."""
    return f"{like}{SPREAD_MARK}{number}"


def name_of_size(adapter: str) -> str:
    """The name in the trace of an adapter that is as large as this one, which `spread` has named."""
    return adapter.rpartition(SPREAD_MARK)[0] or adapter


# How many adapters.
@dataclass(frozen=True)
class Point:
    """A replay with so many adapters."""

    adapters: int
    figures: SimulationStats


@dataclass(frozen=True)
class Capacity:
    """`fits` is the largest number found whose p99 TTFT stays within `limit_ms`; None if not even one does.
    `is_bound` False: more would fit as well, each request had an adapter of its own already.
    """

    fits: int | None
    is_bound: bool
    limit_ms: float
    exponent: float
    points: Sequence[Point]


def capacity(server: SimServer, trace: Sequence[TraceRequest], limit_ms: float, tell: Tell) -> Capacity:
    """Doubling, then bisection. A refused request counts as one that waited for ever."""
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
    """A number that fits, 0 if none does, and a larger one that does not, None if all do."""
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


# What to change.
@dataclass(frozen=True)
class WhatIf:
    """One option set otherwise, and what that would come to."""

    name: str
    flags: str
    figures: SimulationStats


def changes(server: SimServer, trace: Sequence[TraceRequest], tell: Tell) -> list[WhatIf]:
    """A replay for each."""
    done = []
    for name, flags, changed in _changed(server):
        tell(name)
        done.append(WhatIf(name, flags, predicted(replay(changed, trace))))
    return done


def best_change(now: SimulationStats, tried: Sequence[WhatIf], target_itl_ms: float | None = None) -> WhatIf | None:
    """The one that lowers the p99 TTFT most, by more than 5 %, and costs no more than that in throughput, refuses no
    more, and keeps answers as fast, or within the target. None if there is none.
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
        if policy != server.scheduler.policy:
            options = replace(server.scheduler, policy=policy)
            yield f"policy {policy}", f"--policy {policy}", replace(server, scheduler=options)
    for times, name in ((2, "max seqs x 2"), (0.5, "max seqs / 2")):
        seqs = max(1, int(times * server.scheduler.max_num_seqs))
        tokens = max(seqs, server.scheduler.max_num_batched_tokens)
        options = replace(server.scheduler, max_num_seqs=seqs, max_num_batched_tokens=tokens)
        yield name, f"--max-num-seqs {seqs}", replace(server, scheduler=options)


def _with_host_cache(memory: MemoryOptions, times: float) -> MemoryOptions:
    return replace(memory, host_cache_bytes=max(1, int(times * memory.host_cache_bytes)))
