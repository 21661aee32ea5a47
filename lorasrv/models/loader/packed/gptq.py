"""Read GPTQ checkpoints as GPTQModel, AutoGPTQ and Optimum write them.

Tensors of a module, O outputs, H inputs, G groups, b bits, words of w bits (int32 unless `pack_dtype` differs):

    qweight  [H b / w, O]  fields along the inputs, the lowest bits first
    qzeros   [G, O b / w]  fields along the outputs; zeros minus 1 in format gptq, the zeros themselves in gptq_v2
    scales   [G, O]        floats
    g_idx    [H]           the group of each input; rows of qweight are in the inputs' own order

A weight is (q - zero) * scale. GPTQModel subtracts the 1 from whole words, with borrow; adding it to whole words undoes
this. AutoGPTQ ORs the fields, so that a zero of 0 sets all bits from its field on, and the zeros after it are lost.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.loader.packed.config import QuantizationSettings
from lorasrv.models.loader.packed.stored_tensors import FLOATS, INTEGERS, StoredTensors
from lorasrv.models.loader.packed.unpacking import exact_scales, group_codes, sorted_inputs, unpack_fields
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

FORMATS = ("gptq", "gptq_v2")
BITS = (2, 3, 4, 8)
_ONES = {2: 0x55, 4: 0x11, 8: 0x01}
"""A byte with 1 in every field."""
_THREES = (0x24924924, 0x92492492 - (1 << 32), 0x49249249)
"""What GPTQModel subtracts from consecutive words of 3-bit zeros when it saves them, and adds when it loads them. It is
not a 1 in every field."""


class GptqModules:
    """Hold the modules of a GPTQ checkpoint; see `PackedModules`.

    Raises:
        CorruptModel, UnsupportedModel: as `open_modules`.
    """

    rounding = ""

    def __init__(self, settings: QuantizationSettings, tensors: StoredTensors) -> None:
        self._settings, self._tensors = settings, tensors
        stored = settings.text("checkpoint_format", settings.text("format", "gptq"))
        if settings.flag("is_marlin_format", False):
            stored = "marlin"
        if stored not in FORMATS:
            raise UnsupportedModel(f"GPTQ in format {stored!r:.60} is not supported, only {' and '.join(FORMATS)}")
        self._is_v2 = stored == "gptq_v2"
        self._rules = [(settings.pattern(text.removeprefix("+:")), rule) for text, rule in self._dynamic()]
        self.bits: Mapping[str, int] = {module: self._bits(module) for module in tensors.modules("qweight")}
        self.held = self.bits

    def shape(self, module: str) -> tuple[int, int]:
        rows, outputs = self._tensors.shape(f"{module}.qweight", 2)
        return outputs, rows * self._word(module) // self.bits[module]

    def weight(self, module: str) -> Tensor:
        return self.codes(module).dequantize()

    def codes(self, module: str) -> GroupQuantizedWeight:
        (outputs, inputs), bits, word = self.shape(module), self.bits[module], self._word(module)
        groups, _ = self._tensors.shape(f"{module}.scales", 2)
        if not groups or inputs % groups or outputs * bits % word:
            raise UnsupportedModel(f"{module}: {inputs} inputs in {groups} groups, or {outputs} outputs, do not divide")
        words = self._tensors.read(f"{module}.qweight", INTEGERS, (inputs * bits // word, outputs))
        scales = self._tensors.read(f"{module}.scales", FLOATS, (groups, outputs))
        zero_words = self._tensors.read(f"{module}.qzeros", INTEGERS, (groups, outputs * bits // word))
        if zero_words.dtype != words.dtype:
            raise CorruptModel(f"{module}.qzeros has another dtype than {module}.qweight")
        zeros = self._zeros(module, zero_words)
        order = self._order(module, inputs, groups)
        fields = unpack_fields(words.T, bits)
        return group_codes(fields, exact_scales(f"{module}.scales", scales).T, zeros.T, bits, order)

    def _dynamic(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the patterns of module names with their own settings; the first pattern that matches applies."""
        for text, rule in self._settings.table("dynamic").items():
            # Modules of "-:" are floats in the file.
            if not text.startswith("-:"):
                yield text, self._settings.inner(f"dynamic {text!r:.60}", rule).values

    def _of(self, module: str) -> QuantizationSettings:
        own = next((rule for pattern, rule in self._rules if self._tensors.matches(pattern, module)), {})
        return self._settings.inner("dynamic", {**self._settings.values, **own})

    def _bits(self, module: str) -> int:
        bits = self._of(module).whole("bits")
        if bits not in BITS:
            raise UnsupportedModel(f"GPTQ of {bits} bits ({module}) is not supported, only of 2, 3, 4 and 8")
        if bits == 3 and self._word(module) != 32:
            raise UnsupportedModel(f"GPTQ of 3 bits ({module}) is supported in int32 only")
        return bits

    def _word(self, module: str) -> int:
        """Return the bits of a word."""
        dtype = self._tensors.dtype(f"{module}.qweight")
        if dtype not in INTEGERS:
            raise CorruptModel(f"{module}.qweight is {dtype}, not {' or '.join(INTEGERS)}")
        return INTEGERS[dtype]

    def _order(self, module: str, inputs: int, groups: int) -> Tensor | None:
        name = f"{module}.g_idx"
        size = self._of(module).whole("group_size")
        if size > 0 and inputs % size:
            raise UnsupportedModel(f"{module}: groups of {size} do not divide its {inputs} inputs")
        if name not in self._tensors:
            return None
        groups_of = self._tensors.read(name, ("I32", "I64"), (inputs,))
        if not groups_of.any():
            # Modules without groups have only zeros here, and old exports have only zeros everywhere.
            return None
        return sorted_inputs(name, groups_of, groups)

    def _zeros(self, module: str, words: Tensor) -> Tensor:
        """Return the zeros [G, O].

        If the ranges are symmetric, all zeros must be in the middle. This decides how to read them, because some files
        name the wrong format.
        """
        bits = self.bits[module]
        readings = self._readings(words, bits)
        if not self._of(module).flag("sym", False):
            if not self._is_v2 and not self._is_by_gptqmodel() and _has_lost_fields(words, bits):
                raise UnsupportedModel(
                    f"{module}.qzeros: AutoGPTQ has lost the zeros behind a zero of 0; quantize again with GPTQModel"
                )
            return readings[0]()
        for reading in readings:
            if ((zeros := reading()) == 1 << bits - 1).all():
                return zeros
        raise UnsupportedModel(f"{module}: {self._settings.file} says sym, but its zeros are not all {1 << bits - 1}")

    def _readings(self, words: Tensor, bits: int) -> list[Callable[[], Tensor]]:
        """Return the ways to read zeros, beginning with the one that the configuration names."""

        def as_stored() -> Tensor:
            return unpack_fields(words, bits)

        def less_one() -> Tensor:
            if bits == 3:
                return as_stored() + 1
            ones = int.from_bytes(bytes([_ONES[bits]]) * words.itemsize, "little")
            return unpack_fields(words + ones, bits)

        def less_threes() -> Tensor:
            added = torch.tensor(_THREES, dtype=torch.int32).repeat(-(-words.shape[1] // 3))[: words.shape[1]]
            return unpack_fields(words + added, bits)

        first = [less_threes, less_one] if self._is_by_gptqmodel() else [less_one, less_threes]
        first = first if bits == 3 else [less_one]
        return [as_stored, *first] if self._is_v2 else [*first, as_stored]

    def _is_by_gptqmodel(self) -> bool:
        made_by = self._settings.table("meta").get("quantizer")
        return "gptqmodel" in str(made_by).lower()


def _has_lost_fields(words: Tensor, bits: int) -> bool:
    """Return whether a zero of 0 may have overwritten the zeros after it, as AutoGPTQ does.

    Then a word ends with two fields of all ones. Fields of 3 bits may span two words, so for them any field of all ones
    counts; no other zero minus 1 is that large.
    """
    if bits == 3:
        return bool((unpack_fields(words, bits) == 7).any())
    fields = unpack_fields(words, bits).view(*words.shape, -1)
    return bool((fields[..., -2:] == (1 << bits) - 1).all(dim=-1).any())
