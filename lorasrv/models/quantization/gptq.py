"""Rounding that repairs itself: what rounding one input's weights breaks, those of the inputs after it make up for.

It needs to know which inputs are large, and which come together: their second moments, sums of x xᵀ over rows that the
float model has computed. Source: GPTQ (Frantar et al. 2023), large inputs first, ranges of groups fixed beforehand.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from lorasrv.models.quantization.rounding import Range, fit_range
from sgmv_kernels.ops import GroupQuantizedWeight

DAMPING = 0.05
"""Part of the mean moment that every input has in any case: a text has not shown everything."""
_BLOCK = 64
_PARTS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72)
RANGES = tuple((low, high) for low, high in product(_PARTS, _PARTS) if abs(low - high) < 0.2)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Codes, and how much the product changes: |Δ x|² / |W x|² over the rows whose moments were given."""

    codes: GroupQuantizedWeight
    error: float


def round_to_outputs(weight: Tensor, moments: Tensor, group: int, levels: int) -> Rounded:
    """weight [O, H] floats, moments [H, H] fp32 -> codes below `levels` that change `weight @ x` little.

    Raises:
        ValueError: moments are not finite.
    """
    weight = weight.float()
    damped = moments + torch.eye(len(moments)) * (DAMPING * moments.diagonal().mean() + 1e-12)
    importance = damped.diagonal().view(-1, group)
    ranges = fit_range(weight.view(len(weight), -1, group), levels, RANGES, importance)
    order = damped.diagonal().argsort(descending=True)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    codes[:, order] = _Feedback(weight, ranges, order, levels, group).codes(_inverse_root(damped[order][:, order]))
    made = GroupQuantizedWeight(codes, ranges.scale, ranges.minimum, levels)
    return Rounded(made, _change(made.dequantize() - weight, weight, moments))


def output_error(codes: GroupQuantizedWeight, weight: Tensor, moments: Tensor) -> float:
    """What `Rounded.error` is, of any codes."""
    return _change(codes.dequantize() - weight.float(), weight.float(), moments)


def _change(delta: Tensor, weight: Tensor, moments: Tensor) -> float:
    energy = ((weight @ moments) * weight).sum()
    return float(((delta @ moments) * delta).sum() / energy) if energy else 0.0


class _Feedback:
    """One pass over the inputs in their order, a block of them at a time."""

    def __init__(self, weight: Tensor, ranges: Range, order: Tensor, levels: int, group: int) -> None:
        self._weight = weight[:, order].clone()
        groups = order // group
        self._scale, self._minimum = ranges.scale.float()[:, groups], ranges.minimum.float()[:, groups]
        self._levels = levels

    def codes(self, root: Tensor) -> Tensor:
        """[O, H] uint8. `root` is the upper Cholesky factor of the inverse moments, in the same order."""
        weight, num_inputs = self._weight, self._weight.shape[1]
        codes = torch.empty(weight.shape, dtype=torch.uint8)
        for start in range(0, num_inputs, _BLOCK):
            stop = min(start + _BLOCK, num_inputs)
            errors = torch.empty((len(weight), stop - start))
            for i in range(start, stop):
                code = ((weight[:, i] - self._minimum[:, i]) / self._scale[:, i]).round_().clamp_(0, self._levels - 1)
                held = code * self._scale[:, i] + self._minimum[:, i]
                error = errors[:, i - start] = (weight[:, i] - held) / root[i, i]
                weight[:, i + 1 : stop] -= torch.outer(error, root[i, i + 1 : stop])
                codes[:, i] = code.to(torch.uint8)
            weight[:, stop:] -= errors @ root[start:stop, stop:]
        return codes


def _inverse_root(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of their inverse."""
    lower, failed = torch.linalg.cholesky_ex(moments)
    if failed or not torch.isfinite(lower).all():
        raise ValueError("the moments of a linear's inputs are not finite: the model computes no numbers")
    root: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return root
