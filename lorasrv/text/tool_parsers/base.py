"""Define tools, the parts of an answer, and the helpers shared by their readers, independent of HTTP and templates."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

MAX_DEPTH = 64
"""Deepest nesting of arguments, as of the bodies that repeat them."""
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Tool:
    """Describe a tool that the model may call."""

    name: str
    # JSON schema of the arguments, an object.
    parameters: Mapping[str, Any]
    # Enforce the schema also where the model may choose not to call a tool.
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Hold one call of a tool."""

    name: str
    # JSON text of an object.
    arguments: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Hold a piece of the reasoning that precedes an answer."""

    text: str


Part = str | ToolCall | Reasoning
"""Part of an answer: text, a call or reasoning."""


class ToolReader(Protocol):
    """Read one answer as it streams; anything that is not a call is returned as text."""

    def push(self, text: str) -> list[Part]:
        """Add text of the answer and return the parts that are now certain."""

    def flush(self) -> list[Part]:
        """Return the remaining parts after the end of the answer."""


class TextReader:
    """Return the whole answer as text, for requests without tools."""

    def push(self, text: str) -> list[Part]:
        return [text] if text else []

    def flush(self) -> list[Part]:
        return []


def read_call(value: Any, names: frozenset[str], keys: Sequence[str]) -> ToolCall | None:
    """Read a call from `{"name": ..., KEY: {...}}`.

    Args:
        value: parsed JSON.
        names: tools on offer.
        keys: accepted names of the arguments' key, preferred first.

    Returns: None if the tool is not on offer, or there are no arguments that are a JSON object.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = next((value[key] for key in keys if key in value), None)
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    text = _written(arguments) if isinstance(arguments, dict) else None
    return None if text is None else ToolCall(value["name"], text)


def _written(arguments: Any) -> str | None:
    """Return arguments as JSON text that a later request may repeat, half a pair of surrogates as U+FFFD.

    Returns: None if a number is too large for JSON, or they are nested too deep.
    """
    level = [arguments]
    for _ in range(MAX_DEPTH):
        values = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
        level = [each for each in values if isinstance(each, dict | list)]
    if level:
        return None
    try:
        return _SURROGATES.sub("\ufffd", json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


def parse_json(text: str) -> Any:
    """Parse strict JSON; return None if the text is not valid."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def refuse_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity, which are not JSON (for `json`'s `parse_constant`).

    Raises: ValueError.
    """
    raise ValueError(name)


def possible_beginning(text: str, marker: str) -> int:
    """Return how many characters at the end of the text may be the beginning of the marker."""
    tail = text[-len(marker) + 1 :]
    # Most texts do not even have its first character there.
    begins = range(len(tail)) if marker[0] in tail else ()
    return next((len(tail) - begin for begin in begins if marker.startswith(tail[begin:])), 0)
