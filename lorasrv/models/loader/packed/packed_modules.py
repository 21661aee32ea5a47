"""Define the interface of readers of quantized formats, and select a reader by method."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from lorasrv.models.loader.packed.awq import AwqModules
from lorasrv.models.loader.packed.bitsandbytes import BitsAndBytesModules
from lorasrv.models.loader.packed.compressed_tensors import CompressedModules, check_plain
from lorasrv.models.loader.packed.config import QuantizationSettings
from lorasrv.models.loader.packed.eetq import EetqModules
from lorasrv.models.loader.packed.fp8 import Fp8Modules
from lorasrv.models.loader.packed.gptq import GptqModules
from lorasrv.models.loader.packed.hqq import HqqModules
from lorasrv.models.loader.packed.stored_tensors import StoredTensors
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight


class PackedModules(Protocol):
    """Hold the quantized modules of a checkpoint."""

    @property
    def bits(self) -> Mapping[str, int]:
        """Return the bits of every module's codes in the file."""
        ...

    @property
    def held(self) -> Mapping[str, int]:
        """Return the bits of every module's codes as `codes` returns them."""
        ...

    def shape(self, module: str) -> tuple[int, int]:
        """Return (outputs, inputs) of a module.

        Raises:
            CorruptModel: the shapes of its tensors contradict each other.
        """
        ...

    @property
    def rounding(self) -> str:
        """Return how codes differ from the file's weights; "" if they do not."""
        ...

    def weight(self, module: str) -> Tensor:
        """Read the exact weight of a module, [O, H] fp32.

        Raises:
            CorruptModel, UnsupportedModel: as `codes`.
        """
        ...

    def codes(self, module: str) -> GroupQuantizedWeight:
        """Read the weight of a module as codes.

        Raises:
            CorruptModel: a tensor is missing, or has a wrong dtype, shape or value.
            UnsupportedModel: the layout is not supported; the message names it.
        """
        ...


def open_modules(settings: QuantizationSettings, tensors: StoredTensors) -> PackedModules:
    """Return the reader of a method.

    Raises:
        CorruptModel, UnsupportedModel: the configuration cannot be understood, or names a kind that is not supported.
    """
    match settings.method:
        case "gptq":
            return GptqModules(settings, tensors)
        case "awq":
            return AwqModules(settings, tensors)
        case "bitsandbytes":
            return BitsAndBytesModules(settings, tensors)
        case "fp8":
            return Fp8Modules(settings, tensors)
        case "hqq":
            return HqqModules(settings, tensors)
        case "eetq":
            return EetqModules(settings, tensors)
        case _ if settings.text("format", "") == "float-quantized":
            check_plain(settings)
            return Fp8Modules(settings, tensors)
        case _:
            return CompressedModules(settings, tensors)
