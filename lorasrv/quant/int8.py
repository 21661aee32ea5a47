"""int8: symmetric, a scale for every 32 inputs of an output. GGUF's Q8_0 is taken as it is."""

from torch import Tensor

from lorasrv.quant.coded import CodedFormat
from lorasrv.quant.rounding import round_symmetric
from sgmv_kernels.ops import INT8_LEVELS, GroupCodes


class Int8Format(CodedFormat):
    """`--quantization int8`."""

    name = "int8"
    levels = INT8_LEVELS
    groups = (32, 64, 128)
    default_group = 32

    def round(self, weight: Tensor) -> GroupCodes:
        return round_symmetric(weight, self.group)
