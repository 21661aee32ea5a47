"""Read checkpoints of compressed-tensors (llm-compressor) with integer weights.

Tensors of a module, O outputs, H inputs, G groups of a row (1 for a scale of an output or of the whole), b bits:

    weight_packed      [O, ...] int32, fields along the inputs, the lowest bits first, b-bit values plus 2^(b-1);
                       densely packed, or in files of 2025 with 32 // b in a word
    weight             [O, H] int8 instead of it: int-quantized
    weight_shape       [2], O and H
    weight_scale       [O, G], [O, 1] or [1]
    weight_zero_point  like the scale; packed along the outputs beside weight_packed. Left out where all are 0
    weight_g_idx       [H], the group of each input

A weight is (value - zero point) * scale, all signed.
"""

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.loader.packed.config import QuantizationSettings
from lorasrv.models.loader.packed.stored_tensors import FLOATS, StoredTensors
from lorasrv.models.loader.packed.unpacking import (
    exact_scales,
    group_codes,
    sorted_inputs,
    unpack_fields,
    unpack_padded_fields,
)
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "dense", "mixed-precision")
_STRATEGIES = ("tensor", "channel", "group")
_WORDS = ("I32",)
_REGEX = "re:"


class CompressedModules:
    """Hold the modules of a compressed-tensors checkpoint; see `PackedModules`.

    Raises:
        CorruptModel, UnsupportedModel: as `open_modules`.
    """

    rounding = ""

    def __init__(self, settings: QuantizationSettings, tensors: StoredTensors) -> None:
        self._settings, self._tensors = settings, tensors
        check_plain(settings)
        self._schemes = [
            settings.inner(f"config_groups {name!r:.60}", group)
            for name, group in settings.table("config_groups").items()
        ]
        for scheme in (settings, *self._schemes):
            self._check_format(scheme.text("format", "dense"))
        packed = tensors.modules("weight_packed")
        whole = [m for m in tensors.modules("weight") if tensors.dtype(f"{m}.weight") == "I8"]
        self._schemes_of = {module: self._scheme(module) for module in (*packed, *whole)}
        self.bits: Mapping[str, int] = {module: self._bits(module) for module in self._schemes_of}
        self.held = self.bits

    def shape(self, module: str) -> tuple[int, int]:
        if not self._is_packed(module):
            outputs, inputs = self._tensors.shape(f"{module}.weight", 2)
            return outputs, inputs
        outputs, inputs = self._tensors.read(f"{module}.weight_shape", ("I64", "I32"), (2,)).tolist()
        return outputs, inputs

    def weight(self, module: str) -> Tensor:
        return self.codes(module).dequantize()

    def codes(self, module: str) -> GroupQuantizedWeight:
        (outputs, inputs), bits = self.shape(module), self.bits[module]
        scales = self._scales(module, outputs)
        groups = scales.shape[1]
        if inputs % groups:
            raise UnsupportedModel(f"{module}: {inputs} inputs in {groups} groups do not divide")
        order = self._order(module, inputs, groups)
        zeros = self._zeros(module, outputs, groups, bits)
        return group_codes(self._fields(module, outputs, inputs), scales, zeros, bits, order)

    @staticmethod
    def _check_format(stored: str) -> None:
        if stored not in _FORMATS:
            known = "pack-quantized, int-quantized and float-quantized"
            raise UnsupportedModel(f"compressed-tensors in format {stored!r:.60} is not supported, only {known}")

    def _scheme(self, module: str) -> QuantizationSettings:
        """Return how the weight of a module was quantized."""
        targets = [(scheme, scheme.strings("targets")) for scheme in self._schemes]
        named = [scheme for scheme, names in targets if any(self._names(name, module) for name in names)]
        general = [scheme for scheme, names in targets if "Linear" in names]
        found = [*named, *general]
        if not found:
            raise CorruptModel(f"{self._settings.file}: no config_groups are for {module}, which is quantized")
        weights = found[0].inner("weights", found[0].values.get("weights"))
        if weights.text("type", "int") != "int":
            kind = weights.text("type", "int")
            raise UnsupportedModel(f"compressed-tensors of {kind!r:.60} weights is not supported, only of int")
        strategy = weights.text("strategy", "group" if weights.values.get("group_size") else "tensor")
        if strategy not in _STRATEGIES:
            raise UnsupportedModel(
                f"compressed-tensors with scales by {strategy!r:.60} is not supported, only by {', '.join(_STRATEGIES)}"
            )
        return weights

    def _names(self, target: str, module: str) -> bool:
        is_pattern = target.startswith(_REGEX)
        text = target.removeprefix(_REGEX) if is_pattern else rf"{re.escape(target)}\Z"
        return self._tensors.matches(self._settings.pattern(text), module)

    def _bits(self, module: str) -> int:
        bits = self._schemes_of[module].whole("num_bits")
        if not 2 <= bits <= 8 or (bits != 8 and not self._is_packed(module)):
            raise UnsupportedModel(f"compressed-tensors of {bits} bits ({module}) is not supported")
        return bits

    def _is_packed(self, module: str) -> bool:
        return f"{module}.weight_packed" in self._tensors

    def _scales(self, module: str, outputs: int) -> Tensor:
        """Return scales [O, G]."""
        name = f"{module}.weight_scale"
        if self._schemes_of[module].text("strategy", "") == "tensor":
            return exact_scales(name, self._tensors.read(name, FLOATS, (1,))).expand(outputs, 1)
        _, groups = self._tensors.shape(name, 2)
        if not groups:
            raise CorruptModel(f"{name} is empty")
        return exact_scales(name, self._tensors.read(name, FLOATS, (outputs, groups)))

    def _fields(self, module: str, outputs: int, inputs: int) -> Tensor:
        """Return values plus 2^(b-1), [O, H] uint8."""
        if not self._is_packed(module):
            return _unsigned(self._tensors.read(f"{module}.weight", ("I8",), (outputs, inputs)), 8)
        return self._unpacked(f"{module}.weight_packed", outputs, inputs, self.bits[module])

    def _unpacked(self, name: str, rows: int, fields: int, bits: int) -> Tensor:
        """Return fields [rows, fields], unpacked along the second dimension from densely or loosely packed words."""
        dense, padded = math.ceil(fields * bits / 32), math.ceil(fields / (32 // bits))
        _, width = self._tensors.shape(name, 2)
        words = self._tensors.read(name, _WORDS, (rows, dense if width == dense else padded))
        return _fields_of(words, fields, bits, is_dense=width == dense)

    def _zeros(self, module: str, outputs: int, groups: int, bits: int) -> Tensor | None:
        """Return zero points plus 2^(b-1), [O, G]; None if all zero points are 0."""
        name = f"{module}.weight_zero_point"
        if name not in self._tensors:
            return None
        if not self._is_packed(module) or self._tensors.dtype(name) == "I8":
            shape = (1,) if self._schemes_of[module].text("strategy", "") == "tensor" else (outputs, groups)
            return _unsigned(self._tensors.read(name, ("I8",), shape), bits).expand(outputs, groups)
        dense, padded = math.ceil(outputs * bits / 32), math.ceil(outputs / (32 // bits))
        rows, _ = self._tensors.shape(name, 2)
        words = self._tensors.read(name, _WORDS, (dense if rows == dense else padded, groups))
        return _fields_of(words.T, outputs, bits, is_dense=rows == dense).T

    def _order(self, module: str, inputs: int, groups: int) -> Tensor | None:
        name = f"{module}.weight_g_idx"
        if name not in self._tensors:
            return None
        groups_of = self._tensors.read(name, ("I32", "I64"), (inputs,))
        # Files written without activation order have -1.
        return None if bool((groups_of == -1).all()) else sorted_inputs(name, groups_of, groups)


def check_plain(settings: QuantizationSettings) -> None:
    """Check that weights are neither rotated nor sparse.

    Raises:
        UnsupportedModel: they are.
    """
    if settings.table("transform_config"):
        raise UnsupportedModel("compressed-tensors with transform_config (rotations) is not supported")
    sparsity = settings.inner("sparsity_config", settings.table("sparsity_config")).text("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModel(f"compressed-tensors with sparsity {sparsity!r:.60} is not supported")


def _fields_of(words: Tensor, fields: int, bits: int, *, is_dense: bool) -> Tensor:
    """Return `fields` fields of each row of words."""
    if not is_dense:
        return unpack_padded_fields(words, bits)[:, :fields]
    return unpack_fields(pad(words, (0, -words.shape[1] % bits)), bits)[:, :fields]


def _unsigned(values: Tensor, bits: int) -> Tensor:
    """Add 2^(b-1) to int8 values; returns uint8, which wraps."""
    return values.view(torch.uint8) + (1 << bits - 1)
