"""Hold weights whose codes choose from 16 values as codes into a table of int8."""

from functools import cache

import torch
from torch import Tensor

from sgmv_kernels.ops import INT4_LEVELS, GroupQuantizedWeight

_MOST = 127
_SCALES = tuple(64 + i / 20 for i in range((_MOST - 64) * 20 + 1))
"""What the largest value may become in the table."""


def table_codes(codes: Tensor, largest: Tensor, values: Tensor) -> GroupQuantizedWeight:
    """Return codes into a table near to some values.

    Args:
        codes: [O, H] uint8 below 16.
        largest: [O, G] fp32, what the values of each group are multiplied with.
        values: [16] fp32, not all 0.
    """
    entries, unit = byte_table(tuple(values.tolist()))
    table = torch.tensor(entries, dtype=torch.int8)
    return GroupQuantizedWeight(codes, largest * unit, None, INT4_LEVELS, table=table)


@cache
def byte_table(values: tuple[float, ...]) -> tuple[tuple[int, ...], float]:
    """Return whole numbers of at most 127, and the unit by which they are nearest to values (least squares)."""
    exact = torch.tensor(values, dtype=torch.float64)
    most = float(exact.abs().max())

    def entries(scale: float) -> Tensor:
        return (exact * (scale / most)).round()

    best = min(_SCALES, key=lambda scale: float((entries(scale) * (most / scale) - exact).square().sum()))
    return tuple(int(entry) for entry in entries(best)), most / best
