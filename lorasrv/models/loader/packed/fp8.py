"""Read checkpoints of FP8 weights: transformers' fp8 and fbgemm_fp8, float-quantized compressed-tensors.

Tensors of a module, O outputs, H inputs: weight [O, H] e4m3, and weight_scale or weight_scale_inv, one number, [O] or
[O, 1], or one for each block of `weight_block_size` outputs and inputs (compressed-tensors: `block_structure`). A
weight is q * scale, whatever the scale's name. Scales of activations are not used. Weights are rounded to 8 bits with a
scale for every 32, because CPUs cannot multiply e4m3.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lorasrv.errors import CorruptModel
from lorasrv.models.loader.packed.config import QuantizationSettings
from lorasrv.models.loader.packed.rounded import ROUNDED, round_to_bytes
from lorasrv.models.loader.packed.stored_tensors import FLOATS, StoredTensors
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

_E4M3 = "F8_E4M3"
_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8Modules:
    """Hold the modules of an FP8 checkpoint; see `PackedModules`.

    Raises:
        CorruptModel, UnsupportedModel: as `open_modules`.
    """

    rounding = ROUNDED

    def __init__(self, settings: QuantizationSettings, tensors: StoredTensors) -> None:
        self._tensors = tensors
        self._blocks = [size for size in _block_size(settings) if size > 0]
        found = [module for module in tensors.modules("weight") if tensors.dtype(f"{module}.weight") == _E4M3]
        self.bits: Mapping[str, int] = dict.fromkeys(found, 8)
        self.held = self.bits

    def shape(self, module: str) -> tuple[int, int]:
        outputs, inputs = self._tensors.shape(f"{module}.weight", 2)
        return outputs, inputs

    def codes(self, module: str) -> GroupQuantizedWeight:
        return round_to_bytes(f"{module}.weight", self.weight(module))

    def weight(self, module: str) -> Tensor:
        outputs, inputs = self.shape(module)
        name = next((f"{module}.{kind}" for kind in _SCALES if f"{module}.{kind}" in self._tensors), None)
        if name is None:
            raise CorruptModel(f"{module} has FP8 weights without weight_scale")
        bits = self._tensors.read(f"{module}.weight", (_E4M3,), (outputs, inputs)).view(torch.int8).short()
        if (bits & 0x7F).eq_(0x7F).any():
            raise CorruptModel(f"{module}.weight holds NaN or infinity")
        # Faster than torch's own conversion: shifted by 7, the bits of e4m3 are a float16 of 1/256 of the value.
        halves = (bits << 7 & 0x3F80 | bits & -0x8000).view(torch.float16)
        return halves.float().mul_(256).mul_(self._scales(name, outputs, inputs))

    def _scales(self, name: str, outputs: int, inputs: int) -> Tensor:
        """Return scales that multiply [O, H], fp32."""
        found = self._tensors.any_shape(name)
        scales = self._tensors.read(name, FLOATS, found).float()
        if not scales.isfinite().all():
            raise CorruptModel(f"{name} holds NaN or infinity")
        if found in ([], [1], [outputs], [outputs, 1]):
            return scales.reshape(-1, 1)
        if len(self._blocks) == 2:
            rows, columns = self._blocks
            if found == [-(-outputs // rows), -(-inputs // columns)]:
                spread = scales.repeat_interleave(rows, 0)[:outputs]
                return spread.repeat_interleave(columns, 1)[:, :inputs]
        raise CorruptModel(f"{name} is {found}, which does not fit a weight of {[outputs, inputs]}")


def _block_size(settings: QuantizationSettings) -> list[int]:
    """Return the numbers of outputs and inputs of a block with one scale; empty if there are no blocks."""
    groups = settings.table("config_groups").items()
    schemes = [settings.inner(f"config_groups {name!r:.60}", group) for name, group in groups]
    weights = [scheme.inner("weights", scheme.values["weights"]) for scheme in schemes if scheme.values.get("weights")]
    sizes = [settings.wholes("weight_block_size"), *(scheme.wholes("block_structure") for scheme in weights)]
    return next(filter(None, sizes), [])
