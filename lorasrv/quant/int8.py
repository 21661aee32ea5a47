"""int8: symmetric, one scale per output channel, or per token of the embedding."""

import torch
from torch import Tensor

from lorasrv.quant.format import Embedding, Linear
from sgmv_kernels.linear_torch import INT8_MAX, Int8Weight, int8_linear, pack_int8, unpack_int8

_CHUNK_BYTES = 4 << 20
"""Rows are rounded in chunks of this size: the temporaries stay in cache, and never double a large tensor."""


class Int8Linear:
    """See `Linear`."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        y = int8_linear(x, self._weight)
        return y if self._bias is None else y.add_(self._bias)

    def dequantize(self) -> Tensor:
        return unpack_int8(self._weight)


class Int8Embedding:
    """See `Embedding`."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self.values = values
        self.scales = scales
        self.nbytes = values.nbytes + scales.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return self.values[ids].float().mul_(self.scales[ids, None])

    def dequantize(self) -> Tensor:
        return self.values.float().mul_(self.scales[:, None])


class Int8Format:
    """`--quantization int8`. A tied head rounds to the embedding's own values, in a second, packed copy."""

    name = "int8"

    def linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        del dtype
        return Int8Linear(pack_int8(*quantize_rows(weight)), None if bias is None else bias.float())

    def embedding(self, weight: Tensor, dtype: torch.dtype) -> Embedding:
        del dtype
        return Int8Embedding(*quantize_rows(weight))

    def tied_head(self, embedding: Embedding) -> Linear:
        assert isinstance(embedding, Int8Embedding)
        return Int8Linear(pack_int8(embedding.values, embedding.scales), None)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, H] floats -> (values [O, H] int8, scales [O] fp32); scale = max |row| / 127, 1 for a row of zeros."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    rows = max(1, _CHUNK_BYTES // (4 * weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        chunk = weight[start : start + rows].float()
        scale = chunk.abs().amax(dim=1) / INT8_MAX
        scale[scale == 0] = 1.0
        scales[start : start + rows] = scale
        values[start : start + rows] = (chunk / scale[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return values, scales
