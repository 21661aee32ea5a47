"""Where the time of steps goes, by part: always counted, for some microseconds a step; written by `serve --profile`."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


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
