"""q3h: eleven levels for every group of 64, two weights in seven bits, with an fp16 scale and minimum: 4 bits a weight.

Source: Q3H of Inferflow (Shi et al. 2024), between 3 and 4 bits in size and quality.
"""

from torch import Tensor

from lorasrv.quant.coded import CodedFormat
from lorasrv.quant.rounding import round_asymmetric
from sgmv_kernels.ops import Q3H_LEVELS, GroupCodes


class Q3hFormat(CodedFormat):
    """`--quantization q3h`."""

    name = "q3h"
    levels = Q3H_LEVELS
    groups = (64, 128)
    default_group = 64

    def round(self, weight: Tensor) -> GroupCodes:
        return round_asymmetric(weight, self.group, Q3H_LEVELS)
