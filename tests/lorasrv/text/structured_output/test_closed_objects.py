"""Ask llguidance itself what closed objects allow and exclude, and that closing does nothing else."""

import json
import random
from collections.abc import Iterator
from itertools import islice, permutations, product
from typing import Any

import jsonschema_rs
import llguidance
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lorasrv.errors import InvalidRequest
from lorasrv.text.structured_output import grammar as source
from lorasrv.text.structured_output.closed_objects import close_objects
from lorasrv.text.structured_output.matcher import Vocabulary, compile_matcher

ALPHABET = b'{}[]:,"-019abklnrsuftez '
TRIE = Vocabulary((b"<end>", *(bytes([byte]) for byte in ALPHABET)), (0,), (0,)).build()
OPEN = {"type": "object"}
TEXT = {"enum": ["s", "t"]}
NUMBER = {"type": "integer"}


def of(*required: str, **properties: Any) -> dict[str, Any]:
    listed = {"type": "object", "properties": properties}
    return {**listed, "required": [*required]} if required else listed


def matcher_of(grammar: str) -> llguidance.LLMatcher | None:
    """Return the matcher of a grammar, None if it is refused."""
    matcher = compile_matcher(TRIE, grammar)
    matcher.compute_bitmask()
    return None if matcher.get_error() else matcher


def follows(matcher: llguidance.LLMatcher, value: Any) -> bool:
    """Return whether a value may be written, with the properties of its objects in some order."""
    for text in islice(written(value), 500):
        reader = matcher.deep_copy()
        if all(reader.consume_token(1 + ALPHABET.index(byte)) for byte in text.encode()) and reader.is_accepting():
            return True
    return False


def written(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for names in permutations(value):
            for parts in product(*(list(islice(written(value[name]), 24)) for name in names)):
                yield "{" + ",".join(f'"{name}":{part}' for name, part in zip(names, parts, strict=True)) + "}"
    elif isinstance(value, list):
        for parts in product(*(list(islice(written(part), 24)) for part in value)):
            yield "[" + ",".join(parts) + "]"
    else:
        yield json.dumps(value)


A, B, N = of(a=TEXT), of(b=NUMBER), of("k", k={"const": "n"})
NAMED: dict[str, Any] = {"$defs": {"A": A, "B": B, "X": of(b=NUMBER, l={"$ref": "#/$defs/A"})}}
TREE = of("a", a=TEXT, l={"type": "array", "items": {"$ref": "#"}})
CAT, DOG = of("k", k={"const": "a"}, a=TEXT), of("k", k={"const": "b"}, b=NUMBER)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, [{}, {"a": "s"}], [{"b": 1}, {"a": "s", "b": 1}]),
        (of(), [{}], [{"a": 1}]),
        ({"properties": {"a": TEXT}}, [{"a": "s"}, 1], [{"b": 1}]),
        (OPEN, [{}, {"b": [{"a": 1}]}], []),
        ({**A, "additionalProperties": True}, [{"a": "s", "b": 1}], []),
        ({**A, "additionalProperties": NUMBER}, [{"b": 1}], [{"b": "s"}]),
        ({"type": "object", "additionalProperties": A}, [{"b": {"a": "s"}}], [{"b": {"b": 1}}]),
        ({**A, "patternProperties": {"^b": NUMBER}}, [{"a": "s", "bb": 1, "k": {}}], [{"b": "s"}]),
        # What is only required may be anything.
        ({**A, "required": ["b"]}, [{"b": "s"}, {"a": "s", "b": {"k": 1}}], [{"b": 1, "k": 1}]),
        # At every depth.
        (of(k=A, l={"items": A}), [{"k": {"a": "s"}, "l": [{}]}], [{"k": {"b": 1}}, {"l": [{"b": 1}]}]),
        ({"type": "array", "prefixItems": [A], "items": B}, [[{"a": "s"}, {"b": 1}]], [[{"b": 1}], [{}, {"a": 1}]]),
        (of(k={"$ref": "#/$defs/A"}) | NAMED, [{"k": {"a": "s"}}], [{"k": {"b": 1}}, {"b": 1}]),
        (TREE, [{"a": "s", "l": [{"a": "t"}]}], [{"a": "s", "l": [{"a": "t", "b": 1}]}]),
        ({"anyOf": [A, {"type": "null"}]}, [{"a": "s"}, None], [{"b": 1}]),
        ({"anyOf": [{"$ref": "#/$defs/A"}, B], **NAMED}, [{"a": "s"}, {"b": 1}], [{"a": "s", "b": 1}]),
        ({"allOf": [{"$ref": "#/$defs/A"}], "default": {}, **NAMED}, [{"a": "s"}], [{"b": 1}]),
        ({"$ref": "#num", "$defs": {"A": {"$anchor": "num", **A}}}, [{"a": "s"}], [{"b": 1}]),
        ({**of(l=A), "$defs": {"A": {"$id": "http://a/b", **A}}}, [{"l": {"a": "s"}}], [{"b": 1}]),
        # Combinations stay open, with all that belongs to them.
        ({"allOf": [A, B]}, [{"a": "s", "b": 1}, {"k": 1}], []),
        (of(k={"$ref": "#/$defs/A", **B}, l=B) | NAMED, [{"k": {"a": "s", "k": 1}}], [{"z": 1}, {"l": {"k": 1}}]),
        ({**A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"b": 1, "k": 1}], [{"k": 1}]),
        ({"allOf": [of(k=of("a", a=TEXT)), of(k=of("b", b=NUMBER))]}, [{"k": {"a": "s", "b": 1}}], []),
        (
            {**of(l={"$ref": "#/$defs/X"}, k={"allOf": [B, {"$ref": "#/$defs/X"}]}), **NAMED},
            [{"l": {"k": 1}}, {"k": {"l": {"b": 1}}}],
            [{"z": 1}],
        ),
        ({**of(k=of("a", a=TEXT)), "patternProperties": {"^k": of("b", b=NUMBER)}}, [{"k": {"a": "s", "b": 1}}], []),
        ({**of(k=A), "const": {"k": {"b": 1}}}, [{"k": {"b": 1}}], [{"k": {}}]),
        # Parts of a oneOf are closed if they exclude each other.
        ({"oneOf": [CAT, DOG]}, [{"k": "a", "a": "s"}, {"k": "b"}], [{"k": "a", "b": 1}]),
        (
            {"oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}], "$defs": {"C": CAT, "D": DOG}},
            [{"k": "a", "a": "s"}, {"k": "b"}],
            [{"k": "a", "b": 1}],
        ),
        ({"oneOf": [{"oneOf": [CAT, DOG]}, N, {"type": "null"}]}, [{"k": "b"}, None], [{"k": "n", "b": 1}]),
        ({"oneOf": [of("a", a=TEXT), of("b", b=NUMBER)]}, [{"a": "s"}, {"b": 1}], [{"a": "s", "b": 1}, {}]),
        ({**of(l=TEXT), "oneOf": [CAT, DOG]}, [{"k": "a", "l": "s", "z": 1}], [{"k": "n"}]),
        # llguidance can tell that these exclude each other: they are left to it.
        ({"oneOf": [of("k", k=CAT), of("k", k=DOG)]}, [{"k": {"k": "a", "b": 1}, "b": 1}], [{"k": {"k": "n"}}]),
    ],
)  # fmt: skip
def test_an_object_has_the_properties_that_its_schema_lists(schema: Any, good: list[Any], bad: list[Any]) -> None:
    matcher = matcher_of(source.json_of(schema, "p").text)
    assert matcher is not None
    assert [value for value in good if not follows(matcher, value)] == []
    assert [value for value in bad if follows(matcher, value)] == []
    assert all(jsonschema_rs.is_valid(schema, value) for value in good)


@pytest.mark.parametrize(
    "parts",
    [
        # `{"a": "s"}` satisfies both, as they were given.
        [of("a", a=TEXT), B],
        [of("k", k=of("a", a=TEXT)), of("k", k=B)],
        [of("k", k={"const": 1}), of("k", k={"const": 1.0})],
        [{**of("k", k=of("a", a=TEXT)), "allOf": [of(k=B)]}, of("k", k=of("b", b=NUMBER))],
        [{**of("a", a=TEXT), "additionalProperties": True}, of("b", b=NUMBER)],
        [{"anyOf": [A, of("b", b=TEXT)], "required": ["a"]}, of("b", b=NUMBER)],
    ],
)
def test_parts_of_a_one_of_that_overlap_are_refused_though_they_would_not_if_they_were_closed(parts: list[Any]) -> None:
    assert matcher_of(source.json_of({"oneOf": parts}, "p").text) is None


@pytest.mark.parametrize(
    "schema",
    [
        {**of(a={"$id": "http://a/b", **A}), "allOf": [{"$ref": "#"}, B]},
        of(a={"oneOf": [{"enum": [str(n)]} for n in range(200)]}),
        {"allOf": [{"$ref": "#anchor"}, B], "$defs": {"A": {"$anchor": "anchor", **A}}},
        {"allOf": [{"$ref": "#/none"}, B]},
        {"allOf": [{"$ref": 5}, B]},
        of(a={"oneOf": [{"type": 5}, B]}),
        of(a={"oneOf": [CAT, DOG]}, b={"$ref": "#/properties/a/oneOf/0"}),
        of(a={"oneOf": [{"$ref": "#/$defs/A"}, B]}) | {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, TEXT]}}},
    ],
    ids=["id", "too much", "anchor", "nothing", "no reference", "no type", "pointer", "loop"],
)
def test_what_is_unclear_stays_as_it_was_given(schema: Any) -> None:
    assert close_objects(schema) == schema


def test_a_schema_may_grow_beyond_the_limit_of_a_text_by_being_closed() -> None:
    schema = of(**{f"p{n}": of() for n in range(3_500)})
    assert len(json.dumps(schema)) < source.MAX_TEXT_BYTES < len(source.json_of(schema, "p").text)


NAMES = st.sampled_from("abk")
SCALARS = st.sampled_from([TEXT, NUMBER, {"type": "null"}, {"const": "s"}, {"const": 1}, {"enum": ["k", None]}, True])
OTHERS = st.sampled_from([{}] * 6 + [{"additionalProperties": other} for other in (True, False, NUMBER, A)])


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> Any:
    if not depth or draw(st.integers(0, 7)) == 0:
        return draw(SCALARS)
    inner, made = schemas(depth - 1), dict[str, Any]()
    kinds = draw(
        st.sets(st.sampled_from(["object", "object ", "array", "allOf", "anyOf", "oneOf", "$ref"]), max_size=2)
    )
    for kind in sorted(kinds):
        if kind.startswith("object"):
            made |= {"type": "object", "properties": draw(st.dictionaries(NAMES, inner, max_size=2))}
            made |= draw(OTHERS) | draw(st.sampled_from([{}, {"patternProperties": {"^b": A}}, *[{}] * 6]))
            made |= {"required": draw(st.lists(NAMES, max_size=2, unique=True))}
        elif kind == "array":
            made |= {"items": draw(inner), "maxItems": 1, **({} if "type" in made else {"type": "array"})}
        elif kind == "$ref":
            made |= {"$ref": "#/$defs/" + draw(st.sampled_from("xy"))}
        else:
            made |= {kind: draw(st.lists(inner, min_size=1, max_size=3))}
    return made


@st.composite
def documents(draw: st.DrawFn) -> Any:
    root = draw(schemas())
    return {
        **(root if isinstance(root, dict) else {"allOf": [root]}),
        "$defs": {"x": draw(schemas()), "y": draw(schemas(1))},
    }


def alternatives(schema: Any, root: Any, level: int = 0) -> list[list[dict[str, Any]]]:
    """Return the ways to satisfy a schema: for each, all schemas without combinations that a value then satisfies."""
    if not isinstance(schema, dict) or level > 6:
        return [[]] if schema is not False else []
    found = [
        [{keyword: part for keyword, part in schema.items() if keyword not in ("allOf", "anyOf", "oneOf", "$ref")}]
    ]
    sets = [alternatives(part, root, level + 1) for part in schema.get("allOf", ())]
    if "$ref" in schema:
        sets.append(alternatives(root["$defs"][schema["$ref"][-1]], root, level + 1))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            sets.append([way for part in schema[keyword] for way in alternatives(part, root, level + 1)])
    for ways in sets:
        found = [[*before, *way] for before in found for way in ways][:50]
    return found


def some_value(way: list[dict[str, Any]], root: Any, chance: random.Random, level: int = 0) -> tuple[Any, Any]:
    """Return a value that may satisfy these schemas, and the same without the properties that they do not list."""
    literals = [literal for part in way for literal in part.get("enum", [part["const"]] if "const" in part else [])]
    types = [part["type"] for part in way if "type" in part] or ["object"]

    def inside(parts: list[Any]) -> tuple[Any, Any]:
        ways = [[]]
        for part in parts:
            ways = [[*before, *more] for before in ways for more in alternatives(part, root)][:50]
        return some_value(chance.choice(ways), root, chance, level + 1) if ways and level < 6 else (0, 0)

    if literals:
        return (chance.choice(literals),) * 2
    if types[0] in ("null", "integer"):
        return (None if types[0] == "null" else 1,) * 2
    if types[0] == "array":
        item = inside([part["items"] for part in way if "items" in part])
        return chance.choice([([], []), ([item[0]], [item[1]])])
    names = sorted({name for part in way for name in (*part.get("properties", ()), *part.get("required", ()))})
    is_open = any(part.get("additionalProperties", False) is not False or "patternProperties" in part for part in way)
    is_open |= not any("properties" in part for part in way)
    whole, kept = {}, {}
    for name in [*names, chance.choice("zb")]:
        if chance.random() < 0.7:
            listed = [part["properties"][name] for part in way if name in part.get("properties", ())]
            whole[name], trimmed = inside(listed) if listed else (1, 1)
            if is_open or name in names:
                kept[name] = trimmed
    return whole, kept


def random_text(matcher: llguidance.LLMatcher, chance: random.Random) -> str | None:
    """Follow a grammar at random for a while; None if that comes to no end."""
    said, walker = bytearray(), matcher.deep_copy()
    for _ in range(120):
        mask = walker.compute_bitmask()
        allowed = [token for token in range(len(ALPHABET) + 1) if mask[token // 8] >> token % 8 & 1]
        if 0 in allowed and (chance.random() < 0.5 or allowed == [0]):
            # A property that was begun may have no value.
            return said.decode() if walker.is_accepting() else None
        closing = [token for token in allowed if token and ALPHABET[token - 1] in b'"}]ab']
        token = chance.choice([token for token in (closing if chance.random() < 0.6 else allowed) or allowed if token])
        assert walker.consume_token(token)
        said.append(ALPHABET[token - 1])
    return None


@settings(max_examples=200, deadline=None)
@given(document=documents(), seed=st.integers(0, 999))
def test_closing_only_excludes_properties_that_are_not_listed(document: Any, seed: int) -> None:
    """What the model may write is valid as the schema was given; each valid value may still be written, without the
    properties that no schema of it lists."""
    given_text = json.dumps({"grammars": [{"json_schema": document}]})
    try:
        closed = matcher_of(source.json_of(document, "p").text)
    except InvalidRequest:
        assume(False)
    opened, valid = matcher_of(given_text), jsonschema_rs.validator_for(document).is_valid
    assert opened is None or closed is not None, "a schema is not refused because its objects are closed"
    assume(closed is not None)
    chance = random.Random(seed)
    for _ in range(5):
        text = random_text(closed, chance)
        assert text is None or valid(json.loads(text)), text
    for way in alternatives(document, document)[:10]:
        whole, kept = some_value(way, document, chance)
        satisfies = jsonschema_rs.is_valid({"allOf": way, "$defs": document["$defs"]}, whole)
        if opened is not None and satisfies and valid(whole) and valid(kept) and follows(opened, kept):
            assert follows(closed, kept), (whole, kept)
