"""Say in plain words what is wrong with a value that pydantic refuses, and what would be right."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_MUST = "must be "
_TEXTS: Mapping[str, str] = {
    "extra_forbidden": "is no field here; correct its name, or leave it out",
    "missing": "is required",
    "union_tag_not_found": "its field {discriminator} is required",
    "union_tag_invalid": "its field {discriminator} must be one of {expected_tags}, not {tag!r}",
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "string_too_short": "must be at least {min_length} characters long",
    "string_too_long": "must be at most {max_length} characters long",
}
"""Type of a problem -> what to say, with values of the problem's context."""
_EXAMPLES: Mapping[str, str] = {
    "AdapterWeight": '{"id": "x", "weight": 1}',
    "Message": '{"role": "user", "content": "Hello"}',
    "NamedChoice": '{"type": "function", "function": {"name": "x"}}',
    "ResponseFormat": '{"type": "json_object"}',
    "StreamOptions": '{"include_usage": true}',
}
"""Class of an object -> one of its values."""
_LIST = re.compile(r"list\[(.+)\]")
_SEVERAL = {"str": "texts", "int": "whole numbers", "float": "numbers", "bool": "switches"}


def problem_text(problem: Mapping[str, Any]) -> str:
    """Say what is wrong with a field; sizes in the singular where there is one."""
    kind, context = problem.get("type", ""), problem.get("ctx", {})
    match kind:
        case "too_long" if (given := context["actual_length"]) is not None:
            return f"has {_entries(given)}; at most {context['max_length']} are allowed"
        case "too_short":
            return f"has {_entries(context['actual_length'])}; at least {context['min_length']} must be given"
        case "list_type":
            return f"{_MUST}{_listed(str(problem['loc'][-1]) if problem['loc'] else '')}"
        case "model_type" if (example := _EXAMPLES.get(context["class_name"])) is not None:
            return f"{_MUST}an object such as {example}"
    text = _TEXTS.get(kind)
    return str(problem["msg"]).removeprefix("Value error, ") if text is None else text.format(**context)


def merged(texts: Iterable[str]) -> str:
    """Return the problems of one field in a sentence: a field of several types has one with each."""
    different = list(dict.fromkeys(texts))
    allowed = [text.removeprefix(_MUST) for text in different if text.startswith(_MUST)]
    others = [text for text in different if not text.startswith(_MUST)]
    return ", or ".join([*([_MUST + _either(allowed)] if allowed else []), *others])


def without_other_types(problems: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, list[Mapping[str, Any]]]:
    """Leave out that a field has not another type, where its type is right and something in it is wrong.

    Args:
        problems: name of a field -> its problems.
    """
    inner = tuple(problems)
    return {
        name: found
        for name, found in problems.items()
        if not all(problem.get("type", "").endswith("_type") for problem in found)
        or not any(other.startswith((f"{name}[", f"{name}.")) for other in inner)
    }


def _listed(branch: str) -> str:
    """Describe a list by the name of a union's branch, such as `list[list[int]]`; without one it is any list."""
    found = _LIST.fullmatch(branch)
    return f"a list of {_several(found[1])}" if found else "a list"


def _several(kind: str) -> str:
    found = _LIST.fullmatch(kind)
    return f"lists of {_several(found[1])}" if found else _SEVERAL.get(kind, "objects")


def _either(parts: list[str]) -> str:
    if len(parts) < 3:
        return ", or ".join(parts)
    return f"{', '.join(parts[:-1])}, or {parts[-1]}"


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"
