"""Fields that are refused by name unless their value asks for nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from lorasrv.errors import InvalidRequest


def refuse_unless_inert(
    fields: Mapping[str, Any] | None, inert: Mapping[str, Sequence[Any]], within: str | None = None
) -> None:
    """Raises: InvalidRequest: a field of the table `inert` has none of its values there; `param` names it, or the
    field `within` which it stands.
    """
    for name, value in (fields or {}).items():
        if not any(_same(value, nothing) for nothing in inert.get(name, (value,))):
            shown = f"{within}.{name}" if within else name
            raise InvalidRequest(f"{shown} is not supported by this server yet; leave it out", param=within or name)


def _same(value: Any, inert: Any) -> bool:
    """Equality of JSON values: unlike in Python, true is not 1."""
    return isinstance(value, bool) == isinstance(inert, bool) and bool(value == inert)
