"""Round weights with error feedback (GPTQ): weights of later inputs are adjusted for the errors of earlier ones.

The method needs the second moments of a linear's inputs, sums of x x^T over rows that the float model has computed.
Source: GPTQ (Frantar et al. 2023), with large inputs first and the ranges of groups fixed beforehand.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from lorasrv.models.quantization.rounding import MOST_HALF, Range, check_magnitude, fit_range
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

DAMPING = 0.05
"""Share of the mean moment that is added to every input, because a calibration text does not cover all inputs."""
_BLOCK = 64
_PARTS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72)
RANGES = tuple((low, high) for low, high in product(_PARTS, _PARTS) if abs(low - high) < 0.2)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Hold codes, and the relative change of the product that they cause."""

    codes: GroupQuantizedWeight
    error: float


def round_to_outputs(weight: Tensor, moments: Tensor, group: int, levels: int) -> Rounded:
    """Round a weight so that `weight @ x` changes little.

    Args:
        weight: [O, H] floats of any kind.
        moments: [H, H] fp32, the second moments of the inputs.
        group: inputs that share a scale and a minimum.
        levels: number of code values.
    Returns: codes [O, H], and |dW x|^2 / |W x|^2 over the rows that the moments were summed over.
    Raises:
        ValueError: the moments are not finite, or weights are too large for minima in fp16.
    Source: GPTQ (Frantar et al. 2023).
    """
    weight = weight.float()
    check_magnitude(weight, MOST_HALF)
    damped = moments + torch.eye(len(moments)) * (DAMPING * moments.diagonal().mean() + 1e-12)
    importance = damped.diagonal().view(-1, group)
    ranges = fit_range(weight.view(len(weight), -1, group), levels, RANGES, importance)
    order = damped.diagonal().argsort(descending=True)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    codes[:, order] = _Feedback(weight, ranges, order, levels, group).codes(_inverse_root(damped[order][:, order]))
    made = GroupQuantizedWeight(codes, ranges.scale, ranges.minimum, levels)
    return Rounded(made, _change(made.dequantize() - weight, weight, moments))


def output_error(codes: GroupQuantizedWeight, weight: Tensor, moments: Tensor) -> float:
    """Return |dW x|^2 / |W x|^2 of any codes of `weight` [O, H], for inputs with `moments` [H, H]."""
    return _change(codes.dequantize() - weight.float(), weight.float(), moments)


def _change(delta: Tensor, weight: Tensor, moments: Tensor) -> float:
    energy = ((weight @ moments) * weight).sum()
    return float(((delta @ moments) * delta).sum() / energy) if energy else 0.0


class _Feedback:
    """Round the inputs of a weight in order of importance, one block at a time."""

    def __init__(self, weight: Tensor, ranges: Range, order: Tensor, levels: int, group: int) -> None:
        self._weight = weight[:, order].clone()
        groups = order // group
        self._scale, self._minimum = ranges.scale.float()[:, groups], ranges.minimum.float()[:, groups]
        self._levels = levels

    def codes(self, root: Tensor) -> Tensor:
        """Return codes [O, H] uint8; `root` is the upper Cholesky factor of the inverse moments, in the same order."""
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
    """Return the upper Cholesky factor of the inverse of `moments` [H, H]."""
    lower, failed = torch.linalg.cholesky_ex(moments)
    if failed or not torch.isfinite(lower).all():
        raise ValueError(
            "the moments of a linear's inputs are not finite: the model's activations contain NaN or infinity"
        )
    root: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return root
