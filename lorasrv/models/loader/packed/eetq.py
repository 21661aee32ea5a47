"""Read EETQ checkpoints: 8 bits with a scale for each output, in the order of CUTLASS's kernels for mixed inputs.

Tensors of a module, O outputs, H inputs: qweight (weight, in newer files) [H, O] int8, and weight_scales [O]. The bytes
of the weight [O, H] have gone through four steps: the eight pairs of every 16 inputs are put in the order 0 4 1 5 2 6 3
7; 64 inputs each of two outputs alternate; 128 is added; and the second and the third of every four bytes are swapped.
A weight is (byte - 128) * scale.

Source: the weight preprocessing of FasterTransformer (NVIDIA), for sm75 to sm89, which EETQ uses.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lorasrv.errors import UnsupportedModel
from lorasrv.models.loader.packed.config import QuantizationSettings
from lorasrv.models.loader.packed.stored_tensors import FLOATS, StoredTensors
from lorasrv.models.loader.packed.unpacking import exact_scales, group_codes
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

_TOGETHER, _STRIDE = 2, 64
# The first and the last byte of four.
_ENDS = -0xFFFF01
_SCALES, _WEIGHTS = "weight_scales", ("qweight", "weight")


class EetqModules:
    """Hold the modules of an EETQ checkpoint; see `PackedModules`.

    Raises:
        CorruptModel, UnsupportedModel: as `open_modules`.
    """

    rounding = ""

    def __init__(self, settings: QuantizationSettings, tensors: StoredTensors) -> None:
        del settings
        self._tensors = tensors
        self.bits: Mapping[str, int] = dict.fromkeys(tensors.modules(_SCALES), 8)
        self.held = self.bits

    def shape(self, module: str) -> tuple[int, int]:
        inputs, outputs = self._tensors.shape(self._name(module), 2)
        return outputs, inputs

    def weight(self, module: str) -> Tensor:
        return self.codes(module).dequantize()

    def codes(self, module: str) -> GroupQuantizedWeight:
        outputs, inputs = self.shape(module)
        if outputs % _TOGETHER or inputs % _STRIDE:
            raise UnsupportedModel(f"{module}: EETQ of {outputs} outputs and {inputs} inputs is not supported")
        stored = self._tensors.read(self._name(module), ("I8",), (inputs, outputs))
        name = f"{module}.{_SCALES}"
        scales = exact_scales(name, self._tensors.read(name, FLOATS, (outputs,)))
        words = stored.view(torch.int32)
        straight = words & _ENDS | words >> 8 & 0xFF00 | words << 8 & 0xFF0000
        apart = straight.view(outputs // _TOGETHER, -1, _TOGETHER, _STRIDE // 4).transpose(1, 2)
        pairs = apart.reshape(outputs, inputs // 4).view(torch.int16).view(outputs, -1, 4, 2)
        fields = pairs.transpose(2, 3).contiguous().view(torch.uint8)
        return group_codes(fields.view(outputs, inputs), scales[:, None], None, 8)

    def _name(self, module: str) -> str:
        return next(name for end in _WEIGHTS if (name := f"{module}.{end}") in self._tensors or end == _WEIGHTS[-1])
