"""Kernel launches on the CPU: run immediately, or recorded and run many at a time.

A launch is a kernel and a block of int64 words. The launch sets its own words (addresses of weights and buffers,
widths), and the step sets the others (numbers of rows, addresses of its tables); each is 0 where the other has the
value. A forward pass is recorded once. Each step runs it as `blocks = step words + own words`, one line of NumPy, and
one parallel region with a barrier between launches. Without recording, a step of SmolLM2 spends half its time in 500
calls from Python. Source: the idea is that of CUDA graphs.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgmv_kernels.cpu_arguments.block import COUNTERS, NUM_ROWS, WORDS
from sgmv_kernels.cpu_runtime.kernel_compiler import kernel_address
from sgmv_kernels.cpu_runtime.team import Team, arguments, run, take_team, team_size

ROWS = "rows"
"""Name of the part that holds the number of rows of a step."""
Words = Mapping[int, int]
"""Values by their indices in a block."""


@dataclass(frozen=True, slots=True)
class Part:
    """Hold the words that a step gives to launches; launches with parts of one name get the same words.

    `tasks` is the number of tasks: with fewer than two, one thread works alone. `threads` is the team size that the
    scratch memory is for, 0 for any.
    """

    name: str
    words: Words
    tasks: int
    threads: int = 0


@dataclass
class Recorder:
    """Hold the launches that are being recorded for a team of `threads`, and the buffers that they share."""

    threads: int
    part_of_rows: str = ROWS
    launches: list[tuple[str, int, str, dict[int, int]]] = field(default_factory=list)
    buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = field(default_factory=dict)
    # The result of the last launch, if that launch can be extended.
    last_result: Tensor | None = None


class _Local(threading.local):
    recorder: Recorder | None = None


_local = _Local()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record the launches of this thread instead of running them; buffers of one name and shape become one."""
    _local.recorder = made = Recorder(team_size())
    try:
        yield made
    finally:
        _local.recorder = None


def recording_now() -> bool:
    """Return whether launches are being recorded."""
    return _local.recorder is not None


def empty(name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory for a result: new, or in a recording the shared buffer of this name, which later uses overwrite."""
    if _local.recorder is None:
        return torch.empty(tuple(shape), dtype=dtype)
    key = name, tuple(shape), dtype
    if key not in _local.recorder.buffers:
        _local.recorder.buffers[key] = torch.empty(tuple(shape), dtype=dtype)
    return _local.recorder.buffers[key]


def rows_part(rows: int, tasks: int) -> Part:
    """Return the part of a launch that needs only the number of rows from the step."""
    return Part(ROWS if _local.recorder is None else _local.recorder.part_of_rows, {NUM_ROWS: rows}, tasks)


def rows_are_now(part: str) -> None:
    """Make later launches of a recorded pass use the number of rows of this part."""
    if _local.recorder is not None:
        _local.recorder.part_of_rows = part


def recorded_maker(x: Tensor, module: str) -> dict[int, int] | None:
    """Return the own words, which may be changed, of the last recorded launch; None unless x is its `result` and its
    kernel is in this module."""
    recorder = _local.recorder
    if recorder is None or recorder.last_result is not x or recorder.launches[-1][0] != module:
        return None
    return recorder.launches[-1][3]


def launch(module: str, entry: str, part: Part, own: Words, result: Tensor | None = None) -> None:
    """Run a kernel by its module and name, or record it; `recorded_maker` then finds it by its result, if given."""
    kernel = kernel_address(module, entry)
    if _local.recorder is not None:
        _local.recorder.launches.append((module, kernel, part.name, dict(own)))
        _local.recorder.last_result = result
        return
    block = arguments(*(0,) * (WORDS - COUNTERS))
    for words in (part.words, own):
        for place, value in words.items():
            block[place] += value
    run(kernel, block, part.threads or team_size(), part.tasks)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Hold the launches of a run, and their words."""

    items: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]


class Program:
    """Run recorded launches together, any number of times. A run may be prepared while another is computed.

    The team must be as large as the recording's, because each thread has its own scratch memory. A program keeps the
    recording's buffers alive; the caller must keep the weights and inputs that launches point to.
    """

    def __init__(self, recorded: Recorder) -> None:
        names = list(dict.fromkeys(name for _, _, name, _ in recorded.launches))
        count = len(recorded.launches)
        self._part_of = np.array([names.index(name) for _, _, name, _ in recorded.launches])
        self._names = {name: i for i, name in enumerate(names)}
        self._own = np.zeros((count, WORDS), dtype=np.int64)
        for row, (_, _, _, own) in zip(self._own, recorded.launches, strict=True):
            for place, value in own.items():
                row[place] = value
        self._parts = np.zeros((len(names), WORDS), dtype=np.int64)
        kinds = [kind for kind, _, _, _ in recorded.launches]
        self._kinds = list(dict.fromkeys(kinds))
        launches = [(kernel, 0, self._kinds.index(kind)) for kind, kernel, _, _ in recorded.launches]
        self._spare = [_blocks(launches) for _ in range(2)]
        self._count: int | None = None
        self._kept = recorded.buffers
        self.threads = recorded.threads
        self._clock = np.zeros(1 + len(self._kinds), dtype=np.int64)
        # The team that is computing, and when it began.
        self._team: Team | None = None
        self._begun_s = 0.0
        self._second = 0.0
        # When the last run was complete, by `time.perf_counter`; `complete` may have been called later.
        self.ended_s = 0.0

    def run(self, parts: Mapping[str, Words]) -> None:
        """Run all launches; `parts` must have every part that they name."""
        self.prepare(parts)
        self.begin()
        self.complete()

    def prepare(self, parts: Mapping[str, Words], count: int | None = None) -> None:
        """Prepare the next run, of the first `count` launches; None: of all."""
        self._parts[:] = 0
        for name, i in self._names.items():
            row = self._parts[i]
            for place, value in parts[name].items():
                row[place] = value
        self._count = count
        words = self._spare[0].words
        self._parts.take(self._part_of, axis=0, out=words)
        words += self._own

    def begin(self) -> None:
        """Let the other threads of the team begin the prepared run; no run may be in progress."""
        assert self._team is None, "the run before is not complete"
        self._clock[:] = 0
        items = self._spare[0].items[: self._count]
        self._spare.reverse()
        self._team = take_team(self.threads)
        self._begun_s = time.perf_counter()
        self._team.open(items.ctypes.data, len(items), self._clock.ctypes.data)

    def take_part(self, seconds: float) -> None:
        """Compute with the other threads for about `seconds`, at most until the run is complete."""
        ticks = int(seconds / self._second) if self._second else 0
        if self._team is not None and ticks > 0:
            self._team.take_part(ticks)

    def complete(self) -> None:
        """Compute with the other threads until the run is complete; do nothing if none was begun."""
        team = self._team
        if team is not None:
            # If an interrupt comes here, the run can still be completed later.
            team.complete()
            self._team = None
            team.give_back()
            ticks = max(1, int(self._clock[1:].sum()))
            # The run may have ended long before this call, so the smallest measured value is the best estimate.
            second = (time.perf_counter() - self._begun_s) / ticks
            self._second = min(self._second or second, second)
            self.ended_s = self._begun_s + ticks * self._second

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the last run by kind of launch, including the waits at their ends."""
        return {kind: ticks * self._second for kind, ticks in zip(self._kinds, self._clock[1:].tolist(), strict=True)}


def _blocks(launches: Sequence[tuple[int, int, int]]) -> _Blocks:
    words, items = np.zeros((len(launches), WORDS), dtype=np.int64), np.array(launches, dtype=np.int64)
    items[:, 1] = words.ctypes.data + 8 * WORDS * np.arange(len(launches))
    return _Blocks(items, words)
