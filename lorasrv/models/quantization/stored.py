"""Serve quantized checkpoints unchanged: those of libraries for transformers, GGUF files, and files that `lorasrv
quantize` has written in several formats.

Linears keep the codes, scales and zeros of the file, or the loader's approximation of values that no codes give;
linears that the file holds as floats stay floats. Embedding and head keep 8 bits, as in the formats that round, unless
the file has the head as codes.
"""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from lorasrv.models.quantization.base import Acceptance, Embedding, Fit, Linear, QuantFormat, StoredWeights
from lorasrv.models.quantization.grouped import INT8_GROUP, GroupQuantLinear, Int8Format
from lorasrv.models.quantization.unquantized import FloatLinear
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.ops import Ops


class SideBySideLinear:
    """Multiply by several linears with the same inputs, some of which hold floats; see `Linear`."""

    can_be_recorded = False

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=1)

    def dequantize(self) -> Tensor:
        return torch.cat([part.dequantize() for part in self._parts])

    def rows(self, ids: Tensor) -> Tensor:
        return self.dequantize()[ids]


class StoredFormat(QuantFormat):
    """Keep the codes of checkpoints of one method; a subclass names it."""

    linear_bits = 4.25
    table_bits = 8.5
    is_batch_invariant = True
    # Origin of the files, for messages.
    title: ClassVar[str]

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._tables = Int8Format(ops, INT8_GROUP, keep_int8_codes=True)

    @classmethod
    def accepts(cls, stored: StoredWeights, group: int | None = None) -> Acceptance:
        del group
        if stored.packing is None or stored.packing.method != cls.name:
            return Acceptance(Fit.REFUSED, f"this is no {cls.title} checkpoint; choose auto, int8, int4 or none")
        return Acceptance(Fit.OWN, "the codes of the file are kept")

    @classmethod
    def make(cls, ops: Ops, group: int | None, *, keep_int8_codes: bool) -> Self:
        del group, keep_int8_codes
        return cls(ops)

    def keeps(self, codes: GroupQuantizedWeight) -> bool:
        return self._ops.reads(codes)

    def linear(self, weight: Tensor | GroupQuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        kept = None if bias is None else bias.float()
        if isinstance(weight, Tensor):
            return FloatLinear(weight.to(dtype), kept)
        return GroupQuantLinear(self._ops, self._ops.pack_linear(weight, kept))

    def linear_of_parts(
        self, parts: Sequence[Tensor | GroupQuantizedWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Linear:
        codes = [part for part in parts if not isinstance(part, Tensor)]
        if len(codes) == len(parts):
            return GroupQuantLinear(self._ops, self._ops.pack_parts(codes, None if bias is None else bias.float()))
        widths = [part.shape[0] if isinstance(part, Tensor) else part.out_features for part in parts]
        biases = [None] * len(parts) if bias is None else torch.split(bias, widths)
        return SideBySideLinear([self.linear(part, own, dtype) for part, own in zip(parts, biases, strict=True)])

    def embedding(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Embedding:
        return self._tables.embedding(weight, dtype)

    def head(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Linear:
        if isinstance(weight, Tensor):
            return self._tables.head(weight, dtype)
        return GroupQuantLinear(self._ops, self._ops.pack_linear(weight, None, few_rows=True))

    def tied_head(self, embedding: Embedding, dtype: torch.dtype) -> Linear:
        return self._tables.tied_head(embedding, dtype)


class GptqFormat(StoredFormat):
    """Keep `--quantization gptq`."""

    name, title = "gptq", "GPTQ"


class AwqFormat(StoredFormat):
    """Keep `--quantization awq`."""

    name, title = "awq", "AWQ"


class CompressedTensorsFormat(StoredFormat):
    """Keep `--quantization compressed-tensors`."""

    name, title = "compressed-tensors", "compressed-tensors"


class BitsAndBytesFormat(StoredFormat):
    """Keep `--quantization bitsandbytes`."""

    name, title = "bitsandbytes", "bitsandbytes"


class HqqFormat(StoredFormat):
    """Keep `--quantization hqq`."""

    name, title = "hqq", "HQQ"


class EetqFormat(StoredFormat):
    """Keep `--quantization eetq`."""

    name, title = "eetq", "EETQ"


class GgufFormat(StoredFormat):
    """Keep `--quantization gguf`: files with types that neither int4 nor int8 holds."""

    name, title = "gguf", "GGUF (K-quants, IQ4, MXFP4, ...)"


class MixedFormat(StoredFormat):
    """Keep the codes of `lorasrv quantize` in several formats; see `QuantizedCheckpoint`."""

    name, title = "mixed", "mixed"
