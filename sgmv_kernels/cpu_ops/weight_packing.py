"""Layout of weight codes for the CPU kernels: tiles of 16 outputs, each read front to back in one stream.

A tile holds its groups along H one after another: the codes, then 16 scales, then 16 minima or zeros if there are any
(`Factors`). Groups that share steps are stored together: the codes of all, then 16 steps of scales and 16 of minima,
then 16 scales and 16 minima of each group.

Codes are stored in lines of 64 bytes, four neighbours along H for each of 16 outputs. int8 codes are unchanged. For
codes of 16 levels, the lines of a block's second half share the bytes of its first half. For codes of 11 levels, 64
neighbours are 16 lines. The first eight lines times 11 plus the last eight give eight lines of 7-bit numbers, of which
the eighth is spread over the top bits of the other seven. Shapes: O outputs, H inputs, G groups of a row.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from sgmv_kernels.cpu_ops.weight_memory import WeightMemory
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import CHUNK, CODE_BLOCK, INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, STEP_GROUPS, TILE

_BYTES_OF_64 = {INT8_LEVELS: 64, INT4_LEVELS: 32, Q3H_LEVELS: 28}
"""Bytes of 64 codes, by their levels."""

_QUAD = 4
_HALF = CODE_BLOCK // 2 // _QUAD
"""Lines of half a block."""
_CHUNK_BYTES = 1 << 19
"""Bytes of codes that are packed at a time."""
_MEMORY = WeightMemory()


class Factors(StrEnum):
    """Name the factors that a tile has for each group. The value is the suffix of the kernels' names."""

    # fp16 scales, and minima except for int8 codes and codes with a table.
    MINIMA = ""
    # fp16 scales and zeros.
    ZEROS = "_zeros"
    # fp32 scales, and zeros except for codes with a table.
    FP32 = "_fp32"
    # fp32 scales and minima.
    FP32_MINIMA = "_minima"
    # fp16 steps; int8 scales, and minima except for codes with a table.
    STEPS = "_steps"

    @classmethod
    def of(cls, weight: GroupQuantizedWeight) -> "Factors":
        """Return the factors that hold those of `weight` exactly."""
        if weight.steps is not None:
            return cls.STEPS
        if weight.scales.dtype == torch.float32 and weight.minima is not None:
            return cls.FP32_MINIMA
        if weight.scales.dtype == torch.float32 or (weight.signed and weight.zeros is not None):
            return cls.FP32
        return cls.MINIMA if weight.zeros is None else cls.ZEROS

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the factors, which follow the codes."""
        return torch.float32 if self in (Factors.FP32, Factors.FP32_MINIMA) else torch.float16


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """Hold packed weights [out_features, in_features], padded to whole tiles: `data` [tiles, S, bytes] uint8, S groups
    of a row, or runs of `STEP_GROUPS` groups that share steps.

    `order`, `table`: as in `GroupQuantizedWeight`.
    """

    data: Tensor
    out_features: int
    in_features: int
    levels: int
    factors: Factors = Factors.MINIMA
    order: Tensor | None = None
    table: Tensor | None = None

    @property
    def group(self) -> int:
        """Return the number of inputs whose codes are stored together."""
        return self.in_features // self.data.shape[1]

    @property
    def code_bytes(self) -> int:
        """Return the bytes of one group's codes in a tile."""
        return TILE * self.group * _BYTES_OF_64[self.levels] // 64

    def unpack(self) -> GroupQuantizedWeight:
        """Return the codes that were packed."""
        lines, *factors = self._parts()
        stored = lines.permute(0, 3, 1, 2, 4).flatten(0, 1)[: self.out_features]
        return self._codes(stored, *(part.permute(0, 3, 1, 2).flatten(0, 1)[: self.out_features] for part in factors))

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Split the data of N tiles into stored lines [N, S, lines, TILE, 4]; floats [N, S, 1 or 2, TILE]; int8 scales,
        then minima, of groups with steps [N, S, 8 or 16 or 0, TILE].
        """
        lines, behind = _split(self.data[..., : self.code_bytes], 2, TILE, _QUAD), self.data[..., self.code_bytes :]
        if self.factors is not Factors.STEPS:
            return lines, _split(behind.view(self.factors.dtype), 2, TILE), _split(behind[..., :0], 2, TILE)
        # A step takes two bytes, and each of the `STEP_GROUPS` numbers that it multiplies one.
        start = behind.shape[-1] // (2 + STEP_GROUPS) * 2
        steps, numbers = behind[..., :start].view(torch.float16), behind[..., start:].view(torch.int8)
        return lines, _split(steps, 2, TILE), _split(numbers, 2, TILE)

    def _codes(self, stored: Tensor, floats: Tensor, numbers: Tensor) -> GroupQuantizedWeight:
        """Return the weight of stored lines [N, S, lines, 4] and the other results of `_parts`, for each output."""
        codes = _unpack_lines(stored, self.levels).reshape(len(stored), self.in_features)
        made = partial(GroupQuantizedWeight, codes, levels=self.levels, order=self.order, table=self.table)
        if self.factors is Factors.STEPS:
            held = numbers.reshape(len(stored), -1, floats.shape[-1])
            minima = held[..., 1].contiguous() if held.shape[-1] > 1 else None
            return made(held[..., 0].contiguous(), minima, steps=floats.contiguous())
        scales, second = floats[..., 0].contiguous(), floats[..., 1:].squeeze(-1)
        if not second.numel():
            return made(scales, None)
        if self.factors in (Factors.MINIMA, Factors.FP32_MINIMA):
            return made(scales, second.contiguous())
        return made(scales, None, zeros=second.to(torch.int16))


def check_codes(weight: GroupQuantizedWeight) -> None:
    """Check that the kernels support groups of this size.

    Raises:
        KernelArgumentError: they do not.
    """
    least = 64 if weight.levels == Q3H_LEVELS else CODE_BLOCK
    if weight.group % least or weight.group > CHUNK:
        raise KernelArgumentError(
            f"groups must be multiples of {least}, at most {CHUNK}, for these kernels, not {weight.group}"
        )
    if weight.steps is not None and weight.group != CODE_BLOCK:
        raise KernelArgumentError(f"groups with steps must be of {CODE_BLOCK}, not {weight.group}")


def pack_tiles(weight: GroupQuantizedWeight) -> CodeTiles:
    """Pack codes into tiles.

    Raises:
        KernelArgumentError: as `check_codes`, or `order` is not a permutation of the inputs.
    """
    check_codes(weight)
    tiles, groups = -(-weight.out_features // TILE), weight.scales.shape[1]
    order = weight.order
    if order is not None and not torch.equal(order.sort().values, torch.arange(weight.in_features, dtype=torch.int32)):
        raise KernelArgumentError("order must have every input once")
    factors = Factors.of(weight)
    together = groups // STEP_GROUPS if factors is Factors.STEPS else groups
    stacked = [
        _tiled(held, tiles).view(tiles, TILE, together, -1).permute(0, 2, 3, 1).contiguous().view(torch.uint8)
        for held in _factors(weight, factors)
    ]
    behind = torch.cat([held.flatten(2) for held in stacked], dim=-1)
    code_bytes = TILE * weight.in_features // together * _BYTES_OF_64[weight.levels] // 64
    tile_shape = together, code_bytes + behind.shape[-1]
    data = _MEMORY.take(tiles * math.prod(tile_shape)).view(tiles, *tile_shape)
    data[..., code_bytes:] = behind
    # A few tiles at a time, which stay in a cache. Moving quads as int32 is ten times as fast as moving bytes.
    step = max(1, _CHUNK_BYTES // (TILE * weight.in_features))
    for first in range(0, tiles, step):
        part = data[first : first + step]
        rows = _tiled(weight.codes[first * TILE : (first + step) * TILE], len(part))
        quads = rows.view(torch.int32).view(len(part), TILE, -1).transpose(1, 2).contiguous()
        lines = quads.view(torch.uint8).view(len(part), together, -1, TILE, _QUAD)
        part[..., :code_bytes] = _pack_lines(lines, weight.levels).flatten(2)
    return CodeTiles(data, weight.out_features, weight.in_features, weight.levels, factors, order, weight.table)


def _factors(weight: GroupQuantizedWeight, factors: Factors) -> list[Tensor]:
    """Return the tensors that follow the codes in a tile, each [O, G] or [O, S, numbers of a run]."""
    scales, minima = weight.scales, weight.minima
    if weight.steps is not None:
        numbers = scales[..., None] if minima is None else torch.stack((scales, minima), dim=-1)
        return [weight.steps, numbers.view(*weight.steps.shape[:2], -1)]
    if minima is not None:
        return [scales, minima]
    if factors is Factors.MINIMA or weight.table is not None:
        return [scales]
    scales = scales.to(factors.dtype)
    return [scales, torch.zeros_like(scales) if weight.zeros is None else weight.zeros.to(scales.dtype)]


def _split(values: Tensor, dim: int, *last: int) -> Tensor:
    """Reshape one dimension into several; `last` has the sizes of all except the first."""
    return values.view(*values.shape[:dim], values.shape[dim] // math.prod(last), *last, *values.shape[dim + 1 :])


def _tiled(values: Tensor, tiles: int) -> Tensor:
    """Pad [O, ...] with rows of zeros to whole tiles."""
    missing = tiles * TILE - len(values)
    return values.contiguous() if not missing else torch.cat((values, values.new_zeros(missing, *values.shape[1:])))


def _pack_lines(lines: Tensor, levels: int) -> Tensor:
    """Pack codes [tiles, G, lines, TILE, 4] uint8 into fewer lines."""
    if levels == INT8_LEVELS:
        return lines
    if levels == INT4_LEVELS:
        first, second = _split(lines, 2, 2, _HALF).unbind(3)
        return (first | second << 4).flatten(2, 3)
    first, second = _split(lines, 2, 2, 8).unbind(3)
    pairs = first * Q3H_LEVELS + second
    spread = torch.stack([(pairs[:, :, :, 7] >> i & 1) << 7 for i in range(7)], dim=3)
    return (pairs[:, :, :, :7] | spread).flatten(2, 3)


def _unpack_lines(lines: Tensor, levels: int) -> Tensor:
    """Unpack stored lines [N, G, stored lines, 4] into codes [N, G, lines, 4]."""
    if levels == INT8_LEVELS:
        return lines.contiguous().view(torch.int8)
    if levels == INT4_LEVELS:
        halves = _split(lines, 2, _HALF)
        return torch.stack((halves & 15, halves >> 4), dim=3).flatten(2, 4)
    stored = _split(lines, 2, 7)
    last = torch.stack([(stored[:, :, :, i] >> 7) << i for i in range(7)]).sum(0, dtype=torch.uint8)
    pairs = torch.cat((stored & 0x7F, last[:, :, :, None]), dim=3)
    return torch.stack((pairs // Q3H_LEVELS, pairs % Q3H_LEVELS), dim=3).flatten(2, 4)
