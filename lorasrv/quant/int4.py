"""int4: sixteen levels between a minimum and a maximum for every group. GGUF's Q4_0 and Q4_1 are taken as they are."""

from torch import Tensor

from lorasrv.quant.coded import CodedFormat
from lorasrv.quant.rounding import round_asymmetric
from sgmv_kernels.ops import INT4_LEVELS, GroupCodes


class Int4Format(CodedFormat):
    """`--quantization int4`."""

    name = "int4"
    levels = INT4_LEVELS
    groups = (32, 64, 128)
    default_group = 32

    def round(self, weight: Tensor) -> GroupCodes:
        return round_asymmetric(weight, self.group, INT4_LEVELS)
