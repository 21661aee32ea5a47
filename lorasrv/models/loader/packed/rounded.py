"""Round a file's weights to 8 bits, for formats whose values no codes represent exactly."""

from torch import Tensor

from lorasrv.errors import UnsupportedModel
from lorasrv.models.loader.checkpoint import check_finite
from lorasrv.models.quantization.rounding import round_symmetric
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

GROUP = 32
ROUNDED = "stored in 8 bits, with a scale for every 32 inputs, which changes weights by about 0.6 % (rms)"
"""Description of this rounding. Normally distributed numbers change by 0.55 to 0.65 % in groups of 32."""


def round_to_bytes(name: str, weight: Tensor) -> GroupQuantizedWeight:
    """Round a weight [O, H] to 8 bits.

    Raises:
        UnsupportedModel: groups do not divide its inputs.
        CorruptModel: a weight is NaN or infinite.
    """
    check_finite(f"tensor {name!r:.80}", weight)
    if weight.shape[1] % GROUP:
        raise UnsupportedModel(f"{name}: groups of {GROUP} do not divide its {weight.shape[1]} inputs")
    return round_symmetric(weight, GROUP)
