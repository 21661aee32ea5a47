"""Store weights as fp8: e4m3 with a scale per output; activations are rounded, too, each row by its own maximum.

For GPUs that multiply e4m3 (sm89 and later). Embeddings, and weights with a width that is not a multiple of 16, stay
floats.
"""

from typing import Self

import torch
from torch import Tensor

from lorasrv.errors import UnsupportedFormat
from lorasrv.models.quantization.base import Acceptance, Embedding, Fit, Linear, QuantFormat, StoredWeights
from lorasrv.models.quantization.unquantized import FloatEmbedding, FloatLinear
from sgmv_kernels.formats.fp8 import WIDTH_STEP, fp8_linear, multiplies_fp8, quantize_fp8
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.ops import Ops


class Fp8Linear:
    """Multiply by e4m3 values [O, H] with fp32 scales [O, 1]; see `Linear`."""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._values, self._scales, self._bias = values, scales, bias
        self.out_features, self.in_features = values.shape
        self.can_be_recorded = False
        self.nbytes = values.nbytes + scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self._values, self._scales, self._bias)

    def dequantize(self) -> Tensor:
        return self._values.float() * self._scales

    def rows(self, ids: Tensor) -> Tensor:
        return self._values.view(torch.uint8)[ids].view(self._values.dtype).float() * self._scales[ids]


class Fp8Format(QuantFormat):
    """Pack `--quantization fp8`. A tied head is quantized beside the embedding.

    Packing raises `UnsupportedFormat` for weights on a device that does not multiply e4m3.
    """

    name = "fp8"
    linear_bits = 8.0

    @classmethod
    def accepts(cls, stored: StoredWeights, group: int | None = None) -> Acceptance:
        del stored, group
        return Acceptance(Fit.ON_REQUEST, "weights are rounded to e4m3")

    @classmethod
    def make(cls, ops: Ops, group: int | None, *, keep_int8_codes: bool) -> Self:
        del ops, group, keep_int8_codes
        return cls()

    def linear(self, weight: Tensor | GroupQuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        assert isinstance(weight, Tensor)
        _check(weight.device)
        kept = None if bias is None else bias.float()
        if weight.shape[0] % WIDTH_STEP or weight.shape[1] % WIDTH_STEP:
            return FloatLinear(weight.to(dtype), kept)
        return Fp8Linear(*quantize_fp8(weight), kept)

    def embedding(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Embedding:
        assert isinstance(weight, Tensor)
        _check(weight.device)
        return FloatEmbedding(weight.to(dtype))

    def tied_head(self, embedding: Embedding, dtype: torch.dtype) -> Linear:
        assert isinstance(embedding, FloatEmbedding)
        return self.linear(embedding.weight, None, dtype)


def _check(device: torch.device) -> None:
    if multiplies_fp8(device):
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"device {device.type!r}"
    raise UnsupportedFormat(
        f"--quantization fp8 needs a GPU with e4m3 products (sm89 or later), and {name} has none; "
        "choose int8 or none, or --device cuda on a machine with such a GPU"
    )
