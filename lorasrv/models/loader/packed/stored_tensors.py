"""Read the tensors of quantized modules from safetensors files, with their dtypes and shapes checked first."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from lorasrv.errors import CorruptModel
from lorasrv.models.spec import ModuleNames

INTEGERS = {"I8": 8, "I16": 16, "I32": 32, "I64": 64}
"""Bits of a packed word by its dtype."""
FLOATS = ("F16", "BF16", "F32")


class StoredTensors:
    """Find and read tensors by name; in a multimodal checkpoint, only those of the language part.

    Args:
        readers: the open safetensors file of each tensor.
        names: module names of the checkpoint.
    """

    def __init__(self, readers: Mapping[str, Any], names: ModuleNames) -> None:
        self._readers = {own: reader for own, reader in readers.items() if names.are_for(own)}
        self._names = names

    def __contains__(self, name: str) -> bool:
        return name in self._readers

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._readers.keys()

    def any_shape(self, name: str) -> list[int]:
        """Return the shape of a tensor.

        Raises:
            CorruptModel: there is no such tensor.
        """
        return list(self._slice(name).get_shape())

    def modules(self, kind: str) -> list[str]:
        """Return the modules that have a tensor of this kind, such as qweight."""
        return [name.removesuffix(f".{kind}") for name in self._readers if name.endswith(f".{kind}")]

    def matches(self, pattern: re.Pattern[str], module: str) -> bool:
        """Return whether a pattern of the configuration matches a module.

        The pattern may use the module names of another version of transformers than the file.
        """
        return any(map(pattern.match, self._names.spellings(module)))

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor as safetensors spells it.

        Raises:
            CorruptModel: there is no such tensor.
        """
        return str(self._slice(name).get_dtype())

    def shape(self, name: str, dimensions: int) -> list[int]:
        """Return the shape of a tensor.

        Raises:
            CorruptModel: there is no such tensor, or it has another number of dimensions.
        """
        found = self.any_shape(name)
        if len(found) != dimensions:
            raise CorruptModel(f"{name} is {found}, which are not {dimensions} dimensions")
        return found

    def read(self, name: str, dtypes: Collection[str], shape: Sequence[int]) -> Tensor:
        """Read a tensor into new memory.

        Raises:
            CorruptModel: there is no such tensor, or it has another dtype or shape.
        """
        view = self._slice(name)
        if view.get_dtype() not in dtypes:
            raise CorruptModel(f"{name} is {view.get_dtype()}, not {' or '.join(dtypes)}")
        if list(view.get_shape()) != list(shape):
            raise CorruptModel(f"{name} is {list(view.get_shape())}, not {list(shape)}")
        tensor: Tensor = self._readers[name].get_tensor(name)
        return tensor

    def _slice(self, name: str) -> Any:
        if name not in self._readers:
            raise CorruptModel(f"the checkpoint lacks {name}")
        return self._readers[name].get_slice(name)
