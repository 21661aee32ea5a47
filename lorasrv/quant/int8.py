"""int8: symmetric, one scale per output channel of the rotated weight, or per token of the embedding.

Why rotated: `sgmv_kernels.linear_torch`.
"""

import torch
from torch import Tensor

from lorasrv.quant.format import Embedding, Linear
from sgmv_kernels.linear_torch import (
    INT8_MAX,
    Int8Weight,
    Rotation,
    int8_linear,
    pack_int8,
    rotate,
    rotation,
    unpack_int8,
    unrotate,
)

_CHUNK_BYTES = 4 << 20
"""Rows are rounded in chunks of this size: the temporaries stay in cache, and never double a large tensor."""


class Int8Linear:
    """See `Linear`."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None, rotation: Rotation) -> None:
        self._weight = weight
        self._bias = bias
        self._rotation = rotation
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        y = int8_linear(rotate(x, self._rotation), self._weight)
        return y if self._bias is None else y.add_(self._bias)

    def dequantize(self) -> Tensor:
        return unrotate(unpack_int8(self._weight), self._rotation)


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
    """`--quantization int8`. A tied head is packed beside the embedding, as it is rotated and the embedding is not."""

    name = "int8"

    def linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        del dtype
        turn = rotation(weight.shape[1], weight.device)
        packed = pack_int8(*quantize_rows(weight, turn))
        return Int8Linear(packed, None if bias is None else bias.float(), turn)

    def embedding(self, weight: Tensor, dtype: torch.dtype) -> Embedding:
        del dtype
        return Int8Embedding(*quantize_rows(weight))

    def tied_head(self, embedding: Embedding, weight: Tensor, dtype: torch.dtype) -> Linear:
        del embedding
        return self.linear(weight, None, dtype)


def quantize_rows(weight: Tensor, turn: Rotation | None = None) -> tuple[Tensor, Tensor]:
    """weight [O, H] floats -> (values [O, H] int8, scales [O] fp32); scale = max |row| / 127, 1 for a row of zeros."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    rows = max(1, _CHUNK_BYTES // (4 * weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        chunk = weight[start : start + rows].float()
        if turn is not None:
            chunk = rotate(chunk, turn)
        scale = chunk.abs().amax(dim=1) / INT8_MAX
        scale[scale == 0] = 1.0
        scales[start : start + rows] = scale
        values[start : start + rows] = (chunk / scale[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return values, scales
