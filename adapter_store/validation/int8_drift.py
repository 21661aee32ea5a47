"""Measurement of how much storing an adapter as int8 codes changes the delta of every module.

Deltas are not computed: the Frobenius norm of a product needs only the Gram matrices of its factors, r x r each:
|B A|^2 = sum((B'B) * (A A')).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from adapter_store.errors import ProblemList
from adapter_store.formats.int8_codes import CodedTensors
from adapter_store.formats.safetensors_file import SafetensorsHeader
from adapter_store.formats.tensor_names import module_name
from adapter_store.formats.weights import LoraTensors, unpooled
from adapter_store.spec import BaseShapes, LoraModule
from adapter_store.validation.tensor_scan import read_matrix

WARNED_DRIFT, MOST_DRIFT = 0.02, 0.10
"""Largest accepted drift of a module. Trained adapters of ranks 4 to 16 drift by at most 0.01."""
_PRODUCT_SIZE = 1 << 18
"""Largest number of multiplications in one product. BLAS starts threads for larger ones, competing with requests."""
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Drift:
    """Report |delta as int8 - delta| / |delta| (Frobenius norms), of all modules together and of the worst one."""

    rms: float
    worst: float
    worst_module: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"rms": self.rms, "worst": self.worst, "worst_module": self.worst_module}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Drift":
        """Build a drift from `to_dict`."""
        return cls(values["rms"], values["worst"], values["worst_module"])

    def warnings(self) -> list[str]:
        """Return a warning if the worst module drifts much."""
        if self.worst <= WARNED_DRIFT:
            return []
        both = f"by {100 * self.worst:.1f} %, all modules together by {100 * self.rms:.1f} %"
        return [f"int8 changes {self.worst_module} {both}"]


def measure_drift(
    file: BinaryIO,
    header: SafetensorsHeader,
    modules: tuple[LoraModule, ...],
    base: BaseShapes,
    problems: ProblemList,
    *,
    allow_drift: bool,
) -> Drift:
    """Measure the drift of checked weights; record a problem for values that int8 cannot hold, or too much drift.

    Args:
        file: the weights.
        header: their header.
        modules: the adapted modules.
        base: shapes that the adapter fits.
        problems: receives the problems.
        allow_drift: accept any drift.
    """
    changed = whole = 0.0
    worst, worst_module = 0.0, module_name(base, modules[0].layer, modules[0].module)
    for module in modules:
        name = module_name(base, module.layer, module.module)
        a, b = (read_matrix(file, header, tensor) for tensor in (module.a_name, module.b_name))
        a = unpooled(a, module.group_size)
        coded = CodedTensors(LoraTensors(module.rank, module.scaling, a, b), "F32")
        if not np.isfinite(coded.factors).all():
            problems.add("int8_overflow", name, "lora_A and lora_B are too large to be stored as int8; use stored bf16")
            continue
        error, norm = _squares(a.astype(np.float64), module.scaling * b.astype(np.float64), coded)
        changed, whole = changed + error, whole + norm
        own = math.sqrt(error / norm) if norm else 0.0
        if own > worst:
            worst, worst_module = own, name
    drift = Drift(math.sqrt(changed / whole) if whole else 0.0, worst, worst_module)
    if drift.worst > MOST_DRIFT and not allow_drift:
        problems.add(
            "int8_drift",
            worst_module,
            f"int8 changes it by {100 * worst:.1f} %, all modules together by {100 * drift.rms:.1f} %; at most "
            f"{100 * MOST_DRIFT:.0f} % are accepted: use stored bf16, or allow more "
            '("allow_drift": true, --allow-drift)',
        )
    return drift


def _squares(a: Doubles, b: Doubles, coded: CodedTensors) -> tuple[float, float]:
    """Return the squared norms of the change and of the delta b @ a, where a is [rank, in] and b [out, rank]."""
    codes = coded.a.astype(np.float64)
    scaled = coded.b * coded.factors.astype(np.float64)[:, None]
    rows = np.ascontiguousarray(b.T)
    norm = _product(a, a, rows, rows)
    # The difference of two deltas is one product, of factors twice as long.
    error = _product(codes, codes, scaled, scaled) - 2 * _product(codes, a, scaled, rows) + norm
    return max(0.0, error), norm


def _product(a: Doubles, other_a: Doubles, b: Doubles, other_b: Doubles) -> float:
    """Return the inner product of two deltas b' @ a and other_b' @ other_a; a [rank, in], b [rank, out]."""
    return float(np.einsum("ij,ij->", _gram(a, other_a), _gram(b, other_b)))


def _gram(x: Doubles, y: Doubles) -> Doubles:
    """Return x @ y', in pieces small enough that BLAS computes them in the calling thread."""
    step = max(1, _PRODUCT_SIZE // (len(x) * len(y)))
    total = np.zeros((len(x), len(y)))
    for start in range(0, x.shape[1], step):
        total += x[:, start : start + step] @ y[:, start : start + step].T
    return total
