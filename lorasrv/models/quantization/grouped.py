"""Store weights as integer codes with a scale per group: int8, int4 and q3h.

int8: symmetric codes with a scale for every 32 inputs of an output; codes of GGUF's Q8_0 are kept. int4: 16 levels
between a minimum and a maximum of each group; codes of GGUF's Q4_0 and Q4_1 are kept. q3h: 11 levels for each group of
64, two weights in seven bits, an fp16 scale and minimum, 4 bits per weight in total.

The embedding and the head keep 8 bits in all formats: they are read only once per step, and their errors affect every
token. A tied head shares the embedding's bytes.

Source: Q3H of Inferflow (Shi et al. 2024), between 3 and 4 bits in size and quality.
"""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from lorasrv.models.code_format import GROUPS, LEVELS
from lorasrv.models.quantization.base import Acceptance, Embedding, Fit, Linear, QuantFormat, StoredWeights
from lorasrv.models.quantization.rounding import check_group, indivisible_reason, round_asymmetric, round_symmetric
from sgmv_kernels.backend import PackedLinear
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT8_LEVELS
from sgmv_kernels.ops import Ops

INT8_GROUP = 32
"""Inputs that share a scale in the embedding and the head; the group of GGUF's Q8_0."""


class GroupQuantLinear:
    """Multiply by packed codes; see `Linear`."""

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

    def rows(self, ids: Tensor) -> Tensor:
        return self._packed.rows(ids)


class GroupQuantEmbedding:
    """Look up rows of packed codes; see `Embedding`."""

    def __init__(self, ops: Ops, packed: PackedLinear) -> None:
        self.packed = packed
        self.nbytes = packed.nbytes
        self.can_be_recorded = ops.can_record

    def __call__(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids)

    def dequantize(self) -> Tensor:
        return self.packed.dequantize()


class GroupQuantFormat(QuantFormat):
    """Pack linears as codes, to which floats are rounded with a minimum unless a subclass rounds otherwise.

    Codes of the file are kept if they have the format's levels and group. With `keep_int8_codes`, 8-bit codes of
    single linears are kept, too.
    """

    # Values that a code may have.
    levels: ClassVar[int]
    default_group: ClassVar[int]
    is_batch_invariant = True
    table_bits = 8.5
    # How well the format serves a checkpoint whose weights it has to round.
    fit_of_rounding: ClassVar[Fit] = Fit.ON_REQUEST

    def __init__(self, ops: Ops, group: int, *, keep_int8_codes: bool) -> None:
        self._ops = ops
        self._keep_int8_codes = keep_int8_codes
        self.group = group

    @classmethod
    def accepts(cls, stored: StoredWeights, group: int | None = None) -> Acceptance:
        codes = stored.codes
        own = codes is not None and codes.levels == cls.levels
        chosen = group or (codes.group if codes is not None and own else cls.default_group)
        keep_int8_codes = codes is not None and codes.levels != INT8_LEVELS
        for site in stored.spec.sites():
            if site.in_features % chosen:
                return Acceptance(Fit.REFUSED, indivisible_reason(site.in_features, chosen), chosen, keep_int8_codes)
        if own and codes is not None and codes.group == chosen:
            return Acceptance(Fit.EXACT, f"the file holds codes of {cls.levels} levels", chosen, keep_int8_codes)
        return Acceptance(cls.fit_of_rounding, f"weights are rounded to {cls.levels} levels", chosen, keep_int8_codes)

    @classmethod
    def make(cls, ops: Ops, group: int | None, *, keep_int8_codes: bool) -> Self:
        return cls(ops, group or cls.default_group, keep_int8_codes=keep_int8_codes)

    def keeps(self, codes: GroupQuantizedWeight) -> bool:
        is_own = codes.levels == self.levels and codes.group == self.group
        is_finer = self._keep_int8_codes and codes.levels == INT8_LEVELS != self.levels
        return (is_own or is_finer) and self._ops.reads(codes)

    def round(self, weight: Tensor) -> GroupQuantizedWeight:
        """Round weight [O, H], floats of any kind, to codes of this format."""
        return round_asymmetric(weight, self.group, self.levels)

    def linear(self, weight: Tensor | GroupQuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        del dtype
        if isinstance(weight, Tensor):
            weight = self._rounded(weight)
        return GroupQuantLinear(self._ops, self._ops.pack_linear(weight, None if bias is None else bias.float()))

    def linear_of_parts(
        self, parts: Sequence[Tensor | GroupQuantizedWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Linear:
        del dtype
        codes = [self._rounded(part) if isinstance(part, Tensor) else part for part in parts]
        return GroupQuantLinear(self._ops, self._ops.pack_parts(codes, None if bias is None else bias.float()))

    def embedding(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Embedding:
        del dtype
        return GroupQuantEmbedding(self._ops, self._ops.pack_linear(self._ends(weight), None, few_rows=True))

    def head(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Linear:
        del dtype
        return GroupQuantLinear(self._ops, self._ops.pack_linear(self._ends(weight), None, few_rows=True))

    def tied_head(self, embedding: Embedding, dtype: torch.dtype) -> Linear:
        del dtype
        assert isinstance(embedding, GroupQuantEmbedding)
        return GroupQuantLinear(self._ops, embedding.packed, shared=True)

    def _rounded(self, weight: Tensor) -> GroupQuantizedWeight:
        check_group(weight, self.group, f"--quantization {self.name}")
        return self.round(weight)

    def _ends(self, weight: Tensor | GroupQuantizedWeight) -> GroupQuantizedWeight:
        if isinstance(weight, GroupQuantizedWeight) and weight.levels == INT8_LEVELS:
            return weight
        floats = weight.dequantize() if isinstance(weight, GroupQuantizedWeight) else weight
        check_group(floats, INT8_GROUP, f"--quantization {self.name}")
        return round_symmetric(floats, INT8_GROUP)


class Q3hFormat(GroupQuantFormat):
    """Pack `--quantization q3h`."""

    name = "q3h"
    linear_bits = 4.0
    levels = LEVELS["q3h"]
    groups = GROUPS["q3h"]
    default_group = 64


class Int4Format(GroupQuantFormat):
    """Pack `--quantization int4`."""

    name = "int4"
    linear_bits = 4.5
    levels = LEVELS["int4"]
    groups = GROUPS["int4"]
    default_group = 32


class Int8Format(GroupQuantFormat):
    """Pack `--quantization int8`."""

    name = "int8"
    linear_bits = 8.5
    levels = LEVELS["int8"]
    groups = GROUPS["int8"]
    default_group = 32
    fit_of_rounding = Fit.DEFAULT

    def round(self, weight: Tensor) -> GroupQuantizedWeight:
        return round_symmetric(weight, self.group)
