"""Linears over weight codes in plain torch, on any device; activations are not rounded."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

_CHUNK_BYTES = 8 << 20
"""Bytes of the pieces in which weights are dequantized."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Hold codes that are dequantized for each product; see `backend.PackedLinear`."""

    codes: GroupQuantizedWeight
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.codes.in_features

    @property
    def out_features(self) -> int:
        return self.codes.out_features

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def dequantize(self) -> Tensor:
        return self.codes.dequantize()

    def rows(self, ids: Tensor) -> Tensor:
        return self.codes[ids].dequantize()


def linear_torch(x: Tensor, packed: PlainLinear) -> Tensor:
    """See `ops.Ops.linear`."""
    y = x.new_empty((len(x), packed.out_features))
    rows = max(1, _CHUNK_BYTES // (4 * packed.in_features))
    for start in range(0, packed.out_features, rows):
        chunk = slice(start, start + rows)
        bias = None if packed.bias is None else packed.bias[chunk].to(x.dtype)
        y[:, chunk] = F.linear(x, packed.codes[chunk].dequantize().to(x.dtype), bias)
    return y


def take_rows_torch(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """See `ops.Ops.take_rows`."""
    return torch.index_select(x, 0, rows, out=out)
