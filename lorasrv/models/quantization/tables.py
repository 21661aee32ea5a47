"""Store weights as one of 16 values times the largest magnitude of a group: NF4 and FP4, as in bitsandbytes.

The values are held as a table of bytes, which changes weights by 0.5 % (NF4) or 0.35 % (FP4) relative to exact values.
Source: NF4, QLoRA (Dettmers et al. 2023).
"""

from typing import ClassVar

import torch
from torch import Tensor

from lorasrv.models.quantization.base import Acceptance, StoredWeights
from lorasrv.models.quantization.grouped import GroupQuantFormat
from lorasrv.models.quantization.rounding import table_codes
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS

_SMALLEST = 2.0**-126
"""Smallest normal number of fp32: no group's largest magnitude may become 0."""
_CHUNK = 1 << 20
"""Number of weights that are rounded at a time."""


class TableFormat(GroupQuantFormat):
    """Round floats to the nearest of 16 values; a subclass names them."""

    linear_bits = 4.5
    levels = INT4_LEVELS
    groups = (32, 64, 128)
    default_group = 64
    # Ascending, the largest being 1.
    values: ClassVar[tuple[float, ...]]

    @classmethod
    def accepts(cls, stored: StoredWeights, group: int | None = None) -> Acceptance:
        # This format does not keep codes of the file.
        floats = StoredWeights(stored.spec, None)
        return super().accepts(floats, group)

    def keeps(self, codes: GroupQuantizedWeight) -> bool:
        del codes
        return False

    def round(self, weight: Tensor) -> GroupQuantizedWeight:
        values = torch.tensor(self.values, device=weight.device)
        middles = (values[1:] + values[:-1]) / 2
        groups = weight.float().reshape(-1, self.group)
        largest = groups.abs().amax(dim=-1, keepdim=True).clamp_min_(_SMALLEST)
        codes = torch.empty(groups.shape, dtype=torch.uint8, device=weight.device)
        step = max(1, _CHUNK // self.group)
        for start in range(0, len(groups), step):
            part = slice(start, start + step)
            codes[part] = torch.bucketize(groups[part] / largest[part], middles).to(torch.uint8)
        return table_codes(codes.view(weight.shape), largest.view(len(weight), -1), values)


class Nf4Format(TableFormat):
    """Pack `--quantization nf4`."""

    name = "nf4"
    values = (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )


class Fp4Format(TableFormat):
    """Pack `--quantization fp4`."""

    name = "fp4"
    values = tuple(n / 12 for n in (-12, -8, -6, -4, -3, -2, -0.0625, 0, 0, 0.0625, 2, 3, 4, 6, 8, 12))
