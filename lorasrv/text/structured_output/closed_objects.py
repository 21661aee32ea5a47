"""Close the objects of a JSON schema: each has only the properties that its schema lists, unless the schema says which
others it may have.

The rule is that of OpenAI's strict mode. Combinations stay open: if each part of an `allOf` were closed, as vLLM's
`disable_additional_properties` does, it would exclude the properties of the other parts. An answer that fits the closed
schema also fits the schema as it was given, and closing never makes a schema impossible to satisfy.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import permutations, product
from typing import Any

from lorasrv.text.structured_output.satisfiability import pointer_names, target_of
from lorasrv.text.structured_output.schema_checks import DATA, DEFINITIONS, ENFORCED_DATA, NAMED_SCHEMAS, schemas_in

MAX_STEPS = 20_000
"""Most comparisons of parts of `oneOf`, some 0.1 s; a schema that needs more stays as it was given."""
MAX_LEVELS = 32
"""Depth of alternatives in a part of a `oneOf`, references followed."""
_IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
"""Keywords whose schemas apply to the same value."""
_SAYS_WHICH = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"})
_TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})
_ABOUT_PARTS = (_SAYS_WHICH | ENFORCED_DATA) | {
    "properties",
    "required",
    "minProperties",
    "maxProperties",
    "items",
    "prefixItems",
    "additionalItems",
}
"""Keywords about the properties and items of a value."""

_Literals = frozenset[tuple[str, Any]]
"""Values with their types, which tell true from 1."""


class _UnclearError(Exception):
    """Signal a schema that stays as it was given."""


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of checked depth with closed objects, except in combinations.

    A schema stays as it was given if references do not tell clearly what belongs to a combination, or parts of `oneOf`
    take long to compare.
    """
    try:
        closed: dict[str, Any] = _Closing(schema).closed(schema)
    except _UnclearError:
        return schema
    return closed


class _Closing:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        word = "id" if "draft-04" in str(root.get("$schema")) else "$id"
        self._has_bases = any(part is not root and _is_base(part.get(word)) for part in schemas_in(root))
        self._left = MAX_STEPS
        # The identities of schemas that stay as they are; the root keeps them.
        self._given: set[int] = set()
        # By the identity of the schemas of properties.
        self._choices_of: dict[int, _Literals | None] = {}
        one_ofs = []
        for schema in schemas_in(root):
            if "oneOf" in pointer_names(str(schema.get("$ref"))):
                raise _UnclearError
            if _is_combination(schema):
                self._keep(schema)
            elif "oneOf" in schema:
                one_ofs.append(schema)
            elif "properties" in schema and "patternProperties" in schema:
                # A listed property may match a pattern, too.
                self._keep([*_named(schema, "properties").values(), *_named(schema, "patternProperties").values()])
        while overlapping := [each for each in one_ofs if not self._is_given(each) and not self._is_one(each["oneOf"])]:
            self._keep(overlapping)

    def closed(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        made: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in DATA:
                made[keyword] = value
            elif keyword in NAMED_SCHEMAS and isinstance(value, dict):
                made[keyword] = {name: self.closed(part) for name, part in value.items()}
            elif isinstance(value, list):
                # llguidance could not tell, of references or of closed objects, that they exclude each other.
                word = "anyOf" if keyword == "oneOf" and not self._is_given(schema) else keyword
                made[word] = [self.closed(part) for part in value]
            else:
                made[keyword] = self.closed(value)
        if self._is_closed(schema):
            made["properties"] |= {name: True for name in _required(schema) if name not in made["properties"]}
            made["additionalProperties"] = False
        return made

    def _is_given(self, schema: Mapping[str, Any]) -> bool:
        return id(schema) in self._given

    def _is_closed(self, schema: Mapping[str, Any]) -> bool:
        is_list = isinstance(schema.get("properties"), dict)
        return is_list and not _SAYS_WHICH & schema.keys() and not self._is_given(schema)

    def _keep(self, schema: Any) -> None:
        """Leave a schema as it is, and all that belongs to it."""
        todo = [schema]
        while todo:
            found = todo.pop()
            if isinstance(found, list):
                todo += found
            elif isinstance(found, dict) and not self._is_given(found):
                self._given.add(id(found))
                for keyword, value in found.items():
                    if keyword == "$ref":
                        todo.append(self._target(value))
                    elif keyword in NAMED_SCHEMAS and isinstance(value, dict):
                        todo += value.values() if keyword not in DEFINITIONS else ()
                    elif keyword not in DATA:
                        todo.append(value)

    def _target(self, ref: Any) -> Any:
        """Return the schema that a reference names, if it is in this document and not an anchor."""
        target = target_of(self._root, ref) if isinstance(ref, str) and not self._has_bases else None
        if target is None:
            raise _UnclearError
        return target

    def _is_one(self, parts: Any) -> bool:
        """Return whether a value of one of the parts, as it will be, certainly satisfies no other, as it was given."""
        alternatives = [list(self._alternatives(part)) for part in _list(parts)]
        pairs = (pair for some, others in permutations(alternatives, 2) for pair in product(some, others))
        return bool(alternatives) and all(self._are_apart(one, other) for one, other in pairs)

    def _alternatives(self, schema: Any, level: int = 0) -> Iterator[Any]:
        """Yield schemas of which each value of a schema satisfies one."""
        self._spend()
        if level > MAX_LEVELS:
            raise _UnclearError
        alone = _only_combination(schema) if isinstance(schema, dict) else ""
        parts = [self._target(schema[alone])] if alone == "$ref" else _list(schema[alone]) if alone else []
        for part in parts:
            yield from self._alternatives(part, level + 1)
        if not parts:
            yield schema

    def _are_apart(self, one: Any, other: Any) -> bool:
        self._spend()
        if not isinstance(one, dict) or not isinstance(other, dict):
            return one is False or other is False
        literals, others = _literals(one), _literals(other)
        if literals is not None and others is not None:
            return not literals & others
        types = _types(one) & _types(other)
        if types != {"object"}:
            return not types
        mine, theirs = _named(one, "properties"), _named(other, "properties")
        is_closed = one.get("additionalProperties") is False and "patternProperties" not in one
        listed = {*mine, *_required(one)} if is_closed or self._is_closed(one) else None
        for name in (*_required(one), *_required(other)):
            if listed is not None and name not in listed:
                return True
            literals, others = self._choices(mine.get(name)), self._choices(theirs.get(name))
            if literals is not None and others is not None and not literals & others:
                return True
        return False

    def _choices(self, schema: Any) -> _Literals | None:
        """Return the literals that a schema allows; None if it allows other values, or containers."""
        if id(schema) not in self._choices_of:
            found = [_literals(each) if isinstance(each, dict) else None for each in self._alternatives(schema)]
            each = [literals for literals in found if literals is not None]
            self._choices_of[id(schema)] = frozenset().union(*each) if len(each) == len(found) else None
        return self._choices_of[id(schema)]

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _UnclearError


def _is_base(identifier: Any) -> bool:
    return isinstance(identifier, str) and not identifier.startswith("#")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _named(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    named = schema.get(keyword)
    return named if isinstance(named, dict) else {}


def _required(schema: Mapping[str, Any]) -> list[str]:
    return [name for name in _list(schema.get("required")) if isinstance(name, str)]


def _is_combination(schema: Mapping[str, Any]) -> bool:
    """Return whether several schemas say something about the parts of a value, or literals do."""
    return bool(ENFORCED_DATA & schema.keys() or (_IN_PLACE & schema.keys() and not _only_combination(schema)))


def _only_combination(schema: Mapping[str, Any]) -> str:
    """Return the keyword beside which a schema says nothing about the parts of a value, if there is one."""
    keywords = [*(_IN_PLACE | _ABOUT_PARTS) & schema.keys()]
    is_one = len(keywords) == 1 and (keywords != ["allOf"] or len(_list(schema["allOf"])) == 1)
    return keywords[0] if is_one and keywords[0] in _IN_PLACE else ""


def _literals(schema: Mapping[str, Any]) -> _Literals | None:
    """Return the only values of a schema; None if it does not list them, or if there are containers."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, dict | list) for value in values):
        return None
    return frozenset((_type_of(value), value) for value in values)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema's values may have, or more."""
    if (literals := _literals(schema)) is not None:
        return {kind for kind, _ in literals}
    kinds = schema.get("type", _TYPES)
    named = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(named, Collection):
        raise _UnclearError
    return {"number" if kind == "integer" else str(kind) for kind in named}


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "string" if isinstance(value, str) else "number"
