"""Base linears over int8 weights: FBGEMM where torch has it (x86 CPUs), plain torch elsewhere.

Weights: one scale per output channel. Activations, FBGEMM only: one scale per row, chosen from that row alone, so that
a row's result does not depend on the rows beside it. FBGEMM takes one activation scale per tensor; so each row is
divided by its largest magnitude first, and multiplied back.

Shapes: T rows, H in, O out.
"""

import math
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.errors import KernelArgumentError

INT8_MAX = 127
_TINY = 1e-30
"""Below it a row counts as zero; keeps 0 / 0 away."""


@dataclass(frozen=True, slots=True)
class ActivationRange:
    """FBGEMM's uint8 grid for numbers in [-1, 1]: value = (q - zero_point) * scale."""

    scale: float
    zero_point: int


FULL_RANGE = ActivationRange(1 / 127, 128)
HALF_RANGE = ActivationRange(1 / 63, 64)
"""Seven bits: without VNNI, FBGEMM adds two uint8 x int8 products in int16, which eight bits overflow."""


@dataclass(frozen=True, slots=True)
class PlainInt8:
    """values [O, H] int8, scales [O] fp32; weight = values * scales."""

    values: Tensor
    scales: Tensor

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class FbgemmInt8:
    """The same in FBGEMM's blocked order; activations are rounded to `grid`."""

    packed: Any
    out_features: int
    in_features: int
    grid: ActivationRange

    @property
    def nbytes(self) -> int:
        """A channel has a scale, a zero point and a column sum beside its values, 4 bytes each."""
        return self.out_features * (self.in_features + 12)


Int8Weight = PlainInt8 | FbgemmInt8


def pack_int8(values: Tensor, scales: Tensor) -> Int8Weight:
    """values [O, H] int8, scales [O] fp32, weight = values * scales. FBGEMM's form holds a copy.

    Raises:
        KernelArgumentError: a shape or dtype does not fit.
    """
    if values.dtype != torch.int8 or values.dim() != 2 or scales.shape != values.shape[:1]:
        raise KernelArgumentError("values must be int8 [O, H] and scales [O]")
    grid = activation_range() if values.device.type == "cpu" else None
    if grid is None:
        return PlainInt8(values, scales)
    return FbgemmInt8(_prepack(values, scales), values.shape[0], values.shape[1], grid)


def unpack_int8(weight: Int8Weight) -> Tensor:
    """The weights that the arithmetic uses, [O, H] fp32."""
    if isinstance(weight, PlainInt8):
        return weight.values.float() * weight.scales[:, None]
    quantized, _ = torch.ops.quantized.linear_unpack(weight.packed)
    values: Tensor = quantized.int_repr().float()
    scales: Tensor = quantized.q_per_channel_scales().float()
    return values.mul_(scales[:, None])


def int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """x [T, H] fp32 -> [T, O] fp32.

    Semantics: s_t = max |x[t]|; y[t] = s_t * (round(x[t] / s_t / a) * a) @ W^T with a = 1/127, or 1/63 without VNNI;
    plain torch: y = x @ W^T
    Raises:
        KernelArgumentError: a shape or dtype does not fit.
    Source: per-token dynamic activations with per-channel weights, ZeroQuant (Yao et al. 2022).
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != torch.float32:
        raise KernelArgumentError(f"x must be float32 [T, {weight.in_features}], not {x.dtype} {list(x.shape)}")
    if isinstance(weight, PlainInt8):
        return F.linear(x, weight.values.to(x.dtype)).mul_(weight.scales)
    largest = torch.linalg.vector_norm(x, math.inf, dim=1, keepdim=True).clamp_min_(_TINY)
    y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        x / largest, weight.grid.scale, weight.grid.zero_point, weight.packed
    )
    return y.mul_(largest)


def int8_linear_reference(x: Tensor, values: Tensor, scales: Tensor, grid: ActivationRange | None) -> Tensor:
    """What `int8_linear` means, in float64. `grid` None: activations are not rounded."""
    x64 = x.double()
    if grid is not None:
        largest = x64.abs().amax(dim=1, keepdim=True).clamp_min(_TINY)
        x64 = (x64 / largest / grid.scale).round() * grid.scale * largest
    return (x64 @ (values.double() * scales.double()[:, None]).T).float()


@cache
def activation_range() -> ActivationRange | None:
    """The grid to which `int8_linear` rounds activations on this CPU; None where torch has no FBGEMM.

    Found by asking, as torch tells nobody whether its engine uses VNNI here.
    """
    try:
        for grid in (FULL_RANGE, HALF_RANGE):
            if _is_exact(grid):
                return grid
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
    return None


def _is_exact(grid: ActivationRange) -> bool:
    """Whether the largest products survive: a row of ones by channels of 127s, where int16 sums would saturate."""
    packed = _prepack(torch.full((8, 64), INT8_MAX, dtype=torch.int8), torch.ones(8))
    y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        torch.ones(1, 64), grid.scale, grid.zero_point, packed
    )
    return bool(torch.allclose(y, torch.full_like(y, 64.0 * INT8_MAX), rtol=1e-5))


def _prepack(values: Tensor, scales: Tensor) -> Any:
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # torch 2.13 announces the end of its quantized tensors; where they end, `activation_range` finds none.
            warnings.simplefilter("ignore", UserWarning)
            zero_points = torch.zeros(len(scales), dtype=torch.int64)
            quantized = torch._make_per_channel_quantized_tensor(values, scales.double(), zero_points, 0)
            return torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = engine
