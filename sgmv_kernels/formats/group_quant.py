"""Quantized weights in the form that every backend accepts: integer codes with factors for each group.

A backend packs them into its own order once, when the model is loaded. Shapes: O outputs, H inputs, G = H / group
groups of a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, STEP_GROUPS

_BY_OUTPUT, _SHARED = ("codes", "scales", "minima", "zeros", "steps"), ("order", "table")
"""Tensors of a weight that have a row for each output, and the other tensors."""
TABLE_VALUES = 16


@dataclass(frozen=True, slots=True)
class GroupQuantizedWeight:
    """Hold a weight [O, H]: weight[o, order[h]] = values[o, h] * scales[o, g] + minima[o, g], g = h // group; or
    (values[o, h] - zeros[o, g]) * scales[o, g]. Values are the codes, or table[codes].

    Args:
        codes: [O, H] uint8 below `levels`; int8 for 256 levels.
        scales: [O, G] fp16 or fp32; int8 with steps.
        minima: [O, G], of the scales' dtype, fp32 or int8 for 256 levels; or None.
        levels: one of the three constants above.
        zeros: [O, G] int16 of at most 2,048, which fp16 represents exactly; or None. Codes of 16 or 11 levels have
            either minima or zeros, or a table and neither.
        order: [H] int32, the input of each column of the codes; None if columns are in the order of inputs.
        table: [16] int8, the values of codes of 16 levels; None if the codes are the values.
        steps: [O, G / 8, 1 or 2] fp16, factors of the scales, and of the minima if there are any, of `STEP_GROUPS`
            groups; None for 1.
    Raises:
        KernelArgumentError: shapes, dtypes or levels that do not fit.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    levels: int
    zeros: Tensor | None = None
    order: Tensor | None = None
    table: Tensor | None = None
    steps: Tensor | None = None

    def __post_init__(self) -> None:
        offsets = [held for held in (self.minima, self.zeros) if held is not None]
        if self.levels not in (INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS):
            raise KernelArgumentError("codes must have 256, 16 or 11 levels")
        fits = not offsets if self.table is not None else len(offsets) == 1 or (self.signed and not offsets)
        if not fits:
            raise KernelArgumentError(
                "codes of 16 or 11 levels must have minima or zeros, of 256 levels at most one of them, with a table "
                "neither"
            )
        if self.codes.dtype != (torch.int8 if self.signed else torch.uint8) or self.codes.dim() != 2:
            raise KernelArgumentError("codes must be [O, H], int8 for 256 levels, uint8 for fewer")
        groups = self.scales.shape[-1]
        if self.scales.shape != (self.out_features, groups) or not groups or self.in_features % groups:
            raise KernelArgumentError("scales must be [O, G], G a divisor of H")
        if any(held.shape != self.scales.shape for held in offsets):
            raise KernelArgumentError("minima and zeros must be like scales")
        self._check_factors()
        if self.order is not None and (self.order.shape != (self.in_features,) or self.order.dtype != torch.int32):
            raise KernelArgumentError("order must be int32 [H]")
        if self.table is not None and (
            self.table.shape != (TABLE_VALUES,) or self.table.dtype != torch.int8 or self.levels != INT4_LEVELS
        ):
            raise KernelArgumentError(f"table must be int8 [{TABLE_VALUES}], for codes of 16 levels")

    def _check_factors(self) -> None:
        kinds = (torch.int8,) if self.steps is not None else (torch.float16, torch.float32)
        is_half = self.signed and self.minima is not None and self.minima.dtype == torch.float16
        if self.scales.dtype not in kinds or is_half:
            raise KernelArgumentError("scales must be float16 or float32, int8 with steps")
        if self.minima is not None and self.minima.dtype != self.scales.dtype:
            raise KernelArgumentError("minima must be of the scales' dtype")
        if self.zeros is not None and self.zeros.dtype != torch.int16:
            raise KernelArgumentError("zeros must be int16")
        if self.steps is None:
            return
        runs, rest = divmod(self.scales.shape[1], STEP_GROUPS)
        shape = (self.out_features, runs, 1 if self.minima is None else 2)
        if rest or self.zeros is not None or self.steps.shape != shape or self.steps.dtype != torch.float16:
            raise KernelArgumentError(f"steps must be float16 [O, G / {STEP_GROUPS}, 1 or 2], without zeros")

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
        held = (self.codes, self.scales, self.minima, self.zeros, self.order, self.table, self.steps)
        return [tensor for tensor in held if tensor is not None]

    def to(self, device: torch.device) -> "GroupQuantizedWeight":
        """Return the same codes on a device."""
        return self._with({name: held.to(device) for name, held in self._held(*_BY_OUTPUT, *_SHARED)})

    def __getitem__(self, rows: Tensor | slice) -> "GroupQuantizedWeight":
        """Return the weight of some outputs."""
        return self._with({name: held[rows] for name, held in self._held(*_BY_OUTPUT)})

    def of_inputs(self, inputs: slice) -> "GroupQuantizedWeight":
        """Return the weight of a span of inputs.

        Raises:
            KernelArgumentError: the span cuts a group or a run of groups that share a step, or columns are not in the
                order of inputs.
        """
        first, end, _ = inputs.indices(self.in_features)
        if (first, end) == (0, self.in_features):
            return self
        unit = self.group if self.steps is None else self.group * STEP_GROUPS
        if self.order is not None:
            raise KernelArgumentError("inputs are in an order of the file's own (desc_act), which cannot be cut")
        if first % unit or end % unit:
            raise KernelArgumentError(f"inputs {first} to {end - 1} are no whole groups of {unit}")
        groups = slice(first // self.group, end // self.group)
        cuts = dict.fromkeys(("scales", "minima", "zeros"), groups)
        cuts |= {"codes": slice(first, end), "steps": slice(first // unit, end // unit)}
        return self._with({name: held[:, cuts[name]].contiguous() for name, held in self._held(*_BY_OUTPUT)})

    def in_groups_of(self, group: int) -> "GroupQuantizedWeight":
        """Return the same weight with smaller groups, by repeating factors. `group` must divide the group size, and the
        weight must have no steps.
        """
        times = self.group // group
        repeated = {name: held.repeat_interleave(times, 1) for name, held in self._held("scales", "minima", "zeros")}
        return self._with(repeated)

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """Return scales and minima [O, G], multiplied by their steps; these products are exact in fp32."""
        if self.steps is None:
            return self.scales, self.minima
        steps = self.steps.float().repeat_interleave(STEP_GROUPS, dim=1)
        minima = None if self.minima is None else self.minima * steps[..., 1]
        return self.scales * steps[..., 0], minima

    def values(self) -> Tensor:
        """Return the values that are multiplied by scales, [O, H] fp32."""
        if self.table is None:
            return self.codes.float()
        return self.table.float().index_select(0, self.codes.reshape(-1).int()).view(self.codes.shape)

    def dequantize(self) -> Tensor:
        """Return the weights, [O, H] fp32."""
        scales, minima = self.factors()
        groups = self.values().view(*self.scales.shape, self.group)
        if self.zeros is not None:
            groups.sub_(self.zeros.float()[..., None])
        groups.mul_(scales.float()[..., None])
        if minima is not None:
            groups.add_(minima.float()[..., None])
        return in_input_order(groups.view(self.codes.shape), self.order)

    def _held(self, *names: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors among these that are not None."""
        return ((name, held) for name in names if (held := getattr(self, name)) is not None)

    def _with(self, changed: Mapping[str, Tensor]) -> "GroupQuantizedWeight":
        return replace(self, **changed)  # type: ignore[arg-type]


def in_input_order(columns: Tensor, order: Tensor | None) -> Tensor:
    """Return a weight [O, H] with columns in the order of inputs; `order` as in `GroupQuantizedWeight`."""
    return columns if order is None else columns[:, order.long().argsort()]


def stack_codes(parts: Sequence[GroupQuantizedWeight]) -> GroupQuantizedWeight | None:
    """Stack codes of weights with the same inputs along their outputs; None if levels, groups, tables, the kind of
    factors or the order of inputs differ.
    """
    first = parts[0]
    if any(
        _kind(part) != _kind(first) or not _same(part.order, first.order) or not _same(part.table, first.table)
        for part in parts
    ):
        return None
    names = [name for name in _BY_OUTPUT if getattr(first, name) is not None]
    stacked = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return replace(first, **stacked)  # type: ignore[arg-type]


def join_codes(parts: Sequence[GroupQuantizedWeight]) -> list[GroupQuantizedWeight]:
    """Stack neighbours that `stack_codes` can stack; return as few weights as possible, in the same order."""

    def joined(done: list[GroupQuantizedWeight], part: GroupQuantizedWeight) -> list[GroupQuantizedWeight]:
        stacked = stack_codes([done[-1], part]) if done else None
        return [*done, part] if stacked is None else [*done[:-1], stacked]

    return reduce(joined, parts, [])


def _kind(part: GroupQuantizedWeight) -> tuple[object, ...]:
    return (part.levels, part.group, part.scales.dtype, *(getattr(part, name) is None for name in _BY_OUTPUT))


def _same(shared: Tensor | None, other: Tensor | None) -> bool:
    if shared is None or other is None:
        return shared is other
    return torch.equal(shared, other)
