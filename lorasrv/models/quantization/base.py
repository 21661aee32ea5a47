"""What a weight format must offer. T rows, H in, O out, V vocabulary; activations are fp32 on the CPU."""

from typing import Protocol

import torch
from torch import Tensor

from sgmv_kernels.ops import GroupQuantizedWeight


class Linear(Protocol):
    """A stored [O, H] weight, with its bias if it has one."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes held by this linear, those that it shares with an embedding not counted."""
        ...

    @property
    def can_be_recorded(self) -> bool:
        """Whether calls are launches of our kernels, and nothing else."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> a new [T, O]."""
        ...

    def dequantize(self) -> Tensor:
        """[O, H] fp32: exactly the weights that the arithmetic uses."""
        ...


class Embedding(Protocol):
    """A stored [V, H] table."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, H] fp32."""
        ...

    def dequantize(self) -> Tensor:
        """[V, H] fp32."""
        ...


class QuantFormat(Protocol):
    """Packs weights tensor by tensor while the model loads. `dtype` matters only to formats that keep floats."""

    @property
    def name(self) -> str: ...

    def keeps(self, codes: GroupQuantizedWeight) -> bool:
        """Whether weights that a file holds as such codes are taken as they are, without being rounded again."""
        ...

    def linear(self, weight: Tensor | GroupQuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """weight [O, H], bias [O], floats of any kind, or codes that the format keeps; no needless reference stays."""
        ...

    def embedding(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Embedding:
        """weight [V, H], floats of any kind, or codes of 256 levels."""
        ...

    def head(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Linear:
        """The head of a model that has one of its own; as `linear`, or finer."""
        ...

    def tied_head(self, embedding: Embedding, dtype: torch.dtype) -> Linear:
        """The head of a model whose head is its embedding: over the same stored bytes."""
        ...
