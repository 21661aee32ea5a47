"""Whether a finite value can satisfy a JSON schema: `{"required": ["next"], "properties": {"next": {"$ref": "#"}}}` has
only endless ones, and a model that is held to it would write until its tokens are used up."""

from collections.abc import Mapping
from typing import Any

MAX_VISITS = 10_000
MAX_LEVELS = 150
"""Schemas inside one another, references followed: Python's own stack is not much deeper."""


def can_end(root: Mapping[str, Any]) -> bool:
    """False only if it is certain: whatever is unclear, or too large to look through, may end."""
    return _Walk(root).ends(root, frozenset())


class _Walk:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._visits = 0
        self._level = 0

    def ends(self, schema: Any, inside: frozenset[str]) -> bool:
        """`inside`: references that are being followed; one that leads back to itself does not end that way."""
        self._visits += 1
        if self._visits > MAX_VISITS or self._level >= MAX_LEVELS:
            return True
        if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
            return True
        self._level += 1
        ends = self._every_part_ends(schema, inside)
        self._level -= 1
        return ends

    def _every_part_ends(self, schema: Mapping[str, Any], inside: frozenset[str]) -> bool:
        ref = schema.get("$ref")
        if isinstance(ref, str):
            if ref in inside:
                return False
            if not self.ends(self._target(ref), inside | {ref}):
                return False
        for name, needed in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            parts = schema.get(name)
            if isinstance(parts, list) and parts and not needed(self.ends(part, inside) for part in parts):
                return False
        return all(self.ends(part, inside) for part in _needed(schema))

    def _target(self, ref: str) -> Any:
        if not ref.startswith("#"):
            return True
        found: Any = self._root
        for name in ref[1:].split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                return True
            found = found[name]
        return found


def _needed(schema: Mapping[str, Any]) -> list[Any]:
    """Schemas of what every value must contain."""
    if schema.get("type") == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            return [properties[name] for name in required if isinstance(name, str) and name in properties]
    if schema.get("type") == "array":
        least, prefix = schema.get("minItems"), schema.get("prefixItems")
        items = list(prefix) if isinstance(prefix, list) else []
        if isinstance(least, int):
            return items[:least] + ([schema.get("items", True)] if least > len(items) else [])
    return []
