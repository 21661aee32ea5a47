"""No quantization: weights as fp32 or bf16."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lorasrv.quant.format import Embedding, Linear


class FloatLinear:
    """See `Linear`. bf16 weights are widened for each product: sums are fp32, and CPUs without bf16 are faster so."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self.out_features, self.in_features = weight.shape
        own = 0 if shared else weight.nbytes
        self.nbytes = own + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.float(), self._bias)

    def dequantize(self) -> Tensor:
        return self._weight.float()


class FloatEmbedding:
    """See `Embedding`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).float()

    def dequantize(self) -> Tensor:
        return self.weight.float()


class NoneFormat:
    """`--quantization none`."""

    name = "none"

    def linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        return FloatLinear(weight.to(dtype), None if bias is None else bias.float())

    def embedding(self, weight: Tensor, dtype: torch.dtype) -> Embedding:
        return FloatEmbedding(weight.to(dtype))

    def tied_head(self, embedding: Embedding, weight: Tensor, dtype: torch.dtype) -> Linear:
        del weight, dtype
        assert isinstance(embedding, FloatEmbedding)
        return FloatLinear(embedding.weight, None, shared=True)
