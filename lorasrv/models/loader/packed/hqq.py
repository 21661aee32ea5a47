"""Read HQQ checkpoints, as transformers saves them.

Tensors of a module, O outputs, H inputs, N groups of `group_size`, b bits; values other than arrays are scalars:

    W_q          fields of the weight seen as [N, group] (axis 1) or [group, N] (axis 0), `group` being neighbours of
                 the flattened weight for axis 1: a byte, or an int32 of 3 bits, holds rows of as many equal parts as
                 fields fit into it, the first part in its highest bits
    scale, zero  [N, 1] or [1, N] floats
    nbits, group_size, axis, shape

A weight is (q - zero) * scale. Groups of axis 0 run across rows: such weights are rounded to 8 bits.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.loader.packed.config import QuantizationSettings
from lorasrv.models.loader.packed.rounded import ROUNDED, round_to_bytes
from lorasrv.models.loader.packed.stored_tensors import FLOATS, INTEGERS, StoredTensors
from lorasrv.models.loader.packed.unpacking import minima_codes
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

BITS = (1, 2, 3, 4, 8)
_LEAST_GROUP = 32
_NUMBERS = ("U8", *INTEGERS, "F32")
_ANY = ("U8", *INTEGERS, *FLOATS)
"""Dtypes of scalars, and of the fields' bytes."""


class HqqModules:
    """Hold the modules of an HQQ checkpoint; see `PackedModules`.

    Raises:
        CorruptModel, UnsupportedModel: as `open_modules`.
    """

    def __init__(self, settings: QuantizationSettings, tensors: StoredTensors) -> None:
        del settings
        self._tensors = tensors
        self.bits: Mapping[str, int] = {module: self._bits(module) for module in tensors.modules("W_q")}
        across = [module for module in self.bits if not self._is_in_rows(module)]
        self.held = {module: max(bits, 4) for module, bits in self.bits.items()} | dict.fromkeys(across, 8)
        self.rounding = ROUNDED if across else ""

    def shape(self, module: str) -> tuple[int, int]:
        outputs, inputs = self._numbers(module, "shape", 2)
        return outputs, inputs

    def weight(self, module: str) -> Tensor:
        outputs, inputs = self.shape(module)
        fields, scale, zero = self._parts(module)
        return ((fields.float() - zero) * scale).view(outputs, inputs)

    def codes(self, module: str) -> GroupQuantizedWeight:
        if not self._is_in_rows(module):
            return round_to_bytes(f"{module}.W_q", self.weight(module))
        outputs, inputs = self.shape(module)
        fields, scale, zero = self._parts(module)
        scales, minima = scale.view(outputs, -1), (-zero * scale).view(outputs, -1)
        return minima_codes(fields.view(outputs, inputs), scales, minima, self.bits[module])

    def _parts(self, module: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return fields [N, group] or [group, N] uint8, scale and zero [N, 1] or [1, N] fp32."""
        bits, group, axis = self.bits[module], self._group(module), self._axis(module)
        count = math.prod(self.shape(module))
        if group <= 0 or count % group:
            raise CorruptModel(f"{module}: groups of {group} do not divide its {count} weights")
        rows, columns = (count // group, group) if axis == 1 else (group, count // group)
        parts = 10 if bits == 3 else 8 // bits
        name = f"{module}.W_q"
        stored = self._tensors.read(name, _ANY, self._tensors.shape(name, 2))
        raw = stored.reshape(len(stored), -1).view(torch.uint8)
        words = raw.view(torch.int32) if bits == 3 and raw.shape[1] % 4 == 0 else raw
        if words.shape != (math.ceil(rows / parts), columns) or (bits == 3) != (words.dtype == torch.int32):
            raise CorruptModel(f"{name} is {list(stored.shape)}, which does not fit {rows} rows of {columns} fields")
        fields = torch.cat([words >> bits * (parts - 1 - i) & (1 << bits) - 1 for i in range(parts)])[:rows]
        shape = (rows, 1) if axis == 1 else (1, columns)
        scale, zero = (self._floats(f"{module}.{kind}", shape) for kind in ("scale", "zero"))
        return fields.to(torch.uint8), scale, zero

    def _floats(self, name: str, shape: tuple[int, int]) -> Tensor:
        floats = self._tensors.read(name, FLOATS, shape).float()
        if not floats.isfinite().all():
            raise CorruptModel(f"{name} holds NaN or infinity")
        return floats

    def _is_in_rows(self, module: str) -> bool:
        """Return whether rows consist of whole groups of a size that kernels support."""
        _, inputs = self.shape(module)
        group = self._group(module)
        return self._axis(module) == 1 and group > 0 and inputs % group == 0 and group % _LEAST_GROUP == 0

    def _bits(self, module: str) -> int:
        (bits,) = self._numbers(module, "nbits", 0)
        if bits not in BITS:
            raise UnsupportedModel(
                f"HQQ of {bits} bits ({module}) is not supported, only of {', '.join(map(str, BITS))}"
            )
        for kind in ("scale", "zero"):
            if f"{module}.{kind}_q" in self._tensors or f"{module}.{kind}" not in self._tensors:
                raise UnsupportedModel(f"{module}: HQQ without {kind}s as floats is not supported")
        return bits

    def _axis(self, module: str) -> int:
        (axis,) = self._numbers(module, "axis", 0)
        if axis not in (0, 1):
            raise CorruptModel(f"{module}.axis is {axis}, not 0 or 1")
        return axis

    def _group(self, module: str) -> int:
        """Return the size of groups; without one, each row or column is a group."""
        if f"{module}.group_size" in self._tensors:
            return self._numbers(module, "group_size", 0)[0]
        return self.shape(module)[self._axis(module)]

    def _numbers(self, module: str, kind: str, count: int) -> list[int]:
        """Read a scalar, or `count` whole numbers."""
        name = f"{module}.{kind}"
        found: Any = self._tensors.read(name, _NUMBERS, (count,) if count else ()).view(-1)
        if not torch.equal(found.long().to(found.dtype), found) or bool((found < 0).any()):
            raise CorruptModel(f"{name} is {found.tolist()}, not whole numbers")
        return [int(number) for number in found]
