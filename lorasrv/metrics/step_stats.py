"""Measure steps and adapter loads: counted by the engine's thread, collected by the event loop. Torch-free.

Counting a step costs 2 microseconds, and 0.25 for each request in it. A step's time is divided by tokens: a request
with 3 of a step's 12 rows is charged a quarter. `StepProfile` divides a step's time by part; it always counts, at a
cost of some microseconds per step, and `serve --profile` prints it.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from adapter_store.spec import AdapterKey
from lorasrv.metrics.histogram import DISTINCT, STEP_SECONDS, Histogram
from lorasrv.request import Account
from lorasrv.scheduler_output import SchedulerOutput


@dataclass(slots=True)
class Moved:
    """Count an adapter's transfers: loads from disk to host memory, copies from there to the pool."""

    loads: int = 0
    load_bytes: int = 0
    copies: int = 0
    copy_bytes: int = 0


@dataclass(slots=True)
class StepUsage:
    """Hold the usage since the last `take`."""

    # Seconds of steps.
    seconds: dict[Account, float] = field(default_factory=dict)
    moved: dict[AdapterKey, Moved] = field(default_factory=dict)


class StepStats:
    """Collect histograms and counts, which any thread may read, and usage, which `take` hands over."""

    def __init__(self) -> None:
        self.step_seconds = Histogram(STEP_SECONDS)
        self.distinct_adapters = Histogram(DISTINCT)
        self.load_seconds = {"disk": Histogram(STEP_SECONDS), "host": Histogram(STEP_SECONDS)}
        """By the adapter's source tier: disk -> host memory, host memory -> pool."""
        self.failures: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._spent = StepUsage()

    def on_step_computed(self, step: SchedulerOutput, seconds: float) -> None:
        """Count a computed step."""
        if not step.requests:
            return
        self.step_seconds.add(seconds)
        self.distinct_adapters.add(len(step.placements))
        each = seconds / max(1, step.num_tokens)
        with self._lock:
            spent = self._spent.seconds
            for scheduled in step.requests:
                spent[scheduled.account] = spent.get(scheduled.account, 0.0) + each * len(scheduled.token_ids)

    def on_adapter_loaded(self, key: AdapterKey, seconds: float, nbytes: int) -> None:
        """Count an adapter read from disk to host memory."""
        self.load_seconds["disk"].add(seconds)
        with self._lock:
            moved = self._spent.moved.setdefault(key, Moved())
            moved.loads += 1
            moved.load_bytes += nbytes

    def on_adapter_copied(self, key: AdapterKey, seconds: float, nbytes: int) -> None:
        """Count an adapter copied from host memory to the pool."""
        self.load_seconds["host"].add(seconds)
        with self._lock:
            moved = self._spent.moved.setdefault(key, Moved())
            moved.copies += 1
            moved.copy_bytes += nbytes

    def on_load_failed(self, reason: str) -> None:
        """Count a failed load or copy."""
        self.failures[reason] += 1

    def take(self) -> StepUsage:
        """Return the usage since the last call, and reset it."""
        with self._lock:
            spent, self._spent = self._spent, StepUsage()
        return spent


class StepProfile:
    """Accumulate seconds by part. Each part is counted by one thread only: the engine's or the event loop's."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        # Seconds between two passes if the second was planned during the first, and the number of such gaps.
        self.gap_s = 0.0
        self.gaps = 0
        self._seconds: dict[str, float] = {}

    def clear(self) -> None:
        """Forget everything counted so far."""
        self.steps = self.rows = self.gaps = 0
        self.gap_s = 0.0
        self._seconds.clear()

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Count the time of the block."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - begun)

    def add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def add_kernels(self, seconds: float, kernels: Mapping[str, float]) -> None:
        """Count a forward pass in which the engine's thread spent `seconds`: its kernels by kind, and the remaining
        time. Other threads may have computed some of the kernels."""
        whole = sum(kernels.values())
        seen = min(1.0, seconds / whole) if whole else 0.0
        for kind, spent in kernels.items():
            self.add(kind, seen * spent)
        self.add("forward", seconds - seen * whole)

    def seconds(self) -> dict[str, float]:
        """Return a copy of the seconds by part, largest first."""
        return dict(sorted(self._seconds.items(), key=lambda item: -item[1]))
