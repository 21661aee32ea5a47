"""A tool, a call of it, and what readers of calls have in common. No HTTP, no template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters` is the JSON schema of its arguments, an object. `is_strict`: they follow it also where the model may
    call or not; else they are the model's own affair there."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text of an object."""

    name: str
    arguments: str


Part = str | ToolCall
"""Of an answer: text, or a call."""


class ToolReader(Protocol):
    """Reads one answer as it comes. What turns out to be no call comes out as the text that it is."""

    def push(self, text: str) -> list[Part]:
        """More of the answer; the parts that have become certain."""

    def flush(self) -> list[Part]:
        """The answer has ended: the rest."""


def read_call(value: Any, names: frozenset[str], keys: Sequence[str]) -> ToolCall | None:
    """A call from `{"name": ..., KEY: {...}}`, None if it is none: of no tool on offer, or without arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = next((value[key] for key in keys if key in value), None)
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def parse_json(text: str) -> Any:
    """None if it is no strict JSON."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def refuse_constant(name: str) -> NoReturn:
    """For `json`: NaN and Infinity are not JSON. Raises: ValueError."""
    raise ValueError(name)


def possible_beginning(text: str, marker: str) -> int:
    """How much of the text's end may be the beginning of the marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)
