"""Base linears over int8 weights: FBGEMM where torch has it (x86 CPUs), plain torch elsewhere.

Weights have one scale per output channel. With FBGEMM, activations are rounded too: each row by its own largest
magnitude, so that a row's result does not depend on the rows beside it. A few channels with outliers would spoil that
(SmolLM2-135M: +3.7 % perplexity with 8-bit activations, +14 % with 7), so weights and activations are rotated alike
first, which spreads them (+0.4 % with 7 bits, of which 0.1 are the weights').

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

FULL_RANGE, HALF_RANGE = 127, 63
"""Largest level of an activation. Seven bits: without VNNI, FBGEMM adds two uint8 x int8 products in int16, which eight
bits overflow, silently."""


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
    """The same in FBGEMM's blocked order; activations have levels from -`levels` to `levels`."""

    packed: Any
    out_features: int
    in_features: int
    levels: int

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
    levels = activation_levels() if values.device.type == "cpu" else None
    if levels is None:
        return PlainInt8(values, scales)
    return FbgemmInt8(_prepack(values, scales), values.shape[0], values.shape[1], levels)


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

    Semantics: y[t] = round(x[t] / u_t) * u_t @ W^T, u_t = max |x[t]| / L, L = 63 or, with VNNI, 127; plain torch does
    not round
    Raises:
        KernelArgumentError: a shape or dtype does not fit.
    Source: per-token dynamic activations with per-channel weights, ZeroQuant (Yao et al. 2022).
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != torch.float32:
        raise KernelArgumentError(f"x must be float32 [T, {weight.in_features}], not {x.dtype} {list(x.shape)}")
    if isinstance(weight, PlainInt8):
        return F.linear(x, weight.values.to(x.dtype)).mul_(weight.scales)
    unit = x.abs().amax(dim=1, keepdim=True).clamp_min_(_TINY).div_(weight.levels)
    return _product(x / unit, weight.packed, weight.levels).mul_(unit)


def int8_linear_reference(x: Tensor, values: Tensor, scales: Tensor, levels: int | None) -> Tensor:
    """The semantics of `int8_linear` in float64; `levels` None: activations are not rounded."""
    x = x.double()
    if levels is not None:
        unit = x.abs().amax(dim=1, keepdim=True).clamp_min(_TINY) / levels
        x = (x / unit).round() * unit
    return x @ (values.double() * scales.double()[:, None]).T


@cache
def activation_levels() -> int | None:
    """The largest activation level that this CPU multiplies exactly; None where torch has no FBGEMM.

    Found by asking, as torch tells nobody whether its engine uses VNNI here.
    """
    try:
        return next((levels for levels in (FULL_RANGE, HALF_RANGE) if _is_exact(levels)), None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


def _is_exact(levels: int) -> bool:
    """Whether the largest products survive: a row of the largest level by channels of 127s."""
    packed = _prepack(torch.full((8, 64), INT8_MAX, dtype=torch.int8), torch.ones(8))
    y = _product(torch.full((1, 64), float(levels)), packed, levels)
    return bool((y == 64 * levels * INT8_MAX).all())


def _product(x: Tensor, packed: Any, levels: int) -> Tensor:
    """x [T, H], rounded to whole numbers of at most `levels`, by a packed weight."""
    # FBGEMM's uint8 grid is (q - zero point) * scale.
    y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 1.0, levels + 1, packed)
    return y


def _prepack(values: Tensor, scales: Tensor) -> Any:
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # torch 2.13 announces the end of its quantized tensors; where they end, `activation_levels` finds none.
            warnings.simplefilter("ignore", UserWarning)
            zero_points = torch.zeros(len(scales), dtype=torch.int64)
            quantized = torch._make_per_channel_quantized_tensor(values, scales.double(), zero_points, 0)
            return torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = engine


@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal matrix of n = a * b dimensions, the Kronecker product of `left` [a, a] and `right` [b, b]."""

    left: Tensor
    right: Tensor


@cache
def rotation(n: int, device: torch.device) -> Rotation:
    """The rotation of n dimensions: Hartley matrices with random signs, a and b as near as can be.

    Hartley's entries are of nearly one size, so that an outlier is spread over all of them, and exist for every n;
    Hadamard matrices do not (SmolLM2 has 576 = 24 * 24).
    Source: rotations against outliers, QuaRot (Ashkboos et al. 2024); random signs, QuIP# (Tseng et al. 2024).
    """
    a = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
    return Rotation(_hartley(a, 1).to(device), _hartley(n // a, 2).to(device))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """x [T, H] fp32 -> a new [T, H]. Every row is a product of its own: no row's result depends on the others.

    Semantics: y[t] = left^T @ x[t].view(a, b) @ right, flattened; rotate(x) @ rotate(W)^T = x @ W^T
    """
    rows, left, right = x.shape[0], by.left, by.right
    y = torch.bmm(x.reshape(rows, len(left), len(right)), right.expand(rows, -1, -1))
    return torch.bmm(left.T.expand(rows, -1, -1), y).view(rows, -1)


def unrotate(x: Tensor, by: Rotation) -> Tensor:
    """The inverse of `rotate`."""
    return rotate(x, Rotation(by.left.T, by.right.T))


def _hartley(n: int, seed: int) -> Tensor:
    """[n, n] fp32, orthogonal: cas(2 pi i j / n) / sqrt(n), rows with random signs."""
    steps = torch.arange(n, dtype=torch.float64)
    angles = torch.outer(steps, steps).remainder(n) * (2 * math.pi / n)
    signs = torch.randint(0, 2, (n, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return ((angles.cos() + angles.sin()) / math.sqrt(n) * signs).float()
