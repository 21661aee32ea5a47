"""Describe a cluster: its machines, how requests are placed, shared storage, and failing and joining machines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lorasrv.errors import ConfigError


class ChangeKind(Enum):
    """Name what happens to a machine."""

    FAIL = "fail"
    JOIN = "join"


@dataclass(frozen=True, slots=True)
class MachineChange:
    """Let a machine fail, or join with empty memory.

    Raises:
        ConfigError: the time is invalid.
    """

    at_s: float
    kind: ChangeKind
    machine: str

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise ConfigError(f"{self.kind.value} of {self.machine}: the time must be 0 or more, not {self.at_s}")


@dataclass(frozen=True)
class ClusterOptions:
    """Describe a cluster of equal machines.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    machines: int
    placement: str = "bounded"
    routers: int = 1
    # Seconds between two reports of a machine to the routers; the edge polls at the same interval.
    report_s: float = 0.5
    changes: Sequence[MachineChange] = ()
    seed: int = 0
    # Bandwidth of a shared storage from which all machines read adapters; None: each has its own disk.
    storage_bytes_per_s: float | None = None
    # The first so many machines compute prompts for the others; 0: every machine does both.
    prefill: int = 0
    # Bandwidth of each machine's link, over which pages of prompts are sent.
    transfer_bytes_per_s: float = 10e9 / 8

    def __post_init__(self) -> None:
        for name in ("machines", "routers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("report_s", "transfer_bytes_per_s", "storage_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive, not {value}")
        if not 0 <= self.prefill < self.machines:
            raise ConfigError(f"prefill must be from 0 to {self.machines - 1}, one less than machines: {self.prefill}")
        self._check_changes()

    def is_prefill(self, machine: str) -> bool:
        """Return whether this machine computes prompts for others."""
        return machine in {machine_name(number) for number in range(self.prefill)}

    def _check_changes(self) -> None:
        there = {machine_name(number) for number in range(self.machines)}
        for change in sorted(self.changes, key=lambda change: change.at_s):
            if (change.machine in there) is (change.kind is ChangeKind.JOIN):
                is_there = "is there already" if change.machine in there else "is not there"
                known = ", ".join(sorted(there, key=lambda name: (len(name), name))) or "none"
                what = f"{change.kind.value} {change.machine}@{change.at_s:g}"
                raise ConfigError(f"{what}: {change.machine} {is_there}; there are {known}")
            there ^= {change.machine}


def machine_name(number: int) -> str:
    """Return the name of a machine, from 0 on."""
    return f"m{number}"
