"""Refuse keywords of a JSON schema that llguidance would enforce only in part, or differently from the schema."""

from collections.abc import Iterator, Mapping
from typing import Any

from lorasrv.errors import InvalidRequest
from lorasrv.text.structured_output.satisfiability import MAX_REPETITIONS, child, pointer_names, repetitions

DEFINITIONS = frozenset({"$defs", "definitions"})
NAMED_SCHEMAS = DEFINITIONS | {"properties", "patternProperties", "dependentSchemas"}
"""Keywords whose values are schemas by name."""
ENFORCED_DATA = frozenset({"const", "enum"})
DATA = ENFORCED_DATA | {"default", "examples", "example"}
"""Keywords whose values are not schemas."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_IDS = 32
"""Most `$id`s: every reference may be relative to each of them."""
MAX_NUMBER = 2**53
"""Largest number: llguidance computes with floats, which are exact up to here."""


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """Check a schema of checked depth, with all schemas inside it.

    Raises:
        InvalidRequest: a pattern is too large, a number is not exact in a float, more properties are demanded than are
            named as required, too many parts have an `$id`, or a reference points into literal data, which is not
            checked.
    """
    bases = [schema, *(part for part in schemas_in(schema) if "$id" in part)]
    if (num_ids := len(bases) - 1) > MAX_IDS:
        why = f"{{param}}: {num_ids} parts have an $id, more than {MAX_IDS}; refer to them by #/$defs/... instead"
        raise InvalidRequest(why, param=param)
    for part in schemas_in(schema):
        ref = part.get("$ref")
        if isinstance(ref, str) and any(_is_in_data(base, ref) for base in bases):
            raise InvalidRequest(
                f"{{param}}: $ref {ref[:60]!r} points into const, enum, default or examples, which are no schemas; put "
                "it into $defs",
                param=param,
            )
        named = part.get("patternProperties")
        for pattern in (part.get("pattern"), *(named if isinstance(named, Mapping) else ())):
            if isinstance(pattern, str):
                check_repetitions(pattern, param)
        for number in _numbers([part.get(name) for name in (*_BOUNDS, *ENFORCED_DATA)]):
            if abs(number) > MAX_NUMBER:
                raise InvalidRequest(
                    f"{{param}}: the number {number} cannot be enforced exactly, only those up to 2^53; use a string",
                    param=param,
                )
        _check_min_properties(part, param)


def check_repetitions(pattern: str, param: str) -> None:
    """Check that a regular expression does not have too many characters, each counted as often as it is repeated.

    Raises:
        InvalidRequest: it has too many.
    """
    if (count := repetitions(pattern)) > MAX_REPETITIONS:
        raise InvalidRequest(
            f"{{param}}: {pattern[:60]!r} has {count} characters, each as often as it is repeated, more than"
            f" {MAX_REPETITIONS}",
            param=param,
        )


def _check_min_properties(schema: Mapping[str, Any], param: str) -> None:
    """Refuse a `minProperties` that repeated values of one name would satisfy, although they are one property."""
    least, required = schema.get("minProperties"), schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if isinstance(least, int | float) and least > len(names):
        raise InvalidRequest(
            f"{{param}}: minProperties {least} is enforced for properties in `required` alone, which are {len(names)}",
            param=param,
        )


def _is_in_data(base: Any, ref: str) -> bool:
    """Return whether a reference's pointer, followed from a schema, passes a keyword of literal data."""
    at, are_names = base, False
    for name in pointer_names(ref):
        is_keyword = isinstance(at, Mapping) and name in at and not are_names
        if is_keyword and name in DATA:
            return True
        at, are_names = child(at, name), is_keyword and name in NAMED_SCHEMAS
    return False


def schemas_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and the schemas inside it, except those in literal data."""
    todo = [schema]
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo += item
        elif isinstance(item, Mapping):
            yield item
            for keyword, value in item.items():
                if keyword in NAMED_SCHEMAS and isinstance(value, Mapping):
                    todo += value.values()
                elif keyword not in DATA:
                    todo.append(value)


def _numbers(value: Any) -> Iterator[float]:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, int | float) and not isinstance(item, bool):
            yield item
        elif isinstance(item, list):
            todo += item
        elif isinstance(item, Mapping):
            todo += item.values()
