"""Define the form of quantized weights that every backend takes: integer codes, with factors per group.

A backend packs them into its own order once, when the model is loaded. Shapes: O outputs, H inputs, G groups of a row,
H / group of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from sgmv_kernels.errors import KernelArgumentError

INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS = 256, 16, 11
"""Number of values of a code. 11 levels take 3.46 bits: two codes fit into seven."""


@dataclass(frozen=True, slots=True)
class GroupQuantizedWeight:
    """Hold a weight [O, H]: weight[o, order[h]] = codes[o, h] * scales[o, g] + minima[o, g], g = h // group; or
    (codes[o, h] - zeros[o, g]) * scales[o, g].

    Args:
        codes: [O, H] uint8 below `levels`; int8 for 256 levels.
        scales: [O, G] fp16, or fp32 without minima.
        minima: [O, G] fp16, or None. Codes of 16 or 11 levels have either minima or zeros, int8 codes no minima.
        levels: one of the three constants above.
        zeros: [O, G] int16, of at most 2,048, which fp16 holds exactly; None for 0 where there are no minima.
        order: [H] int32, the input that each column of the codes is multiplied with; None for the columns' own order.
    Raises:
        KernelArgumentError: shapes, dtypes or levels that do not fit.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    levels: int
    zeros: Tensor | None = None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        offsets = [held for held in (self.minima, self.zeros) if held is not None]
        fits = self.minima is None if self.signed else len(offsets) == 1
        if self.levels not in (INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS) or not fits:
            raise KernelArgumentError(
                "codes must have 16 or 11 levels and minima or zeros, or 256 levels and no minima"
            )
        if self.codes.dtype != (torch.int8 if self.signed else torch.uint8) or self.codes.dim() != 2:
            raise KernelArgumentError("codes must be [O, H], int8 for 256 levels, uint8 for fewer")
        groups = self.scales.shape[-1]
        if self.scales.shape != (self.out_features, groups) or not groups or self.in_features % groups:
            raise KernelArgumentError("scales must be [O, G], G a divisor of H")
        if any(held.shape != self.scales.shape for held in offsets):
            raise KernelArgumentError("minima and zeros must be like scales")
        halves = [self.scales] if self.minima is None else [self.scales, self.minima]
        is_fp32 = self.minima is None and self.scales.dtype == torch.float32
        if not is_fp32 and any(held.dtype != torch.float16 for held in halves):
            raise KernelArgumentError("scales and minima must be float16, or scales without minima float32")
        if self.zeros is not None and self.zeros.dtype != torch.int16:
            raise KernelArgumentError("zeros must be int16")
        if self.order is not None and (self.order.shape != (self.in_features,) or self.order.dtype != torch.int32):
            raise KernelArgumentError("order must be int32 [H]")

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

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the weight consists of."""
        held = (self.codes, self.scales, self.minima, self.zeros, self.order)
        return [tensor for tensor in held if tensor is not None]

    def to(self, device: torch.device) -> "GroupQuantizedWeight":
        """Return the same codes on a device."""
        moved = [None if t is None else t.to(device) for t in (self.minima, self.zeros, self.order)]
        return GroupQuantizedWeight(
            self.codes.to(device), self.scales.to(device), moved[0], self.levels, moved[1], moved[2]
        )

    def __getitem__(self, rows: Tensor | slice) -> "GroupQuantizedWeight":
        """Return the codes of some outputs."""
        minima = None if self.minima is None else self.minima[rows]
        zeros = None if self.zeros is None else self.zeros[rows]
        return GroupQuantizedWeight(self.codes[rows], self.scales[rows], minima, self.levels, zeros, self.order)

    def in_groups_of(self, group: int) -> "GroupQuantizedWeight":
        """Return the same weight in smaller groups, whose size divides that of these: factors are repeated."""
        times = self.group // group
        repeated = [
            None if held is None else held.repeat_interleave(times, dim=1)
            for held in (self.scales, self.minima, self.zeros)
        ]
        assert repeated[0] is not None
        return replace(self, scales=repeated[0], minima=repeated[1], zeros=repeated[2])

    def dequantize(self) -> Tensor:
        """Return the weights, [O, H] fp32."""
        groups = self.codes.reshape(*self.scales.shape, self.group).float()
        if self.zeros is not None:
            groups.sub_(self.zeros.float()[..., None])
        groups.mul_(self.scales.float()[..., None])
        if self.minima is not None:
            groups.add_(self.minima.float()[..., None])
        return in_input_order(groups.view(self.codes.shape), self.order)


def in_input_order(columns: Tensor, order: Tensor | None) -> Tensor:
    """Return a weight [O, H] with the column of every input in its place; `order` as `GroupQuantizedWeight` has it."""
    return columns if order is None else columns[:, order.long().argsort()]


def stack_codes(parts: Sequence[GroupQuantizedWeight]) -> GroupQuantizedWeight | None:
    """Stack codes of weights with the same inputs along their outputs; None if levels, groups, the kind of factors or
    the order of inputs differ.
    """
    first = parts[0]
    if any(_kind(part) != _kind(first) or not _same(part.order, first.order) for part in parts):
        return None
    minima = None if first.minima is None else torch.cat([part.minima for part in parts if part.minima is not None])
    zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return GroupQuantizedWeight(codes, scales, minima, first.levels, zeros, first.order)


def join_codes(parts: Sequence[GroupQuantizedWeight]) -> list[GroupQuantizedWeight]:
    """Stack neighbours that fit each other; return as few weights as there can be, in the same order."""

    def joined(done: list[GroupQuantizedWeight], part: GroupQuantizedWeight) -> list[GroupQuantizedWeight]:
        stacked = stack_codes([done[-1], part]) if done else None
        return [*done, part] if stacked is None else [*done[:-1], stacked]

    return reduce(joined, parts, [])


def _kind(part: GroupQuantizedWeight) -> tuple[object, ...]:
    return part.levels, part.group, part.scales.dtype, part.minima is None, part.zeros is None


def _same(order: Tensor | None, other: Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)
