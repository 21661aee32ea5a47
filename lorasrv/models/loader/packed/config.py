"""Determine how a Hugging Face directory is quantized, and check the values of its configuration. Imports no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lorasrv.errors import CorruptModel, UnsupportedModel

METHODS = ("gptq", "awq", "compressed-tensors", "bitsandbytes", "fp8", "hqq", "eetq")
_SAME = {"fbgemm-fp8": "fp8"}
"""Other names of a method."""
_OTHER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which AutoGPTQ and AutoAWQ describe the quantization if config.json does not, each with the method that
applies if the file names none."""
_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class QuantizationSettings:
    """Hold how a checkpoint was quantized: one of `METHODS`, and the file's own table."""

    method: str
    # Name of the configuration's file, for messages.
    file: str
    values: Mapping[str, Any]

    def whole(self, *keys: str) -> int:
        """Return the whole number under one of these keys."""
        for key in keys:
            if key in self.values:
                number: int = self._checked(key, int, "a whole number")
                return number
        raise CorruptModel(f"{self.file}: the quantization lacks {keys[0]}")

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; `default` where there is none, or null."""
        return default if self.values.get(key) is None else self._checked(key, bool, "true or false")

    def text(self, key: str, default: str) -> str:
        """Return a string in lower case; `default` where there is none, or null."""
        return default if self.values.get(key) is None else self._checked(key, str, "a string").lower()

    def table(self, key: str) -> dict[str, Any]:
        """Return a table; an empty one where there is none, or null."""
        return {} if self.values.get(key) is None else self._checked(key, dict, "a table")

    def strings(self, key: str) -> list[str]:
        """Return a list of strings; an empty one where there is none, or null."""
        found = [] if self.values.get(key) is None else self._checked(key, list, "a list of strings")
        if not all(isinstance(entry, str) for entry in found):
            raise CorruptModel(f"{self.file}: quantization: {key} must be a list of strings")
        return found

    def wholes(self, key: str) -> list[int]:
        """Return a list of whole numbers; an empty one where there is none, or null."""
        found = [] if self.values.get(key) is None else self._checked(key, list, "a list of whole numbers")
        if not all(type(entry) is int for entry in found):
            raise CorruptModel(f"{self.file}: quantization: {key} must be a list of whole numbers")
        return found

    def inner(self, key: str, values: object) -> "QuantizationSettings":
        """Return a table inside this one, whose key is `key`."""
        if not isinstance(values, dict):
            raise CorruptModel(f"{self.file}: quantization: {key} must be a table, not {values!r:.60}")
        return QuantizationSettings(self.method, self.file, values)

    def pattern(self, text: str) -> re.Pattern[str]:
        """Compile a regular expression of the configuration."""
        try:
            return re.compile(text)
        except re.error as error:
            raise CorruptModel(f"{self.file}: quantization: {text!r:.60} is no regular expression: {error}") from None

    def _checked(self, key: str, kind: type, words: str) -> Any:
        value = self.values[key]
        if type(value) is not kind:
            raise CorruptModel(f"{self.file}: quantization: {key} must be {words}, not {value!r:.60}")
        return value


def find_quantization(
    config: Mapping[str, Any], read: Callable[[str], Mapping[str, Any]]
) -> QuantizationSettings | None:
    """Return how a checkpoint was quantized; None if its weights are floats.

    Args:
        config: contents of config.json.
        read: reads another JSON file of the directory; an empty table if it does not exist.
    Raises:
        UnsupportedModel: the method is not supported; the message names it.
        CorruptModel: the configuration cannot be understood.
    """
    for key in _KEYS:
        if config.get(key):
            return _settings("config.json", config[key], None)
    for file, method in _OTHER_FILES.items():
        if table := read(file):
            return _settings(file, table, method)
    return None


def _settings(file: str, table: object, default: str | None) -> QuantizationSettings:
    if not isinstance(table, dict):
        raise CorruptModel(f"{file}: the quantization must be a table, not {table!r:.60}")
    named = table.get("quant_method", default)
    method = str(named).lower().replace("_", "-")
    method = _SAME.get(method, method)
    if method not in METHODS:
        raise UnsupportedModel(
            f"this checkpoint is quantized by {named!r:.60} ({file}), which is not supported; supported: "
            f"{', '.join(METHODS)}. Give one of these, or the original weights"
        )
    return QuantizationSettings(method, file, table)
