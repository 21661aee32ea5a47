"""Convert structured output options into one grammar text for llguidance, without compiling it.

This module checks everything that the text alone decides: size, depth, counted repetitions, schemas that no finite
value satisfies. The rest is tested in a process that may be killed (`lorasrv.text.structured_output.sandbox`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorasrv.errors import InvalidRequest
from lorasrv.text.structured_output.closed_objects import close_objects
from lorasrv.text.structured_output.satisfiability import can_end, lark_can_end
from lorasrv.text.structured_output.schema_checks import DATA, NAMED_SCHEMAS, check_repetitions, check_schema

MAX_TEXT_BYTES = 256 << 10
MAX_DEPTH = 64
MAX_TEXTS = 10_000
WHITESPACE = r"( |\n[ \t]{0,20})"
"""Optional white space between JSON tokens: a space, or a new line and its indentation. Plain JSON would let a model
write empty lines without end (llama.cpp's grammars have the same bound)."""
_JSON_OPTIONS = {
    "whitespace_pattern": WHITESPACE,
    "lenient": False,
    "coerce_one_of": False,
    # Without `\u`: with it, a property name could be spelled differently and so escape its schema.
    "json_allowed_escapes": 'nrbtf\\"',
}
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Values of JSON schema's `format` that are enforced; others are treated as annotations."""


ANSWER = "@lorasrv_answer"
"""The name of a grammar in the rules of its preamble."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Hold a grammar and the field it was sent in."""

    # Lark with llguidance's extensions, or llguidance's JSON form.
    text: str
    # The request field, for error messages.
    param: str
    # The schema as `checked_schema` returns it, if the grammar is only JSON.
    schema: Mapping[str, Any] | None = field(default=None, compare=False)
    # Whether an answer may begin with any text; otherwise its text is exactly that of its tokens.
    begins_freely: bool = False
    # Lark rules of an answer with text in front of what the grammar allows, which they name `ANSWER`; "": none.
    preamble: str = ""

    @property
    def full_text(self) -> str:
        """Return the grammar of the whole answer. Call only if `text` has been compiled: it is not checked here."""
        if not self.preamble:
            return self.text
        is_json = self.text.lstrip().startswith("{")
        first, *others = json.loads(self.text)["grammars"] if is_json else [{"lark_grammar": self.text}]
        answer = {**first, "name": ANSWER.removeprefix("@")}
        # A grammar with a name may be part of others, and of itself.
        parts = [answer, first, *others] if first.get("name") else [answer, *others]
        return json.dumps({"grammars": [{"lark_grammar": self.preamble}, *parts]})


def any_json_object(param: str) -> Grammar:
    """Build the grammar of any JSON object."""
    return json_of({"type": "object"}, param)


def json_of(schema: Mapping[str, Any] | str | bool, param: str) -> Grammar:
    """Build the grammar of JSON that satisfies a schema, given as an object or as text.

    Raises:
        InvalidRequest: not a schema, too large or deep, or no finite value satisfies it.
    """
    if isinstance(schema, str):
        schema = _parsed(schema, param)
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest("{param} must be a JSON schema: an object, true or false", param=param)
    checked = checked_schema(schema, param)
    return Grammar(json.dumps({"grammars": [{"json_schema": checked}]}), param, checked)


def checked_schema(schema: Mapping[str, Any] | bool, param: str) -> dict[str, Any]:
    """Return a schema in the form given to llguidance: its objects are closed, and each keyword is enforced or refused,
    whatever the schema requests.

    Raises:
        InvalidRequest: see `json_of`.
    """
    if schema is False:
        raise InvalidRequest("{param}: no value satisfies the schema false", param=param)
    whole = {} if schema is True else dict(schema)
    _check_depth(whole, param)
    # The checks below visit parts of it more than once.
    _check_size(json.dumps(whole), param)
    check_schema(whole, param)
    if not can_end(whole):
        raise InvalidRequest("{param}: no finite value satisfies the schema: it requires itself", param=param)
    return {**_without_annotations(close_objects(whole)), "x-guidance": _JSON_OPTIONS}


_EXCLUSIVE = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}
_APART, _MOST_APART = 2.0**-40, 2**31


def _apart(bound: Any, sign: int) -> Any:
    """Replace an integer exclusive bound by a non-integer one: llguidance 1.9 accepts the integer itself if the other
    bound has the same integer part."""
    is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if not is_number or not float(bound).is_integer() or abs(bound) >= _MOST_APART:
        return bound
    return bound + sign * _APART * max(1, abs(bound))


def _without_annotations(schema: Any) -> Any:
    """Remove keywords without effect from a schema of checked depth: formats that are not enforced, `uniqueItems:
    false`. Literal data is left unchanged; exclusive bounds are replaced by ones that llguidance enforces."""
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            kept[keyword] = {name: _without_annotations(inner) for name, inner in value.items()}
        elif keyword in DATA:
            kept[keyword] = value
        elif keyword == "uniqueItems" and value is False:
            continue
        elif keyword in _EXCLUSIVE:
            kept[keyword] = _apart(value, _EXCLUSIVE[keyword])
        elif keyword != "format" or not isinstance(value, str) or value in FORMATS:
            kept[keyword] = _without_annotations(value)
    return kept


def regex_of(pattern: str, param: str) -> Grammar:
    """Build the grammar of text that a regular expression (Rust syntax, no look-around) matches from beginning to
    end.

    Raises:
        InvalidRequest: the pattern is empty, too large, or its counted repetitions multiply to too many.
    """
    if not pattern:
        raise InvalidRequest("{param} is empty: only an empty answer would match", param=param)
    check_repetitions(pattern, param)
    return _checked(json.dumps({"grammars": [{"lark_grammar": f"start: /{_slashed(pattern)}/"}]}), param)


def choice_of(choices: Sequence[str], param: str) -> Grammar:
    """Build the grammar of one of several texts.

    Raises:
        InvalidRequest: there is no choice, there are too many, or one is empty.
    """
    if not 0 < len(choices) <= MAX_TEXTS or "" in choices:
        raise InvalidRequest(f"{{param}} must hold 1 to {MAX_TEXTS} texts, none of them empty", param=param)
    return _checked("start: CHOICE\nCHOICE: " + "\n  | ".join(map(json.dumps, choices)), param)


def grammar_of(text: str, param: str) -> Grammar:
    """Check a grammar in Lark syntax with llguidance's extensions, or in llguidance's JSON form.

    Raises:
        InvalidRequest: empty, too large, in another syntax, or without a finite sentence.
    """
    if not text.strip():
        raise InvalidRequest("{param} is empty", param=param)
    if text.lstrip().startswith("{"):
        parsed = _parsed(text, param)
        if not isinstance(parsed, dict) or "grammars" not in parsed:
            raise InvalidRequest("{param} is JSON, but not an llguidance grammar: `grammars` is missing", param=param)
        _check_depth(parsed, param)
        if parsed.get("max_tokens") is not None:
            raise InvalidRequest("{param}: max_tokens belongs into the request, not into the grammar", param=param)
        return _checked(json.dumps(parsed), param)
    if "::=" in text:
        raise InvalidRequest("{param} is GBNF or EBNF (::=); send a Lark grammar (start: ...)", param=param)
    _checked(text, param)
    if not lark_can_end(text):
        raise InvalidRequest("{param} has no finite sentence: `start` always contains itself", param=param)
    return lark_of(text, param)


def lark_of(text: str, param: str) -> Grammar:
    """Wrap a Lark grammar.

    Raises:
        InvalidRequest: the grammar is too large.
    """
    return _checked(text, param)


def _checked(text: str, param: str) -> Grammar:
    _check_size(text, param)
    return Grammar(text, param)


def _check_size(text: str, param: str) -> None:
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_TEXT_BYTES:
        raise InvalidRequest(f"{{param}} has {size} bytes as a grammar, more than {MAX_TEXT_BYTES}", param=param)


def _parsed(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise _too_deep(param) from None
    except ValueError as error:
        raise InvalidRequest(f"{{param}} is not JSON: {error}", param=param) from None


def _check_depth(value: Any, param: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item) if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep(param)


def _too_deep(param: str) -> InvalidRequest:
    return InvalidRequest(f"{{param}} is nested more than {MAX_DEPTH} levels deep", param=param)


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _slashed(pattern: str) -> str:
    """Escape a pattern's slashes and line breaks, to put it between Lark's slashes."""
    out, escaped = [], False
    for char in pattern:
        if char == "/" and not escaped:
            out.append("\\/")
        elif char == "\n":
            out.append("n" if escaped else "\\n")
        else:
            out.append(char)
        escaped = char == "\\" and not escaped
    return "".join(out)
