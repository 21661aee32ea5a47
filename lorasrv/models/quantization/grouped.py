"""What the formats of codes have in common: linears and embeddings over packed codes, and int8 at both ends.

The embedding and the head keep 8 bits whatever the layers have: they are read once a step, and errors there reach every
token. A tied head is the embedding, one copy.

q3h: eleven levels for every group of 64, two weights in seven bits, with an fp16 scale and minimum: 4 bits a weight.

Source: Q3H of Inferflow (Shi et al. 2024), between 3 and 4 bits in size and quality.

int4: sixteen levels between a minimum and a maximum for every group. GGUF's Q4_0 and Q4_1 are taken as they are.

int8: symmetric, a scale for every 32 inputs of an output. GGUF's Q8_0 is taken as it is.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lorasrv.models.quantization.base import Embedding, Linear
from lorasrv.models.quantization.rounding import check_group, round_asymmetric, round_symmetric
from sgmv_kernels.ops import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, GroupQuantizedWeight, Ops, PackedLinear

INT8_GROUP = 32
"""That of GGUF's Q8_0."""


class GroupQuantLinear:
    """See `Linear`."""

    def __init__(self, ops: Ops, packed: PackedLinear, *, shared: bool = False) -> None:
        self._ops = ops
        self._packed = packed
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.nbytes = 0 if shared else packed.nbytes
        self.can_be_recorded = ops.can_record

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._packed)

    def dequantize(self) -> Tensor:
        return self._packed.dequantize()


class GroupQuantEmbedding:
    """See `Embedding`."""

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed
        self.nbytes = packed.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids)

    def dequantize(self) -> Tensor:
        return self.packed.dequantize()


class GroupQuantFormat(ABC):
    """A format whose linears are codes; a subclass says how floats become them.

    Codes that a file holds are taken as they are if they are of these levels and groups. With `keeps_finer` so are
    8-bit codes, which a file may have for some of its linears.
    """

    name: ClassVar[str]
    levels: ClassVar[int]
    groups: ClassVar[tuple[int, ...]]
    default_group: ClassVar[int]

    def __init__(self, ops: Ops, group: int, *, keeps_finer: bool) -> None:
        self._ops = ops
        self._keeps_finer = keeps_finer
        self.group = group

    def keeps(self, codes: GroupQuantizedWeight) -> bool:
        if codes.levels == self.levels:
            return codes.group == self.group
        return self._keeps_finer and codes.levels == INT8_LEVELS

    @abstractmethod
    def round(self, weight: Tensor) -> GroupQuantizedWeight:
        """weight [O, H] floats -> codes."""

    def linear(self, weight: Tensor | GroupQuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        del dtype
        if isinstance(weight, Tensor):
            check_group(weight, self.group, f"--quantization {self.name}")
            weight = self.round(weight)
        return GroupQuantLinear(self._ops, self._ops.pack_linear(weight, None if bias is None else bias.float()))

    def embedding(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Embedding:
        del dtype
        return GroupQuantEmbedding(self._ops.pack_linear(self._ends(weight), None, few_rows=True))

    def head(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Linear:
        del dtype
        return GroupQuantLinear(self._ops, self._ops.pack_linear(self._ends(weight), None, few_rows=True))

    def tied_head(self, embedding: Embedding, dtype: torch.dtype) -> Linear:
        del dtype
        assert isinstance(embedding, GroupQuantEmbedding)
        return GroupQuantLinear(self._ops, embedding.packed, shared=True)

    def _ends(self, weight: Tensor | GroupQuantizedWeight) -> GroupQuantizedWeight:
        if isinstance(weight, GroupQuantizedWeight) and weight.levels == INT8_LEVELS:
            return weight
        floats = weight.dequantize() if isinstance(weight, GroupQuantizedWeight) else weight
        check_group(floats, INT8_GROUP, f"--quantization {self.name}")
        return round_symmetric(floats, INT8_GROUP)


class Q3hFormat(GroupQuantFormat):
    """`--quantization q3h`."""

    name = "q3h"
    levels = Q3H_LEVELS
    groups = (64, 128)
    default_group = 64

    def round(self, weight: Tensor) -> GroupQuantizedWeight:
        return round_asymmetric(weight, self.group, Q3H_LEVELS)


class Int4Format(GroupQuantFormat):
    """`--quantization int4`."""

    name = "int4"
    levels = INT4_LEVELS
    groups = (32, 64, 128)
    default_group = 32

    def round(self, weight: Tensor) -> GroupQuantizedWeight:
        return round_asymmetric(weight, self.group, INT4_LEVELS)


class Int8Format(GroupQuantFormat):
    """`--quantization int8`."""

    name = "int8"
    levels = INT8_LEVELS
    groups = (32, 64, 128)
    default_group = 32

    def round(self, weight: Tensor) -> GroupQuantizedWeight:
        return round_symmetric(weight, self.group)
