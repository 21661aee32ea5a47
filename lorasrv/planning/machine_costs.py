"""What serving costs on a machine, as plain numbers: what `replay` predicts with, kept as JSON. No torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lorasrv.costs import CostModel, Rate
from lorasrv.errors import ConfigError
from lorasrv.step_costs import PARTS, StepCosts


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """Seconds.

    Args:
        step: for each of `step_costs.PARTS`, of the whole of `Engine.step`.
        between_steps_s: from the end of a step to the begin of the next, while there is something to compute.
        edge_s: from a request's arrival until the engine may see it.
        load_s, load_byte_s: to bring an adapter from disk to host memory, whatever its size, and for each of its bytes.
        copy_s, copy_byte_s: from there to the pool.
        swap_byte_s: between the pool and host memory, for pages of preempted requests.
        stall_s, stall_byte_s: what the step that runs meanwhile loses to a load from disk, and to each of its bytes.
    Raises:
        ConfigError: a value is missing, negative or no number.
    """

    step: Mapping[str, float]
    between_steps_s: float = 0.0
    edge_s: float = 0.0
    load_s: float = 0.0
    load_byte_s: float = 1 / 0.5e9
    copy_s: float = 0.0
    copy_byte_s: float = 1 / 4e9
    swap_byte_s: float = 1 / 4e9
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
    def read(cls, path: Path) -> "MachineCosts":
        """Raises: ConfigError: the file is no costs. OSError: it cannot be read."""
        try:
            facts = json.loads(path.read_text("utf-8"))
        except ValueError:
            raise ConfigError(f"costs: {path} is not JSON") from None
        return cls.of(facts)

    @classmethod
    def of(cls, facts: Any) -> "MachineCosts":
        """From JSON. Raises: ConfigError."""
        known = {f.name for f in fields(cls)}
        if not isinstance(facts, dict) or not isinstance(facts.get("step"), dict):
            raise ConfigError('costs: must be a JSON object with "step", an object')
        if unknown := facts.keys() - known:
            raise ConfigError(f"costs: {', '.join(sorted(unknown))} is unknown; there are {', '.join(sorted(known))}")
        return cls(**facts)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "step": dict(self.step)}

    def model(self, typical_bytes: int) -> CostModel:
        """As a server would have learnt them, with adapters of about that size."""
        step = StepCosts.known(self.step)
        return CostModel(
            load=Rate(self.load_byte_s + self.load_s / max(1, typical_bytes)),
            copy=Rate(self.copy_byte_s + self.copy_s / max(1, typical_bytes)),
            page_copy=Rate(self.swap_byte_s),
            token=Rate(max(step.token_s, 1e-6)),
            step=step,
        )

    def _rates(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "step"}
