"""Define what the reader of a quantized format gives, and choose one by method."""

from collections.abc import Mapping
from typing import Protocol

from lorasrv.models.loader.packed.awq import AwqModules
from lorasrv.models.loader.packed.compressed_tensors import CompressedModules
from lorasrv.models.loader.packed.config import QuantizationSettings
from lorasrv.models.loader.packed.gptq import GptqModules
from lorasrv.models.loader.packed.stored_tensors import StoredTensors
from sgmv_kernels.ops import GroupQuantizedWeight


class PackedModules(Protocol):
    """Hold the quantized modules of a checkpoint."""

    @property
    def bits(self) -> Mapping[str, int]:
        """Return the bits of every module's codes."""
        ...

    def shape(self, module: str) -> tuple[int, int]:
        """Return (outputs, inputs) of a module.

        Raises:
            CorruptModel: the shapes of its tensors contradict each other.
        """
        ...

    def codes(self, module: str) -> GroupQuantizedWeight:
        """Read the weight of a module.

        Raises:
            CorruptModel: a tensor is missing, or has a wrong dtype, shape or value.
            UnsupportedModel: a layout that is not supported; the message names it.
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
        case _:
            return CompressedModules(settings, tensors)
