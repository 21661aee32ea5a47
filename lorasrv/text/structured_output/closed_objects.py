"""Close the objects of a JSON schema: each has only the properties that its schema lists, unless the schema says which
others it may have.

The rule is xgrammar's strict mode, which reads a schema as if it had `unevaluatedProperties: false`; vLLM's
`disable_additional_properties` does it for llguidance, but object by object, so that parts of an `allOf` exclude each
other's properties. Here all schemas that apply to one value list its properties together. What closing leaves is always
valid for the schema as it was given, and never nothing if there was something.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import permutations
from typing import Any

from lorasrv.text.structured_output.satisfiability import pointer_names, target_of
from lorasrv.text.structured_output.schema_checks import DATA, DEFINITIONS, ENFORCED_DATA, NAMED_SCHEMAS, schemas_in

MAX_STEPS = 50_000
"""Most schemas and names to look at, some 0.5 s; a schema that needs more stays as it was given."""
MAX_LEVELS = 100
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords whose schemas apply to the same value."""
_SAYS_WHICH = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"})
_NOT_COMBINED = (_SAYS_WHICH - {"additionalProperties"} | ENFORCED_DATA) | {
    "minProperties",
    "maxProperties",
    "items",
    "prefixItems",
    "additionalItems",
}
"""Keywords that another part of a combination could contradict if objects inside were closed."""
_ABOUT_PARTS = _NOT_COMBINED | _SAYS_WHICH | {"properties", "required"}
_OF_DOCUMENT = DEFINITIONS | {"$schema", "$id", "$anchor"}
_CONTAINERS = frozenset({"object", "array"})
_TYPES = _CONTAINERS | {"string", "number", "boolean", "null"}


class _Form(Enum):
    """Name what becomes of a schema."""

    # The value's only schema.
    CLOSED = "closed"
    # One of several for the same value: only the objects inside are closed.
    PART = "part"
    # Nothing in it is closed.
    GIVEN = "given"


class _UnclearError(Exception):
    """Signal a schema that stays as it was given."""


class _KeptError(Exception):
    """Signal a combination that stays as it was given."""


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of checked depth with closed objects.

    A schema stays as it was given if parts of it have an `$id` of their own, or if it takes too long to look through.
    """
    try:
        return _Closing(schema).whole()
    except _UnclearError:
        return schema


@dataclass
class _Listed:
    """Hold the properties that the schemas of one value list."""

    # By name: None if it is only required, otherwise the types of its values.
    names: dict[str, frozenset[str] | None] = field(default_factory=dict)
    # Whether properties are listed at all.
    is_list: bool = False
    # Whether there may be others.
    is_open: bool = False
    # Whether two schemas that both apply list a property with parts: closed, they would contradict each other.
    is_mixed: bool = False


class _Closing:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._left = MAX_STEPS
        self._listed_by: dict[str, _Listed] = {}
        # By the identity of schemas, which the root keeps.
        self._followed_from: dict[int, Any] = {}
        self._types_of: dict[int, frozenset[str]] = {}
        # Schemas that references name in another form than in their place: their names, and what is still to be made.
        self._names: dict[tuple[str, _Form], str] = {}
        self._todo: list[tuple[str, Any, _Form]] = []

    def whole(self) -> dict[str, Any]:
        word = "id" if "draft-04" in str(self._root.get("$schema")) else "$id"
        if any(part is not self._root and _is_base(part.get(word)) for part in schemas_in(self._root)):
            raise _UnclearError
        made: dict[str, Any] = self._formed(self._root, _Form.CLOSED)
        added = {}
        while self._todo:
            name, schema, form = self._todo.pop()
            if isinstance(schema, dict):
                schema = {keyword: value for keyword, value in schema.items() if keyword not in _OF_DOCUMENT}
            added[name] = self._formed(schema, form)
        return {**made, "$defs": {**made.get("$defs", {}), **added}} if added else made

    def _spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise _UnclearError

    def _formed(self, schema: Any, form: _Form) -> Any:
        self._spend()
        if not isinstance(schema, dict):
            return schema
        if form is not _Form.CLOSED:
            return self._rewritten(schema, form, _Form.CLOSED if form is _Form.PART else form)
        if ENFORCED_DATA & schema.keys():
            return self._rewritten(schema, _Form.GIVEN, _Form.GIVEN)
        if not any(keyword in schema for keyword in _IN_PLACE):
            return self._closed_object(schema)
        alone = _only_combination(schema)
        if alone == "oneOf" and self._exclude_each_other(schema[alone]):
            # llguidance could not tell, of references or of closed objects.
            schema, alone = {("anyOf" if word == alone else word): value for word, value in schema.items()}, "anyOf"
        if alone and alone != "oneOf":
            return self._rewritten(schema, _Form.CLOSED, _Form.CLOSED)
        return self._closed_combination(schema)

    def _rewritten(self, schema: dict[str, Any], in_place: _Form, inside: _Form) -> dict[str, Any]:
        """Return a schema with the schemas in it: those of the same value in one form, those of its parts in
        another."""
        made: dict[str, Any] = {}
        for keyword, value in schema.items():
            form = in_place if keyword in _IN_PLACE else _Form.CLOSED if keyword in DEFINITIONS else inside
            if keyword == "oneOf" and in_place is _Form.PART:
                # What is closed may match one part where what was given matches two.
                form = _Form.GIVEN
            if keyword in DATA:
                made[keyword] = value
            elif keyword == "$ref":
                made[keyword] = self._reference(value, form)
            elif keyword in NAMED_SCHEMAS and isinstance(value, dict):
                made[keyword] = {name: self._formed(part, form) for name, part in value.items()}
            elif isinstance(value, list):
                made[keyword] = [self._formed(part, form) for part in value]
            else:
                made[keyword] = self._formed(value, form)
        return made

    def _closed_object(self, schema: dict[str, Any]) -> dict[str, Any]:
        # A listed property may match a pattern, too.
        two_lists = schema.get("patternProperties") and schema.get("properties")
        made = self._rewritten(schema, _Form.CLOSED, _Form.GIVEN if two_lists else _Form.CLOSED)
        if _is_closable(schema):
            made["properties"] |= {name: True for name in _required(schema) if name not in made["properties"]}
            made["additionalProperties"] = False
        return made

    def _closed_combination(self, schema: dict[str, Any]) -> dict[str, Any]:
        try:
            listed = self._listed(schema)
        except _KeptError:
            return self._rewritten(schema, _Form.GIVEN, _Form.GIVEN)
        forms = (_Form.GIVEN, _Form.GIVEN) if listed.is_mixed else (_Form.PART, _Form.CLOSED)
        made = self._rewritten(schema, *forms)
        if listed.is_list and not listed.is_open:
            closing = {"properties": dict.fromkeys(listed.names, True), "additionalProperties": False}
            # The last part, which leaves the properties in their order.
            made["allOf"] = [*made.get("allOf", ()), closing]
        return made

    def _reference(self, ref: Any, form: _Form) -> Any:
        names = pointer_names(ref) if isinstance(ref, str) else []
        if form is _Form.CLOSED and (not names or (len(names) == 2 and names[0] in DEFINITIONS)):
            return ref
        target, defs = self._target(ref), self._root.get("$defs", {})
        if not isinstance(defs, dict):
            raise _UnclearError
        if (ref, form) not in self._names:
            number = len(self._names)
            while (name := f"{form.value}-{number}") in defs:
                number += 1
            self._names[ref, form] = name
            self._todo.append((name, target, form))
        return f"#/$defs/{self._names[ref, form]}"

    def _target(self, ref: Any) -> Any:
        """Return the schema that a reference names, if it is in this document and not an anchor."""
        target = target_of(self._root, ref) if isinstance(ref, str) else None
        if target is None:
            raise _UnclearError
        return target

    def _followed(self, schema: Any) -> Any:
        """Return the schema that one with nothing but a reference stands for."""
        if id(schema) not in self._followed_from:
            found = schema
            for _ in range(MAX_LEVELS):
                self._spend()
                alone = _only_combination(found) if isinstance(found, dict) else ""
                if alone not in ("$ref", "allOf"):
                    break
                found = self._target(found[alone]) if alone == "$ref" else found[alone][0]
            else:
                raise _UnclearError
            self._followed_from[id(schema)] = found
        return self._followed_from[id(schema)]

    def _listed(self, schema: Any, level: int = 0) -> _Listed:
        """Return what the schemas of one value list.

        Raises:
            _KeptError: one of them says more.
        """
        self._spend()
        if not isinstance(schema, dict):
            return _Listed()
        others = schema.get("additionalProperties", False)
        if level > MAX_LEVELS or _NOT_COMBINED & schema.keys() or not isinstance(others, bool):
            raise _KeptError
        properties = _properties(schema)
        names: dict[str, frozenset[str] | None] = {name: self._types(part) for name, part in properties.items()}
        own = _Listed({**dict.fromkeys(_required(schema)), **names}, isinstance(schema.get("properties"), dict), others)
        found = [own, *(self._listed(part, level + 1) for part in _parts(schema, "allOf"))]
        if "$ref" in schema:
            found.append(self._listed_by_reference(schema["$ref"], level))
        for keyword in ("anyOf", "oneOf"):
            if parts := _parts(schema, keyword):
                found.append(self._any_listed([self._listed(part, level + 1) for part in parts]))
        return self._all_listed(found)

    def _listed_by_reference(self, ref: Any, level: int) -> _Listed:
        target = self._target(ref)
        if ref not in self._listed_by:
            self._listed_by[ref] = self._listed(target, level + 1)
        return self._listed_by[ref]

    def _all_listed(self, found: Collection[_Listed]) -> _Listed:
        """Join what schemas list that all apply."""
        names: dict[str, frozenset[str] | None] = {}
        is_mixed = False
        for listed in found:
            self._spend(len(listed.names))
            for name, types in listed.names.items():
                known = names.get(name)
                names[name] = known if types is None else types if known is None else types & known
                is_mixed |= known is not None and types is not None and bool(types & known & _CONTAINERS)
        return _joined(names, found, is_mixed=is_mixed)

    def _any_listed(self, found: Collection[_Listed]) -> _Listed:
        """Join what schemas list of which one applies: a value is only sure to have a type that each gives it."""
        names: dict[str, frozenset[str] | None] = {}
        for listed in found:
            self._spend(len(listed.names))
            for name, types in listed.names.items():
                names[name] = (names.get(name) or frozenset()) | (types or frozenset())
        for name, types in names.items():
            if types is not None and not types & _CONTAINERS and any(not each.names.get(name) for each in found):
                names[name] = None
        return _joined(names, found)

    def _types(self, schema: Any) -> frozenset[str]:
        """Return the types that a schema's values may have, or more."""
        schema = self._followed(schema)
        if id(schema) not in self._types_of:
            # Of a schema that contains itself in place.
            self._types_of[id(schema)] = _TYPES
            self._types_of[id(schema)] = self._looked_up_types(schema)
        return self._types_of[id(schema)]

    def _looked_up_types(self, schema: Any) -> frozenset[str]:
        self._spend()
        if not isinstance(schema, dict):
            return _TYPES if schema is not False else frozenset()
        if (literals := _literals(schema)) is not None:
            return frozenset(map(_type_of, literals))
        if (alone := _only_combination(schema)) and (parts := _parts(schema, alone)):
            return frozenset().union(*map(self._types, parts))
        kinds = schema.get("type", _TYPES)
        named = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(named, Collection):
            raise _UnclearError
        return frozenset("number" if kind == "integer" else str(kind) for kind in named)

    def _exclude_each_other(self, parts: Any) -> bool:
        """Return whether a value of one of the parts, closed, certainly satisfies no other, as it was given."""
        return isinstance(parts, list) and all(
            self._are_apart(one, other, is_closed=True) for one, other in permutations(parts, 2)
        )

    def _are_apart(self, one: Any, other: Any, *, is_closed: bool, level: int = 0) -> bool:
        """Return True only if certainly no value satisfies both schemas.

        Args:
            is_closed: whether objects of `one` will be closed; those of `other` are as they were given.
        """
        self._spend()
        one, other = self._followed(one), self._followed(other)
        types = self._types(one) & self._types(other)
        if not types or one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or level > MAX_LEVELS:
            return False
        literals, others = _literals(one), _literals(other)
        if literals is not None and others is not None:
            self._spend(len(literals) + len(others))
            return _differ(literals, others)
        for keyword in ("anyOf", "oneOf"):
            inner = is_closed and keyword == _only_combination(one) == "anyOf"
            mine = [(part, other, inner) for part in _parts(one, keyword)]
            theirs = [(one, part, is_closed) for part in _parts(other, keyword)]
            for pairs in (mine, theirs):
                if pairs and all(self._are_apart(a, b, is_closed=c, level=level + 1) for a, b, c in pairs):
                    return True
        if types != {"object"} or "patternProperties" in one or "patternProperties" in other:
            return False
        inner = is_closed and not {*_IN_PLACE, *ENFORCED_DATA} & one.keys()
        required = dict.fromkeys(_required(one), True)
        only: dict[str, Any] | None = {**required, **_properties(one)} if inner and _is_closable(one) else None
        return any(
            self._are_apart(
                _value(one, name) if only is None else only.get(name, False),
                _value(other, name),
                is_closed=inner,
                level=level + 1,
            )
            for name in required | dict.fromkeys(_required(other), True)
        )


def _is_base(identifier: Any) -> bool:
    return isinstance(identifier, str) and not identifier.startswith("#")


def _parts(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    parts = schema.get(keyword)
    return parts if isinstance(parts, list) else []


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: Mapping[str, Any]) -> list[str]:
    return [name for name in _parts(schema, "required") if isinstance(name, str)]


def _only_combination(schema: Mapping[str, Any]) -> str:
    """Return the keyword beside which a schema says nothing about the parts of a value, if there is one."""
    keywords = [keyword for keyword in _IN_PLACE if keyword in schema]
    is_one = len(keywords) == 1 and not _ABOUT_PARTS & schema.keys()
    return keywords[0] if is_one and (keywords != ["allOf"] or len(_parts(schema, "allOf")) == 1) else ""


def _is_closable(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema without combinations lists properties and does not say which others there may be."""
    return isinstance(schema.get("properties"), dict) and not (_SAYS_WHICH | ENFORCED_DATA) & schema.keys()


def _value(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of a property's values."""
    return _properties(schema).get(name, schema.get("additionalProperties", True))


def _literals(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return _parts(schema, "enum") if "enum" in schema else None


def _differ(some: list[Any], others: list[Any]) -> bool:
    """Return whether no value is in both lists; containers are not compared."""
    if any(isinstance(value, dict | list) for value in (*some, *others)):
        return False
    return not {(_type_of(value), value) for value in some} & {(_type_of(value), value) for value in others}


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _joined(names: dict[str, frozenset[str] | None], found: Collection[_Listed], *, is_mixed: bool = False) -> _Listed:
    return _Listed(
        names,
        any(each.is_list for each in found),
        any(each.is_open for each in found),
        is_mixed or any(each.is_mixed for each in found),
    )
