"""Read AWQ checkpoints as AutoAWQ writes them: 4 bits, in versions GEMM, GEMV and GEMV_fast.

Tensors of a module, O outputs, H inputs, G groups of a row; words are int32 of eight fields, the lowest bits first:

    gemm   qweight [H, O / 8], qzeros [G, O / 8], scales [G, O]: field i of word c is output 8 c + OUTPUTS[i]
    gemv   qweight [O, H / 8], qzeros [O, W], scales [O, 8 W]: fields along the inputs and groups, in order; W is G / 8,
           rounded up to a multiple that depends on the size of groups

gemv_fast has qweight [O / 4, H] of int16, and scales and qzeros [8 W, O] as floats, where qzeros is -zero * scale. A
row of qweight holds four outputs, with the fields of 64 inputs of each in turn, four to a word. Every 32 inputs are in
the order of `FAST_INPUTS`.

A weight is (q - zero) * scale; for gemv_fast it is q * scale + qzero.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lorasrv.errors import UnsupportedModel
from lorasrv.models.loader.packed.config import QuantizationSettings
from lorasrv.models.loader.packed.stored_tensors import FLOATS, StoredTensors
from lorasrv.models.loader.packed.unpacking import (
    byte_stream,
    exact_scales,
    group_codes,
    minima_codes,
    unpack_fields,
)
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

VERSIONS = ("gemm", "gemv", "gemv_fast")
BITS, FIELDS = 4, 8
OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
FAST_INPUTS = tuple(
    int(i) for i in torch.arange(32).view(4, 4, 2).transpose(0, 1).reshape(4, 4, 2).transpose(1, 2).reshape(32)
)
"""Input of each of 32 fields. Every eight fields hold four pairs of inputs: the first inputs of all pairs, then the
second ones."""
_FAST_STRIDE, _FAST_OUTPUTS = 64, 4
_WORDS = ("I32",)


class AwqModules:
    """Hold the modules of an AWQ checkpoint; see `PackedModules`.

    Raises:
        CorruptModel, UnsupportedModel: as `open_modules`.
    """

    rounding = ""

    def __init__(self, settings: QuantizationSettings, tensors: StoredTensors) -> None:
        self._settings, self._tensors = settings, tensors
        self._version = settings.text("version", settings.text("format", "gemm"))
        if self._version not in VERSIONS:
            known = ", ".join(VERSIONS)
            raise UnsupportedModel(f"AWQ in version {self._version!r:.60} is not supported, only {known}")
        if (bits := settings.whole("bits", "w_bit")) != BITS:
            raise UnsupportedModel(f"AWQ of {bits} bits is not supported, only of {BITS}")
        self._group = settings.whole("group_size", "q_group_size")
        self.bits: Mapping[str, int] = dict.fromkeys(tensors.modules("qweight"), BITS)
        self.held = self.bits

    def shape(self, module: str) -> tuple[int, int]:
        rows, words = self._tensors.shape(f"{module}.qweight", 2)
        if self._version == "gemv_fast":
            return _FAST_OUTPUTS * rows, words
        return (FIELDS * words, rows) if self._version == "gemm" else (rows, FIELDS * words)

    def weight(self, module: str) -> Tensor:
        return self.codes(module).dequantize()

    def codes(self, module: str) -> GroupQuantizedWeight:
        outputs, inputs = self.shape(module)
        group = inputs if self._group == -1 else self._group
        if group <= 0 or inputs % group:
            raise UnsupportedModel(f"{module}: groups of {group} do not divide its {inputs} inputs")
        if self._version == "gemv_fast":
            return self._read_fast(module, outputs, inputs, inputs // group)
        read = self._read_gemm if self._version == "gemm" else self._read_gemv
        fields, zeros, scales = read(module, outputs, inputs, inputs // group)
        return group_codes(fields, exact_scales(f"{module}.scales", scales), zeros, BITS)

    def _read_gemm(self, module: str, outputs: int, inputs: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return fields [O, H], zeros [O, G] and scales [O, G]."""
        words = self._tensors.read(f"{module}.qweight", _WORDS, (inputs, outputs // FIELDS))
        zeros = self._tensors.read(f"{module}.qzeros", _WORDS, (groups, outputs // FIELDS))
        scales = self._tensors.read(f"{module}.scales", FLOATS, (groups, outputs))
        return _by_output(words), _by_output(zeros), scales.T

    def _read_gemv(self, module: str, outputs: int, inputs: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return fields [O, H], zeros [O, G] and scales [O, G]."""
        width = _zeros_width(groups, inputs // groups)
        words = self._tensors.read(f"{module}.qweight", _WORDS, (outputs, inputs // FIELDS))
        zeros = self._tensors.read(f"{module}.qzeros", _WORDS, (outputs, width))
        scales = self._tensors.read(f"{module}.scales", FLOATS, (outputs, FIELDS * width))
        return unpack_fields(words, BITS), unpack_fields(zeros, BITS)[:, :groups], scales[:, :groups]

    def _read_fast(self, module: str, outputs: int, inputs: int, groups: int) -> GroupQuantizedWeight:
        if inputs % _FAST_STRIDE:
            raise UnsupportedModel(f"{module}: {inputs} inputs are no multiple of {_FAST_STRIDE}")
        width = FIELDS * _zeros_width(groups, inputs // groups)
        words = self._tensors.read(f"{module}.qweight", ("I16",), (outputs // _FAST_OUTPUTS, inputs))
        scales, minima = (
            exact_scales(name, self._tensors.read(name, FLOATS, (width, outputs))[:groups]).T
            for name in (f"{module}.scales", f"{module}.qzeros")
        )
        stored = unpack_fields(words, BITS).view(len(words), -1, _FAST_OUTPUTS, _FAST_STRIDE // 32, 32)
        fields = torch.empty_like(stored)
        fields[..., list(FAST_INPUTS)] = stored
        return minima_codes(fields.transpose(1, 2).reshape(outputs, inputs), scales, minima, BITS)


def _zeros_width(groups: int, group: int) -> int:
    """Return the number of words for the zeros of an output, including empty ones."""
    padded_to = max(1, 128 // group)
    width = -(-groups // FIELDS)
    return -(-width // padded_to) * padded_to


def _by_output(words: Tensor) -> Tensor:
    """Unpack words [N, O / 8] to the fields of every output, [O, N] uint8."""
    stream = byte_stream(words.T).view(words.shape[1], words.shape[0], FIELDS // 2)
    fields = torch.empty((words.shape[1], FIELDS, words.shape[0]), dtype=torch.uint8)
    for i in range(0, FIELDS, 2):
        two = stream[..., i // 2].contiguous()
        fields[:, OUTPUTS[i]], fields[:, OUTPUTS[i + 1]] = two & 15, two >> 4
    return fields.flatten(0, 1)
