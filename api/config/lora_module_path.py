"""Parse `--lora-modules`: adapters in folders on the server's machine, in vLLM's syntax.

An item is `name=path`, or JSON with `name`, `path` and `base_model_name`.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter_store.errors import show

_KEYS = ("name", "path", "base_model_name")


@dataclass(frozen=True, slots=True)
class LoraModulePath:
    """Name an adapter to register at startup."""

    name: str
    path: Path
    # Compared with the name of the base model; a difference is only a warning.
    base_model_name: str | None = None


class ModulesRefused(Exception):
    """Report modules that cannot be served; `reasons` has a line per problem, which begins with the module's name."""

    def __init__(self, names: Sequence[str], reasons: Sequence[str]) -> None:
        super().__init__(f"--lora-modules: refused: {', '.join(names)}")
        self.reasons = list(reasons)


def parse_modules(value: object) -> tuple[LoraModulePath, ...]:
    """Parse a list of items, or one string of items as a shell would split it.

    Raises:
        ValueError: an item has neither form, or a name appears twice.
    """
    items = _split(value) if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError("expected name=path, or JSON with name and path")
    modules = tuple(item if isinstance(item, LoraModulePath) else _parse(item) for item in items if item != "")
    names = [module.name for module in modules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{show(twice[0])} is given twice; give each name one folder")
    return modules


def _split(text: str) -> list[Any]:
    stripped = text.strip()
    if not stripped.startswith(("[", "{")):
        return list(shlex.split(stripped))
    value = _json(stripped)
    return value if isinstance(value, list) else [value]


def _parse(item: object) -> LoraModulePath:
    value = _json(item) if isinstance(item, str) and item.lstrip().startswith("{") else item
    if isinstance(value, dict):
        return _from_json(value)
    name, equals, path = value.partition("=") if isinstance(value, str) else ("", "", "")
    if not (name and equals and path):
        raise ValueError(f'{show(item)} is neither name=path nor {{"name": ..., "path": ...}}')
    return LoraModulePath(name, Path(path))


def _from_json(value: dict[str, Any]) -> LoraModulePath:
    if unknown := sorted(value.keys() - set(_KEYS)):
        raise ValueError(f"{show(unknown[0])} is unknown; known: {', '.join(_KEYS)}")
    for key in _KEYS:
        found = value.get(key)
        if not (isinstance(found, str) and found) and not (key == "base_model_name" and found is None):
            raise ValueError(f"{key} must be a non-empty string, not {show(found)}")
    return LoraModulePath(value["name"], Path(value["path"]), value.get("base_model_name"))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{show(text)} is not JSON: {error}") from None
