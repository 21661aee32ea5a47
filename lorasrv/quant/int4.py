"""int4: sixteen levels between a minimum and a maximum for every group. GGUF's Q4_0 and Q4_1 are taken as they are.

So are 8-bit weights of a file that is 4-bit otherwise: nothing that a file holds is rounded a second time, unless
another group is asked for.
"""

from torch import Tensor

from lorasrv.quant.coded import CodedFormat
from lorasrv.quant.rounding import round_asymmetric
from sgmv_kernels.ops import INT4_LEVELS, INT8_LEVELS, GroupCodes


class Int4Format(CodedFormat):
    """`--quantization int4`."""

    name = "int4"
    groups = (32, 64, 128)
    default_group = 32

    def keeps(self, codes: GroupCodes) -> bool:
        return codes.levels == INT8_LEVELS or (codes.levels == INT4_LEVELS and codes.group == self.group)

    def round(self, weight: Tensor) -> GroupCodes:
        return round_asymmetric(weight, self.group, INT4_LEVELS)
