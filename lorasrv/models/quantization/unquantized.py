"""Store weights without quantization, as fp32 or bf16."""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lorasrv.models.quantization.base import Acceptance, Embedding, Fit, Linear, QuantFormat, StoredWeights
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.ops import Ops


class FloatLinear:
    """Multiply by floats [O, H]; see `Linear`.

    Each product converts the weights to the dtype of the activations. On a CPU that widens bf16 to fp32: sums are fp32,
    and CPUs without bf16 arithmetic are faster this way.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self.out_features, self.in_features = weight.shape
        own = 0 if shared else weight.nbytes
        self.nbytes = own + (0 if bias is None else bias.nbytes)
        self.can_be_recorded = False

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.to(x.dtype), None if self._bias is None else self._bias.to(x.dtype))

    def dequantize(self) -> Tensor:
        return self._weight.float()

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight[ids].float()


class FloatEmbedding:
    """Look up rows of floats [V, H]; see `Embedding`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes
        self.can_be_recorded = False

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).float()

    def dequantize(self) -> Tensor:
        return self.weight.float()


class NoneFormat(QuantFormat):
    """Pack `--quantization none`."""

    name = "none"

    @classmethod
    def accepts(cls, stored: StoredWeights, group: int | None = None) -> Acceptance:
        del stored, group
        return Acceptance(Fit.FLOATS, "weights stay floats")

    @classmethod
    def make(cls, ops: Ops, group: int | None, *, keep_int8_codes: bool) -> Self:
        del ops, group, keep_int8_codes
        return cls()

    def linear(self, weight: Tensor | GroupQuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        assert isinstance(weight, Tensor)
        return FloatLinear(weight.to(dtype), None if bias is None else bias.float())

    def embedding(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Embedding:
        assert isinstance(weight, Tensor)
        return FloatEmbedding(weight.to(dtype))

    def tied_head(self, embedding: Embedding, dtype: torch.dtype) -> Linear:
        del dtype
        assert isinstance(embedding, FloatEmbedding)
        return FloatLinear(embedding.weight, None, shared=True)
