"""Round weights to codes, group by group.

Rows are rounded in chunks, so that temporaries stay small beside a large tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lorasrv.errors import UnsupportedFormat
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS

_CHUNK_BYTES = 4 << 20
_MAX_INT8 = 127
_TABLE_SCALES = tuple(64 + i / 20 for i in range((_MAX_INT8 - 64) * 20 + 1))
"""Candidates for the largest of 16 values in a table of int8."""
MOST_HALF = 65_504.0
"""Largest number of fp16."""
_SMALLEST = 2.0**-24
"""Smallest positive number of fp16: no scale may become 0."""
_SYMMETRIC = tuple((part, part) for part in (1.0, 0.96, 0.92, 0.88, 0.84))
"""Shares of a group's range that are tried: clipping the ends may cost less than coarser steps for all weights."""


def check_group(weight: Tensor, group: int, option: str) -> None:
    """Check that rows of `weight` [O, H] divide into groups.

    Raises:
        UnsupportedFormat: they do not; the message begins with `option`.
    """
    if weight.shape[1] % group:
        raise UnsupportedFormat(f"{option}: {indivisible_reason(weight.shape[1], group)}")


def check_magnitude(weight: Tensor, most: float) -> None:
    """Check that no weight exceeds the range of a format's factors.

    Raises:
        UnsupportedFormat: one does.
    """
    low, high = torch.stack(weight.aminmax()).tolist()
    if not (-most <= low and high <= most):
        raise UnsupportedFormat(
            f"weights up to {max(-low, high):.3g} are more than factors in fp16 reach ({most:.3g}); "
            "choose --quantization none"
        )


def indivisible_reason(inputs: int, group: int) -> str:
    """Return the reason and the fix for a linear whose inputs are not a whole number of groups."""
    return (
        f"groups of {group} do not divide the {inputs} inputs of a linear; "
        "choose another --quantization-group, or --quantization none"
    )


def round_symmetric(weight: Tensor, group: int) -> GroupQuantizedWeight:
    """Round weight [O, H] floats to int8 codes with one fp16 scale per group: the group's largest magnitude / 127.

    Raises:
        UnsupportedFormat: weights that are too large for such scales.
    """
    check_magnitude(weight, MOST_HALF * _MAX_INT8)

    def rounded(groups: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        scale = (groups.abs().amax(dim=-1) / _MAX_INT8).clamp_min_(_SMALLEST).half()
        codes = (groups / scale.float()[..., None]).round_().clamp_(-_MAX_INT8, _MAX_INT8)
        return codes, scale, None

    return _by_chunks(weight, group, INT8_LEVELS, rounded)


@dataclass(frozen=True, slots=True)
class Range:
    """Hold the step and the smallest weight of each group, fp16."""

    scale: Tensor
    minimum: Tensor

    def codes(self, groups: Tensor, levels: int) -> Tensor:
        """Return the nearest code of each weight as a float, for groups [..., group]."""
        at, by = self.minimum.float()[..., None], self.scale.float()[..., None]
        return ((groups - at) / by).round_().clamp_(0, levels - 1)


def fit_range(
    groups: Tensor, levels: int, parts: Sequence[tuple[float, float]] = _SYMMETRIC, importance: Tensor | None = None
) -> Range:
    """Return, for each group, the range with the least squared rounding error out of a few candidates.

    Args:
        groups: [..., group] fp32.
        levels: number of code values.
        parts: candidates, as the shares of the half-range that are kept below and above the middle.
        importance: weight of each squared error, of the shape of the last dimensions of `groups`; None for 1.
    Returns: scales and minima [...].
    """
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    middle = (low + high) / 2
    best = torch.full_like(low, torch.inf)
    scale, minimum = low.half(), low.half()
    for down, up in parts:
        tried_minimum = (middle + (low - middle) * down).half()
        top = middle + (high - middle) * up
        tried_scale = ((top - tried_minimum.float()) / (levels - 1)).clamp_min_(_SMALLEST).half()
        tried = Range(tried_scale, tried_minimum)
        held = tried.codes(groups, levels) * tried_scale.float()[..., None] + tried_minimum.float()[..., None]
        error = held.sub_(groups).square_()
        total = (error if importance is None else error.mul_(importance)).sum(dim=-1)
        better = total < best
        best = torch.where(better, total, best)
        scale, minimum = torch.where(better, tried_scale, scale), torch.where(better, tried_minimum, minimum)
    return Range(scale, minimum)


def round_asymmetric(weight: Tensor, group: int, levels: int) -> GroupQuantizedWeight:
    """Round weight [O, H] floats to codes below `levels`, with a scale and a minimum for each group.

    Raises:
        UnsupportedFormat: weights that are too large for such minima.
    """
    check_magnitude(weight, MOST_HALF)

    def rounded(groups: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        fitted = fit_range(groups, levels)
        return fitted.codes(groups, levels), fitted.scale, fitted.minimum

    return _by_chunks(weight, group, levels, rounded)


def _by_chunks(weight: Tensor, group: int, levels: int, rounded) -> GroupQuantizedWeight:  # type: ignore[no-untyped-def]
    out, inputs = weight.shape
    symmetric = levels == INT8_LEVELS
    codes = torch.empty((out, inputs), dtype=torch.int8 if symmetric else torch.uint8, device=weight.device)
    scales = torch.empty((out, inputs // group), dtype=torch.float16, device=weight.device)
    minima = None if symmetric else torch.empty_like(scales)
    rows = max(1, _CHUNK_BYTES // (4 * inputs))
    for start in range(0, out, rows):
        chunk = slice(start, start + rows)
        some, scale, minimum = rounded(weight[chunk].float().view(-1, inputs // group, group))
        codes[chunk], scales[chunk] = some.view(-1, inputs), scale
        if minima is not None:
            minima[chunk] = minimum
    return GroupQuantizedWeight(codes, scales, minima, levels)


def table_codes(codes: Tensor, largest: Tensor, values: Tensor) -> GroupQuantizedWeight:
    """Return codes into a table that approximates some values.

    Args:
        codes: [O, H] uint8 below 16.
        largest: [O, G] fp32, the factor of the values of each group.
        values: [16] fp32, not all 0.
    """
    entries, unit = byte_table(tuple(values.tolist()))
    table = torch.tensor(entries, dtype=torch.int8, device=codes.device)
    return GroupQuantizedWeight(codes, largest * unit, None, INT4_LEVELS, table=table)


@cache
def byte_table(values: tuple[float, ...]) -> tuple[tuple[int, ...], float]:
    """Return whole numbers of at most 127, and the unit with which they approximate the values best (least squares)."""
    exact = torch.tensor(values, dtype=torch.float64)
    most = float(exact.abs().max())

    def entries(scale: float) -> Tensor:
        return (exact * (scale / most)).round()

    best = min(_TABLE_SCALES, key=lambda scale: float((entries(scale) * (most / scale) - exact).square().sum()))
    return tuple(int(entry) for entry in entries(best)), most / best
