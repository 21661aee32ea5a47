"""Describe the costs of serving on a machine as plain numbers for `replay`, and cache measured ones as JSON.
Torch-free.

The cache has one small file for each model and weight format.
"""

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lorasrv import __version__
from lorasrv.config import ModelOptions
from lorasrv.errors import ConfigError
from lorasrv.memory.cost_model import PARTS, CostModel, Rate, StepCosts


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Hold costs in seconds.

    Raises:
        ConfigError: a value is missing, negative or not a number.
    """

    # Seconds per part of `cost_model.PARTS`, for the whole of `EngineCore.step`.
    step: Mapping[str, float]
    # From the end of a step to the start of the next while there is work.
    between_steps_s: float = 0.0
    # From a request's arrival until the engine may see it.
    edge_s: float = 0.0
    # Disk to host memory: per adapter, and per byte.
    load_s: float = 0.0
    load_byte_s: float = 1 / 0.5e9
    # Host memory to the pool: per adapter, and per byte.
    copy_s: float = 0.0
    copy_byte_s: float = 1 / 4e9
    # Pool to host memory and back, for pages of preempted requests.
    swap_byte_s: float = 1 / 4e9
    # Delay of the running step by a load from disk: per adapter, and per byte.
    stall_s: float = 0.0
    stall_byte_s: float = 0.0

    def __post_init__(self) -> None:
        if set(self.step) != set(PARTS):
            raise ConfigError(f"costs: step must have {', '.join(PARTS)}, not {', '.join(map(str, self.step))}")
        named = {**{f"step.{part}": s for part, s in self.step.items()}, **self._rates()}
        for name, value in named.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ConfigError(f"costs: {name} must be 0 or more, not {value!r}")

    @classmethod
    def read(cls, path: Path) -> "MachineProfile":
        """Read a profile from a file.

        Raises:
            ConfigError: the file is not a valid profile.
            OSError: it cannot be read.
        """
        try:
            facts = json.loads(path.read_text("utf-8"))
        except ValueError:
            raise ConfigError(f"costs: {path} is not JSON") from None
        return cls.of(facts)

    @classmethod
    def of(cls, facts: Any) -> "MachineProfile":
        """Build a profile from JSON data.

        Raises:
            ConfigError: the data is not a valid profile.
        """
        known = {f.name for f in fields(cls)}
        if not isinstance(facts, dict) or not isinstance(facts.get("step"), dict):
            raise ConfigError('costs: must be a JSON object with "step", an object')
        if unknown := facts.keys() - known:
            raise ConfigError(f"costs: {', '.join(sorted(unknown))} is unknown; there are {', '.join(sorted(known))}")
        return cls(**facts)

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON data."""
        return {**asdict(self), "step": dict(self.step)}

    def model(self, typical_bytes: int) -> CostModel:
        """Return the costs as a server with adapters of about that size would have learned them."""
        step = StepCosts.from_dict(self.step)
        return CostModel(
            load=Rate(self.load_byte_s + self.load_s / max(1, typical_bytes)),
            copy=Rate(self.copy_byte_s + self.copy_s / max(1, typical_bytes)),
            page_copy=Rate(self.swap_byte_s),
            token=Rate(max(step.token_s, 1e-6)),
            step=step,
        )

    def _rates(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "step"}


FORMAT = 2


def cache_file(model_name: str, options: ModelOptions) -> Path:
    """Return the path of the cached costs of this model on this CPU and version."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    made = str(options.quantized_weights.absolute()) if options.quantized_weights is not None else None
    weights = [options.quantization, options.quantization_group, made, options.load_format]
    facts = [FORMAT, model_name, *weights, options.dtype, options.device, options.kernels, cpu_model(), os.cpu_count()]
    digest = hashlib.sha256(json.dumps([*facts, __version__]).encode()).hexdigest()
    return Path(base) / "lorasrv" / f"costs-{digest[:16]}.json"


def read_cached(path: Path) -> MachineProfile | None:
    """Read cached costs; None if the file is missing or invalid."""
    try:
        return MachineProfile.read(path)
    except (OSError, ConfigError):
        return None


def write_cached(path: Path, costs: MachineProfile) -> None:
    """Write costs atomically.

    Raises: OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(costs.to_dict(), indent=1) + "\n", "utf-8")
    part.replace(path)


def cpu_model() -> str:
    """Return the name of this machine's CPU."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()
