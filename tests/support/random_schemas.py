"""Random JSON schemas whose values are all short, so that answers end. A seed always gives the same schema."""

import random
from collections.abc import Callable
from typing import Any

WORDS = ("id", "name", "tags", "größe", "a b", 'q"uote', "x\\y", "n", "list", "emoji😀")


def random_schema(seed: int) -> dict[str, Any]:
    """Return a schema of objects, arrays, texts, numbers, enums, references and alternatives, at most three deep."""
    chance = random.Random(seed)
    schema = _schema(chance, 2)
    if chance.random() < 0.3:
        schema = {
            "type": "object",
            "properties": {
                "first": {"$ref": "#/$defs/part"},
                "rest": {"type": "array", "maxItems": 2, "items": schema},
            },
            "required": ["first"],
            "additionalProperties": False,
            "$defs": {"part": _schema(chance, 1)},
        }
    return schema


def _schema(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[Callable[[random.Random, int], dict[str, Any]]] = [_text, _integer, _enum, _plain]
    if depth:
        kinds += [_object, _object, _array, _any]
    return chance.choice(kinds)(chance, depth)


def _text(chance: random.Random, _: int) -> dict[str, Any]:
    patterns = ["^[a-c]{2,4}$", "^(yes|no)$", r"^\d{1,3}-x$"]
    if chance.random() < 0.3:
        return {"type": "string", "pattern": chance.choice(patterns)}
    least = chance.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(5)}


def _integer(chance: random.Random, _: int) -> dict[str, Any]:
    least = chance.randrange(-100, 100)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randrange(500)}


def _enum(chance: random.Random, _: int) -> dict[str, Any]:
    values: list[Any] = [None, True, 1.5, -7, "größer", 'a"b', "\n", [1, {"k": "v"}], {"deep": [None]}]
    return {"enum": chance.sample(values, chance.randrange(1, 5))}


def _plain(chance: random.Random, _: int) -> dict[str, Any]:
    return chance.choice([{"type": "boolean"}, {"type": "null"}, {"const": chance.randrange(10)}])


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(WORDS, chance.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: _schema(chance, depth - 1) for name in names},
        "required": chance.sample(names, chance.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(3)
    items = _schema(chance, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + chance.randrange(3)}


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(chance, depth - 1) for _ in range(chance.randrange(2, 4))]}
