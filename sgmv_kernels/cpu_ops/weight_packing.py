"""Layout of weight codes for the CPU kernels: tiles of 16 outputs, each read front to back in one stream.

A tile holds its groups along H one after another: the codes, then 16 scales, then 16 minima or zeros if there are any
(`Factors`).

Codes lie in lines of 64 bytes, four neighbours along H for each of 16 outputs. int8 codes are stored unchanged. Of
codes of 16 levels, the lines of a block's second half share the bytes of its first. Of codes of 11 levels, 64
neighbours are 16 lines; the first eight times 11 plus the last eight are eight lines of 7 bits, and the eighth is
spread over the others' top bits. Shapes: O outputs, H inputs, G groups of a row.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.adapter_panels import CHUNK, CODE_BLOCK, TILE
from sgmv_kernels.formats.group_quant import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, GroupQuantizedWeight

_BYTES_OF_64 = {INT8_LEVELS: 64, INT4_LEVELS: 32, Q3H_LEVELS: 28}
"""Bytes of 64 codes, by their levels."""

_QUAD = 4
_HALF = CODE_BLOCK // 2 // _QUAD
"""Lines of half a block."""
_CHUNK_BYTES = 1 << 19
"""Bytes of codes that are packed at a time."""


class Factors(StrEnum):
    """Name the factors that a tile has for each group. The value is the ending of the kernels' names."""

    # fp16 scales, and minima but for int8 codes.
    MINIMA = ""
    # fp16 scales and zeros.
    ZEROS = "_zeros"
    # fp32 scales and zeros.
    FP32 = "_fp32"

    @classmethod
    def of(cls, weight: GroupQuantizedWeight) -> "Factors":
        """Return the factors that hold those of `weight` exactly."""
        if weight.scales.dtype == torch.float32 or (weight.signed and weight.zeros is not None):
            return cls.FP32
        return cls.MINIMA if weight.zeros is None else cls.ZEROS


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """Packed weights [out_features, in_features], padded to whole tiles: `data` [tiles, G, group bytes] uint8.

    `order`: as `GroupQuantizedWeight` has it.
    """

    data: Tensor
    out_features: int
    in_features: int
    levels: int
    factors: Factors = Factors.MINIMA
    order: Tensor | None = None

    @property
    def group(self) -> int:
        return self.in_features // self.data.shape[1]

    @property
    def code_bytes(self) -> int:
        """Return the bytes of one group's codes in a tile."""
        return TILE * self.group * _BYTES_OF_64[self.levels] // 64

    def unpack(self) -> GroupQuantizedWeight:
        """Return the codes that were packed."""
        lines, factors = self._parts(self.data)
        stored = lines.permute(0, 3, 1, 2, 4).flatten(0, 1)[: self.out_features]
        return self._codes(stored, factors.permute(0, 3, 1, 2).flatten(0, 1)[: self.out_features])

    def rows(self, ids: Tensor) -> GroupQuantizedWeight:
        """Return the codes of some outputs, ids [N] int64, N at least 1."""
        # By numpy: torch would wake all threads for a few microseconds.
        tiles, lanes = np.divmod(ids.numpy(), TILE)
        parts = self._parts(torch.from_numpy(self.data.numpy()[tiles]))
        stored, factors = (torch.from_numpy(part.numpy()[np.arange(len(ids)), :, :, lanes]) for part in parts)
        return self._codes(stored, factors)

    def _parts(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Split [N, G, group bytes] into stored lines [N, G, lines, TILE, 4], and scales with minima or zeros
        [N, G, 1 or 2, TILE].
        """
        lines = _split(data[..., : self.code_bytes], 2, TILE, _QUAD)
        dtype = torch.float32 if self.factors is Factors.FP32 else torch.float16
        return lines, _split(data[..., self.code_bytes :].view(dtype), 2, TILE)

    def _codes(self, stored: Tensor, factors: Tensor) -> GroupQuantizedWeight:
        """Return codes of stored lines [N, G, lines, 4] and factors [N, G, 1 or 2]."""
        codes = _unpack_lines(stored, self.levels).reshape(len(stored), self.in_features)
        scales, second = factors[..., 0].contiguous(), factors[..., 1:].squeeze(-1)
        if self.factors is not Factors.MINIMA:
            return GroupQuantizedWeight(codes, scales, None, self.levels, second.to(torch.int16), self.order)
        minima = None if self.levels == INT8_LEVELS else second.contiguous()
        return GroupQuantizedWeight(codes, scales, minima, self.levels, None, self.order)


def check_codes(weight: GroupQuantizedWeight) -> None:
    """Check that the kernels read groups of this size.

    Raises:
        KernelArgumentError: they do not.
    """
    least = 64 if weight.levels == Q3H_LEVELS else CODE_BLOCK
    if weight.group % least or weight.group > CHUNK:
        raise KernelArgumentError(
            f"groups must be multiples of {least}, at most {CHUNK}, for these kernels, not {weight.group}"
        )


def pack_tiles(weight: GroupQuantizedWeight) -> CodeTiles:
    """Pack codes into tiles.

    Raises:
        KernelArgumentError: as `check_codes`, or the order is none of the inputs.
    """
    check_codes(weight)
    tiles, groups = -(-weight.out_features // TILE), weight.scales.shape[1]
    order = weight.order
    if order is not None and not torch.equal(order.sort().values, torch.arange(weight.in_features, dtype=torch.int32)):
        raise KernelArgumentError("order must have every input once")
    factors = Factors.of(weight)
    stacked = [
        _tiled(held, tiles).view(tiles, TILE, groups).transpose(1, 2).contiguous().view(torch.uint8)
        for held in _factors(weight, factors)
    ]
    code_bytes = TILE * weight.group * _BYTES_OF_64[weight.levels] // 64
    data = torch.empty((tiles, groups, code_bytes + sum(held.shape[-1] for held in stacked)), dtype=torch.uint8)
    data[..., code_bytes:] = torch.cat(stacked, dim=-1)
    # A few tiles at a time, which stay in a cache. Quads change places as int32, ten times as fast as byte by byte.
    step = max(1, _CHUNK_BYTES // (TILE * weight.in_features))
    for first in range(0, tiles, step):
        part = data[first : first + step]
        rows = _tiled(weight.codes[first * TILE : (first + step) * TILE], len(part))
        quads = rows.view(torch.int32).view(len(part), TILE, -1).transpose(1, 2).contiguous()
        lines = quads.view(torch.uint8).view(len(part), groups, -1, TILE, _QUAD)
        part[..., :code_bytes] = _pack_lines(lines, weight.levels).flatten(2)
    return CodeTiles(data, weight.out_features, weight.in_features, weight.levels, factors, order)


def _factors(weight: GroupQuantizedWeight, factors: Factors) -> list[Tensor]:
    """Return what a tile holds behind the codes, each [O, G]."""
    if factors is Factors.MINIMA:
        return [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    scales = weight.scales.float() if factors is Factors.FP32 else weight.scales
    zeros = torch.zeros_like(scales) if weight.zeros is None else weight.zeros.to(scales.dtype)
    return [scales, zeros]


def _split(values: Tensor, dim: int, *last: int) -> Tensor:
    """Reshape one dimension into several; the sizes of all but the first are given."""
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
