"""Resources of a server's process, from Linux and its /metrics: memory, descriptors, threads, its own figures; and
whether one of them grows.
"""

from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Held:
    """`rss_bytes` resident now, `peak_bytes` at most so far."""

    rss_bytes: int
    peak_bytes: int
    fds: int
    threads: int


def held_by(pid: int) -> Held:
    """Raises: OSError: the process is gone."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Held(int(status["VmRSS"][0]) << 10, int(status["VmHWM"][0]) << 10, fds, int(status["Threads"][0]))


class Figures:
    """Samples of a /metrics page."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of `lorasrv_NAME` with these labels.

        Raises:
            KeyError: there is no sample of this name.
        """
        named = [sample for sample in self._samples if sample.name == f"lorasrv_{name}"]
        if not named:
            raise KeyError(name)
        return sum(sample.value for sample in named if labels.items() <= sample.labels.items())


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope per second of the least-squares line through (seconds, value); 0 for fewer than two points."""
    count = len(points)
    if count < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
