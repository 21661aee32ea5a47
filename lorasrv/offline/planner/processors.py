"""Measure how much of this machine's processors other programs use, on Linux; elsewhere, they seem to use nothing."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

STAT = Path("/proc/stat")
IDLE = slice(3, 5)
"""Positions in a processor's line of the time without work: idle, and idle while a disk works."""
GUEST = 8
"""Position from which on times are also part of earlier ones."""


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Hold seconds since a fixed moment: of the clock, of the processors' work, and of the part of this process and the
    ones that it has started and that have ended, such as those that compile kernels."""

    clock_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> Self:
        """Read the times of the processors that this process may use."""
        usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        try:
            lines = [line.split() for line in STAT.read_text().splitlines()]
        except OSError:
            lines = []
        times = [list(map(int, line[1:][:GUEST])) for line in lines if line and line[0] in usable]
        ticks = sum(sum(spent) - sum(spent[IDLE]) for spent in times)
        return cls(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]))

    def others(self, earlier: Self) -> float:
        """Return the share of these processors that other programs, or other virtual machines, have used since then."""
        others_s = (self.all_s - earlier.all_s) - (self.own_s - earlier.own_s)
        whole_s = (self.clock_s - earlier.clock_s) * len(os.sched_getaffinity(0))
        return max(0.0, others_s / whole_s)
