"""Count values by fixed upper bounds, as Prometheus histograms do. Torch-free."""

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
"""Upper bounds for latencies that a client sees."""
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
DISTINCT = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Histogram:
    """Count values by upper bounds, with one more count for larger values, and their sum.

    One thread adds, any thread may read; a reader may see the newest value in one field but not yet in another.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS, counts: Sequence[int] = (), total: float = 0.0) -> None:
        self.bounds = bounds
        self.counts = list(counts) or [0] * (len(bounds) + 1)
        self.sum = total

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def merge(self, other: "Histogram") -> None:
        """Add the counts of a histogram with the same bounds."""
        self.counts = [own + others for own, others in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Return the mean; None without values."""
        return self.sum / self.count if self.count else None

    def cumulative(self) -> list[tuple[str, int]]:
        """Return (bound, number of values up to it) pairs, as Prometheus expects."""
        total = 0
        rows = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows

    def quantile(self, q: float) -> float | None:
        """Estimate the value that a share `q` of all values does not exceed.

        Interpolates linearly between two bounds; values above the last bound count as that bound. None without values.
        """
        wanted, below, lower = q * self.count, 0, 0.0
        if not wanted:
            return None
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= wanted:
                return lower + (bound - lower) * (wanted - below) / count
            below, lower = below + count, bound
        return lower
