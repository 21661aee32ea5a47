"""Fault injection for operators and tests: a slow or failing disk, steps that raise or hang.

    slow-disk:200ms            reading an adapter and writing an upload take this much longer
    failing-reads:0.5          this share of the reads of adapters fails
    no-space  io-error  read-only  no-files
                               of uploads, writing fails with ENOSPC, fsync with EIO, opening a file with EROFS, EMFILE
    step-raises@50             the 50th step that computes something raises, in every part that is tried
    step-raises:7              every part that computes token 7 raises
    step-oom:8@50x10           of ten steps from the 50th on, parts of more than 8 tokens run out of memory
    step-hangs:5s@100          the 100th step hangs for five seconds; without a time, for ever
    interpreter-hangs@100      the 100th step hangs, and no other thread can run meanwhile

`@N`: from the N-th on, counted from the start; `xN`: so many times (default: without end for the disk, once for steps).
Separate several faults by commas. This module is unused unless the server was started with `--inject-faults`.
"""

import errno
import itertools
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapter_store.spec import AdapterKey, AdapterSpec
from adapter_store.storage import blobs
from adapter_store.store import AdapterStore
from lorasrv.errors import ConfigError
from lorasrv.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    from lorasrv.engine.async_engine import AsyncEngine

_SPELLING = re.compile(r"(?P<name>[a-z-]+)(:(?P<value>[0-9.]+)(?P<unit>ms|s)?)?(@(?P<first>\d+))?(x(?P<count>\d+))?")
_DURATIONS = ("slow-disk", "step-hangs")
STEPS = ("step-raises", "step-oom", "step-hangs", "interpreter-hangs")
UPLOADS = {
    "no-space": ("write", errno.ENOSPC),
    "io-error": ("fsync", errno.EIO),
    "read-only": ("open", errno.EROFS),
    "no-files": ("open", errno.EMFILE),
}
NAMES = ("slow-disk", "failing-reads", *UPLOADS, *STEPS)


class InjectedFault(RuntimeError):
    """Raised by a step that is to fail."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Describe one fault."""

    # One of `NAMES`.
    name: str
    # Seconds, a share, a number of tokens or a token id, depending on the name.
    value: float | None = None
    # First occurrence at which it happens.
    first: int = 1
    # How often it happens; None: without end.
    count: int | None = None

    def happens(self, number: int) -> bool:
        """Return whether it happens at the `number`-th occurrence, counted from 1."""
        return number >= self.first and (self.count is None or number < self.first + self.count)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse the value of `--inject-faults`.

    Raises:
        ConfigError: a fault is unknown or misspelled; the message names it.
    """
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _parse(text: str) -> Fault:
    found = _SPELLING.fullmatch(text)
    if found is None or found["name"] not in NAMES:
        raise ConfigError(
            f"--inject-faults {text!r} is unknown; write NAME[:VALUE][@FIRST][xCOUNT] with one of {', '.join(NAMES)}"
        )
    name, unit = found["name"], found["unit"]
    try:
        value = None if found["value"] is None else float(found["value"])
    except ValueError:
        raise ConfigError(f"--inject-faults {text!r}: {found['value']} is not a number") from None
    if (unit is not None) != (value is not None and name in _DURATIONS):
        raise ConfigError(f"--inject-faults {text!r}: only slow-disk and step-hangs have a time, such as 200ms or 5s")
    if value is not None and (name in UPLOADS or name == "interpreter-hangs"):
        raise ConfigError(f"--inject-faults {text!r}: {name} has no value")
    if name == "failing-reads" and value is not None and not 0 < value <= 1:
        raise ConfigError(f"--inject-faults {text!r}: a share must be above 0 and at most 1")
    poisons = name == "step-raises" and value is not None
    count = None if name not in STEPS or poisons else 1
    seconds = value / 1e3 if unit == "ms" and value is not None else value
    return Fault(name, seconds, int(found["first"] or 1), int(found["count"]) if found["count"] else count)


class FaultInjector:
    """Make faults happen in one server."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = {name: [f for f in faults if f.name == name] for name in {f.name for f in faults}}
        self._poison = {int(f.value) for f in faults if f.name == "step-raises" and f.value is not None}
        self._steps = [f for f in faults if f.name in STEPS and not (f.name == "step-raises" and f.value is not None)]
        self._step = self._reads = self._uploads = 0

    def arm_store(self, store: AdapterStore) -> None:
        """Make reads of this store's adapters fail, and uploads of any store of this process."""
        if {"slow-disk", "failing-reads"} & self._faults.keys():
            load = store.load

            def slow(*args: Any, **kwargs: Any) -> Any:
                self._read()
                return load(*args, **kwargs)

            setattr(store, "load", slow)  # noqa: B010 - a method of one object
        if "slow-disk" in self._faults:
            spec = store.spec

            def slow_spec(key: AdapterKey) -> AdapterSpec:
                self._slow_down(self._reads + 1)
                return spec(key)

            setattr(store, "spec", slow_spec)  # noqa: B010
        if {"slow-disk", *UPLOADS} & self._faults.keys():
            setattr(blobs, "os", _FaultyOs(self._call))  # noqa: B010 - a module of a module

    def arm_engine(self, engine: "AsyncEngine") -> None:
        """Make steps of this engine fail."""
        if self._steps or self._poison:
            engine.inject_faults(self)

    # The disk.
    def _read(self) -> None:
        self._reads += 1
        self._slow_down(self._reads)
        for fault in self._faults.get("failing-reads", ()):
            share, number = fault.value or 1.0, self._reads - fault.first
            if fault.happens(self._reads) and int((number + 1) * share) > int(number * share):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _call(self, kind: str) -> None:
        """Handle a system call of an upload."""
        if kind == "open":
            self._uploads += 1
        if kind == "write":
            self._slow_down(self._uploads)
        for name, (failing, number) in UPLOADS.items():
            faults = self._faults.get(name, ())
            if kind == failing and any(fault.happens(self._uploads) for fault in faults):
                raise OSError(number, os.strerror(number))

    def _slow_down(self, number: int) -> None:
        for fault in self._faults.get("slow-disk", ()):
            if fault.happens(number):
                time.sleep(0.2 if fault.value is None else fault.value)

    # Steps: `step_retry.FaultHook`.

    def on_step(self) -> None:
        """Count a step that is about to be computed."""
        self._step += 1

    def on_part(self, part: SchedulerOutput) -> None:
        """Raise if a fault hits this part of the step.

        Raises:
            InjectedFault, OutOfMemoryError: the fault.
        """
        if self._poison and any(not self._poison.isdisjoint(s.token_ids) for s in part.requests):
            raise InjectedFault("injected: a token that must not be computed")
        for fault in self._steps:
            if fault.happens(self._step):
                _HAPPENINGS[fault.name](fault, part)


def _raises(fault: Fault, part: SchedulerOutput) -> None:
    raise InjectedFault("injected: this step fails on purpose")


def _runs_out_of_memory(fault: Fault, part: SchedulerOutput) -> None:
    import torch  # imported here: options are parsed without torch

    if part.num_tokens > (1 if fault.value is None else fault.value):
        raise torch.OutOfMemoryError("injected: out of memory")


def _hangs(fault: Fault, part: SchedulerOutput) -> None:
    end_s = None if fault.value is None else time.monotonic() + fault.value
    while end_s is None or time.monotonic() < end_s:
        time.sleep(0.05)


def _hangs_with_the_lock(fault: Fault, part: SchedulerOutput) -> None:
    deque(itertools.repeat(None), maxlen=0)


_HAPPENINGS: dict[str, Callable[[Fault, SchedulerOutput], None]] = {
    "step-raises": _raises,
    "step-oom": _runs_out_of_memory,
    "step-hangs": _hangs,
    "interpreter-hangs": _hangs_with_the_lock,
}


class _FaultyOs:
    """Replace the module `os` where files are written, with calls that fail."""

    def __init__(self, before: Callable[[str], None]) -> None:
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_CREAT:
            self._before("open")
        return os.open(path, flags, *args)

    def write(self, fd: int, data: Any) -> int:
        self._before("write")
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        self._before("fsync")
        os.fsync(fd)
