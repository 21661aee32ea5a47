"""Define the form of quantized weights that every backend takes: integer codes, with a scale and a minimum per group.

A backend packs them into its own order once, when the model is loaded. Shapes: O outputs, H inputs, G groups of a row,
H / group of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgmv_kernels.errors import KernelArgumentError

INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS = 256, 16, 11
"""Number of values of a code. 11 levels take 3.46 bits: two codes fit into seven."""


@dataclass(frozen=True, slots=True)
class GroupQuantizedWeight:
    """Hold a weight [O, H]: weight[o, h] = codes[o, h] * scales[o, h // group] + minima[o, h // group].

    Args:
        codes: [O, H] uint8 below `levels`; int8 for 256 levels.
        scales: [O, G] fp16.
        minima: [O, G] fp16; None for 0, which int8 codes must have.
        levels: one of the three constants above.
    Raises:
        KernelArgumentError: shapes, dtypes or levels that do not fit.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    levels: int

    def __post_init__(self) -> None:
        if self.levels not in (INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS) or self.signed != (self.minima is None):
            raise KernelArgumentError("codes must have 16 or 11 levels and minima, or 256 levels and none")
        if self.codes.dtype != (torch.int8 if self.signed else torch.uint8) or self.codes.dim() != 2:
            raise KernelArgumentError("codes must be [O, H], int8 for 256 levels, uint8 for fewer")
        groups = self.scales.shape[-1]
        if self.scales.shape != (self.out_features, groups) or not groups or self.in_features % groups:
            raise KernelArgumentError("scales must be [O, G], G a divisor of H")
        if self.minima is not None and self.minima.shape != self.scales.shape:
            raise KernelArgumentError("minima must be like scales")
        if any(t.dtype != torch.float16 for t in (self.scales, self.minima) if t is not None):
            raise KernelArgumentError("scales and minima must be float16")

    @property
    def signed(self) -> bool:
        return self.levels == INT8_LEVELS

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def group(self) -> int:
        return self.in_features // self.scales.shape[1]

    def __getitem__(self, rows: Tensor | slice) -> "GroupQuantizedWeight":
        """Return the codes of some outputs."""
        minima = None if self.minima is None else self.minima[rows]
        return GroupQuantizedWeight(self.codes[rows], self.scales[rows], minima, self.levels)

    def dequantize(self) -> Tensor:
        """Return the weights, [O, H] fp32."""
        groups = self.codes.reshape(*self.scales.shape, self.group).float().mul_(self.scales.float()[..., None])
        if self.minima is not None:
            groups.add_(self.minima.float()[..., None])
        return groups.view(self.codes.shape)


def stack_codes(parts: Sequence[GroupQuantizedWeight]) -> GroupQuantizedWeight | None:
    """Stack codes of weights with the same inputs along their outputs; None if levels or groups differ."""
    first = parts[0]
    if any((part.levels, part.group) != (first.levels, first.group) for part in parts):
        return None
    minima = None if first.signed else torch.cat([part.minima for part in parts if part.minima is not None])
    return GroupQuantizedWeight(
        torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]), minima, first.levels
    )
