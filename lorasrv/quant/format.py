"""What a weight format must offer. T rows, H in, O out, V vocabulary; activations are fp32."""

from typing import Protocol

import torch
from torch import Tensor


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

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] fp32 -> a new [T, O] fp32."""
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

    def linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """weight [O, H], bias [O], floats of any kind; the result keeps no reference to them that it need not."""
        ...

    def embedding(self, weight: Tensor, dtype: torch.dtype) -> Embedding:
        """weight [V, H], floats of any kind."""
        ...

    def tied_head(self, embedding: Embedding, weight: Tensor, dtype: torch.dtype) -> Linear:
        """The head of a model whose head is its embedding, made of `weight` by this format: over the same stored bytes
        where the format can, else a copy of its own.
        """
        ...
