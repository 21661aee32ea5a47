"""What steps and loads took, and for whom: counted by the engine's thread, taken by the event loop. No torch.

A step costs a quarter of a microsecond for each request in it, and two beside that. Its time is shared by tokens: a
request with 3 of a step's 12 rows has taken a quarter of it.

Where the time of steps goes, by part: always counted, for some microseconds a step; written by `serve --profile`.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from adapter_store.spec import AdapterKey
from lorasrv.metrics.histogram import DISTINCT, STEP_SECONDS, Histogram
from lorasrv.scheduler_output import SchedulerOutput

Account = tuple[str, AdapterKey | None]
"""An adapter id and the content that it meant; ("", None) is the base."""


@dataclass(slots=True)
class Moved:
    """An adapter's ways: from disk to host memory, and from there to the pool. Bytes."""

    loads: int = 0
    load_bytes: int = 0
    copies: int = 0
    copy_bytes: int = 0


@dataclass(slots=True)
class StepUsage:
    """Since it was taken last: seconds of steps by account, and what was moved."""

    seconds: dict[Account, float] = field(default_factory=dict)
    moved: dict[AdapterKey, Moved] = field(default_factory=dict)


class StepStats:
    """The engine's thread adds; histograms and counts may be read at any time, the rest is taken by `take`."""

    def __init__(self) -> None:
        self.step_seconds = Histogram(STEP_SECONDS)
        self.distinct_adapters = Histogram(DISTINCT)
        self.load_seconds = {"disk": Histogram(STEP_SECONDS), "host": Histogram(STEP_SECONDS)}
        """By the tier that the adapter came from: disk -> host memory, host memory -> pool."""
        self.failures: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._spent = StepUsage()

    def step(self, step: SchedulerOutput, seconds: float) -> None:
        """A step was computed in so many seconds."""
        if not step.scheduled:
            return
        self.step_seconds.add(seconds)
        self.distinct_adapters.add(len(step.placements))
        each = seconds / max(1, step.num_tokens)
        with self._lock:
            spent = self._spent.seconds
            for share in step.scheduled:
                account = (share.adapter_id, share.adapter_key)
                spent[account] = spent.get(account, 0.0) + each * len(share.token_ids)

    def loaded(self, key: AdapterKey, seconds: float, nbytes: int) -> None:
        """An adapter was read from disk to host memory."""
        self.load_seconds["disk"].add(seconds)
        with self._lock:
            moved = self._spent.moved.setdefault(key, Moved())
            moved.loads += 1
            moved.load_bytes += nbytes

    def copied(self, key: AdapterKey, seconds: float, nbytes: int) -> None:
        """An adapter was copied from host memory to the pool."""
        self.load_seconds["host"].add(seconds)
        with self._lock:
            moved = self._spent.moved.setdefault(key, Moved())
            moved.copies += 1
            moved.copy_bytes += nbytes

    def failed(self, reason: str) -> None:
        """A load or a copy has failed."""
        self.failures[reason] += 1

    def take(self) -> StepUsage:
        """What was spent since the last call."""
        with self._lock:
            spent, self._spent = self._spent, StepUsage()
        return spent


class StepProfile:
    """Seconds by part. Every part is counted by one thread only: the engine's, or the event loop's."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Count what is done inside."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - begun)

    def add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def add_kernels(self, seconds: float, kernels: Mapping[str, float]) -> None:
        """A forward pass: what its kernels took, by kind, and the rest of it."""
        for kind, spent in kernels.items():
            self.add(kind, spent)
        self.add("forward", seconds - sum(kernels.values()))

    def seconds(self) -> dict[str, float]:
        """By part, most first; a copy."""
        return dict(sorted(self._seconds.items(), key=lambda item: -item[1]))
