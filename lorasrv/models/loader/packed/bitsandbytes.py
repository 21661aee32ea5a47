"""Read checkpoints that transformers has quantized with bitsandbytes: LLM.int8, NF4 and FP4.

Tensors of a module, O outputs, H inputs:

    int8    weight [O, H] int8, SCB [O] fp32; a weight is q * SCB / 127; weight_format, one number: 0 for such rows,
            others for orders of tiles that older versions left
    4 bits  weight, bytes of any dtype, two codes each, the first in the upper half, over the flattened [O, H]; absmax
            of every block; quant_map [16]; a JSON text as bytes in quant_state.bitsandbytes__nf4 or __fp4. A weight is
            quant_map[q] * absmax. Nested absmax is uint8: nested_quant_map[absmax] * nested_absmax + nested_offset

The 16 values of NF4 and FP4 are not evenly spaced: they are approximated by a table of bytes. If blocks span rows,
weights are rounded to 8 bits, with a scale for every 32.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.loader.packed.config import QuantizationSettings
from lorasrv.models.loader.packed.rounded import ROUNDED, round_to_bytes
from lorasrv.models.loader.packed.stored_tensors import INTEGERS, StoredTensors
from lorasrv.models.loader.packed.unpacking import MOST_GROUP, exact_scales, group_codes
from lorasrv.models.quantization.rounding import table_codes
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

_STATE = ".weight.quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_ANY = ("U8", "I8", "F16", "BF16", "F32")
"""Dtypes under which the bytes of codes may be stored."""
_BYTE_TABLE = "the 16 values of a code are held in 8 bits, which changes weights by 0.5 % at most (rms)"
"""Description of the rounding. Normally distributed weights change by 0.49 % in NF4 and by 0.35 % in FP4."""
_LEAST_GROUP = 32
_ROWS = 0


class BitsAndBytesModules:
    """Hold the modules of a bitsandbytes checkpoint; see `PackedModules`.

    Raises:
        CorruptModel, UnsupportedModel: as `open_modules`.
    """

    def __init__(self, settings: QuantizationSettings, tensors: StoredTensors) -> None:
        del settings
        self._tensors = tensors
        self._states = {name.partition(_STATE)[0]: name for name in tensors.names() if _STATE in name}
        whole = dict.fromkeys(tensors.modules("SCB"), 8)
        for module in whole:
            self._check_rows(module)
        self.bits: Mapping[str, int] = whole | dict.fromkeys(self._states, 4)
        spanning = [module for module in self._states if not self._is_in_rows(module)]
        self.held = self.bits | dict.fromkeys(spanning, 8)
        self.rounding = ROUNDED if spanning else _BYTE_TABLE if self._states else ""

    def _check_rows(self, module: str) -> None:
        """Check that a weight of 8 bits is stored in rows.

        Raises:
            UnsupportedModel: it is stored in tiles.
        """
        name = f"{module}.weight_format"
        if name not in self._tensors:
            return
        held = self._tensors.read(name, ("U8", *INTEGERS), self._tensors.any_shape(name)).flatten().tolist()
        if held != [_ROWS]:
            raise UnsupportedModel(
                f"{name} is {held!r:.60}, and only weights in rows ({[_ROWS]}) are read; save the model again with a "
                "version of bitsandbytes that writes rows"
            )

    def shape(self, module: str) -> tuple[int, int]:
        if module not in self._states:
            outputs, inputs = self._tensors.shape(f"{module}.weight", 2)
        else:
            outputs, inputs = self._state(module)["shape"]
        return outputs, inputs

    def codes(self, module: str) -> GroupQuantizedWeight:
        if module in self._states:
            return self._codes_of_4(module)
        outputs, inputs = self.shape(module)
        values = self._tensors.read(f"{module}.weight", ("I8",), (outputs, inputs))
        scales = exact_scales(f"{module}.SCB", self._tensors.read(f"{module}.SCB", ("F32",), (outputs,)) / 127)
        return group_codes(values.view(torch.uint8) + 128, scales[:, None], None, 8)

    def weight(self, module: str) -> Tensor:
        if module not in self._states:
            return self.codes(module).dequantize()
        codes, absmax, table = self._parts(module)
        size = self._state(module)["blocksize"]
        flat = codes.view(-1)
        values = table.index_select(0, flat.int()) * absmax.repeat_interleave(size)[: len(flat)]
        return values.view(codes.shape)

    def _codes_of_4(self, module: str) -> GroupQuantizedWeight:
        if self.held[module] == 8:
            return round_to_bytes(f"{module}.weight", self.weight(module))
        codes, absmax, table = self._parts(module)
        made = table_codes(codes, absmax.view(len(codes), -1), table)
        return made if made.group <= MOST_GROUP else made.in_groups_of(MOST_GROUP)

    def _is_in_rows(self, module: str) -> bool:
        """Return whether rows consist of whole blocks of a size that kernels support."""
        state = self._state(module)
        size, inputs = int(state["blocksize"]), int(state["shape"][1])
        return inputs % size == 0 and size % _LEAST_GROUP == 0 and (size <= MOST_GROUP or size % MOST_GROUP == 0)

    def _parts(self, module: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes [O, H] uint8, absmax of every block and the values [16], fp32."""
        state, name = self._state(module), f"{module}.weight"
        (outputs, inputs), size = state["shape"], state["blocksize"]
        count = outputs * inputs
        stored = self._tensors.shape(name, 2)
        raw = self._tensors.read(name, _ANY, stored).view(-1).view(torch.uint8)
        if len(raw) != -(-count // 2):
            raise CorruptModel(f"{name} has {len(raw)} bytes, not {-(-count // 2)}")
        codes = torch.stack((raw >> 4, raw & 15), dim=-1).view(-1)[:count].view(outputs, inputs)
        table = self._tensors.read(f"{name}.quant_map", ("F32",), (16,))
        absmax = self._absmax(name, state, -(-count // size))
        for kind, held in (("quant_map", table), ("absmax", absmax)):
            if not held.isfinite().all():
                raise CorruptModel(f"{name}.{kind} holds NaN or infinity")
        if not table.any():
            raise CorruptModel(f"{name}.quant_map holds only zeros")
        return codes, absmax, table

    def _absmax(self, name: str, state: Mapping[str, Any], blocks: int) -> Tensor:
        if "nested_blocksize" not in state:
            return self._tensors.read(f"{name}.absmax", ("F32",), (blocks,))
        size = state["nested_blocksize"]
        nested = self._tensors.read(f"{name}.absmax", ("U8",), (blocks,))
        table = self._tensors.read(f"{name}.nested_quant_map", ("F32",), (256,))
        if not table.isfinite().all():
            raise CorruptModel(f"{name}.nested_quant_map holds NaN or infinity")
        scales = self._tensors.read(f"{name}.nested_absmax", ("F32",), (-(-blocks // size),))
        spread = scales.repeat_interleave(size)[:blocks]
        return table.index_select(0, nested.int()) * spread + float(state["nested_offset"])

    def _state(self, module: str) -> Mapping[str, Any]:
        """Return the JSON text of a module, checked."""
        name = self._states[module]
        (length,) = self._tensors.shape(name, 1)
        raw = bytes(self._tensors.read(name, ("U8",), (length,)).tolist())
        try:
            state = json.loads(raw)
        except ValueError:
            raise CorruptModel(f"{name} is not valid JSON") from None
        if not isinstance(state, dict) or state.get("quant_type") not in _KINDS:
            raise UnsupportedModel(f"{name} is not of a known kind: {', '.join(_KINDS)}")
        shape, sizes = state.get("shape"), [state.get("blocksize"), state.get("nested_blocksize", 1)]
        has_shape = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)
        has_offset = "nested_blocksize" not in state or isinstance(state.get("nested_offset"), float)
        if not has_shape or not all(type(n) is int and n > 0 for n in sizes) or not has_offset:
            raise CorruptModel(f"{name} lacks shape, blocksize or nested_offset")
        return state
