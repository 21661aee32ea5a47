"""Describe in plain words why pydantic refuses a value, and what would be valid."""

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
    "enum": "must be {expected}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
}
"""Type of a problem -> its text, with placeholders for values of the problem's context."""
_EXAMPLES: Mapping[str, str] = {
    "adapters": '{"id": "x", "weight": 1}',
    "messages": '{"role": "user", "content": "Hello"}',
    "tool_choice": '{"type": "function", "function": {"name": "x"}}',
    "response_format": '{"type": "json_object"}',
    "speculation": '{"max_draft": 4}, or true or false',
    "stream_options": '{"include_usage": true}',
}
"""Field that is an object, or a list of objects -> example of such an object."""
_LIST = re.compile(r"list\[(.+)\]")
_SEVERAL = {"str": "texts", "int": "whole numbers", "float": "numbers", "bool": "switches"}


def problem_text(problem: Mapping[str, Any]) -> str:
    """Describe what is wrong with a field and what would be valid."""
    kind, context = problem.get("type", ""), problem.get("ctx", {})
    match kind:
        case "too_long" if (given := context["actual_length"]) is not None:
            return f"has {_counted(given, 'entry', 'entries')}; at most {context['max_length']} are allowed"
        case "too_short":
            given = context["actual_length"]
            return f"has {_counted(given, 'entry', 'entries')}; at least {context['min_length']} must be given"
        case "string_too_short":
            return f"must have at least {_counted(context['min_length'], 'character', 'characters')}"
        case "string_too_long":
            return f"must have at most {_counted(context['max_length'], 'character', 'characters')}"
        case "list_type":
            return f"{_MUST}{_listed(str(problem['loc'][-1]) if problem['loc'] else '')}"
        # FastAPI's validation reports the second type.
        case "model_type" | "model_attributes_type" if example := _EXAMPLES.get(_field(problem["loc"])):
            return f"{_MUST}an object such as {example}"
    text = _TEXTS.get(kind)
    if text is None:
        return str(problem["msg"]).removeprefix("Value error, ")
    # If the field is a float, a bound of 4 is 4.0.
    is_whole = {name: isinstance(value, float) and value.is_integer() for name, value in context.items()}
    return text.format(**{name: int(value) if is_whole[name] else value for name, value in context.items()})


def merged(texts: Iterable[str]) -> str:
    """Join the problems of one field to one text: a field of several possible types has a problem for each type."""
    different = list(dict.fromkeys(texts))
    allowed = [text.removeprefix(_MUST) for text in different if text.startswith(_MUST)]
    others = [text for text in different if not text.startswith(_MUST)]
    return ", or ".join([*([_MUST + _either(allowed)] if allowed else []), *others])


def without_other_types(problems: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, list[Mapping[str, Any]]]:
    """Remove complaints about a field's type if a problem inside it shows that one of its possible types was meant.

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


def _field(location: tuple[int | str, ...]) -> str:
    """Return the innermost field of a location, which may end with indices and names of a union's branches."""
    names = (part for part in reversed(location) if isinstance(part, str) and part.isidentifier())
    return next((name for name in names if name[0].islower()), "")


def _listed(branch: str) -> str:
    """Describe a list by the name of a union's branch, such as `list[list[int]]`; other names give "a list"."""
    found = _LIST.fullmatch(branch)
    return f"a list of {_several(found[1])}" if found else "a list"


def _several(kind: str) -> str:
    found = _LIST.fullmatch(kind)
    return f"lists of {_several(found[1])}" if found else _SEVERAL.get(kind, "objects")


def _either(parts: list[str]) -> str:
    if len(parts) < 3:
        return ", or ".join(parts)
    return f"{', '.join(parts[:-1])}, or {parts[-1]}"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
