"""Decide without compiling whether a grammar or a JSON schema can be satisfied by a finite text, and how large it
is.

A Lark grammar such as `start: word start` has no finite sentence; llguidance would follow it without end. A schema such
as `{"required": ["next"], "properties": {"next": {"$ref": "#"}}}` has no finite value; a model held to it would write
until its tokens are used up.

The size of a regular expression is counted with its counted repetitions written out: `(a{0,500}){0,500}` is 250,000.
llguidance takes derivatives instead of writing them out, but nested counts give it as many different derivatives.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

_TOKEN = re.compile(
    r"""(?P<blank>[ \t]+|//[^\n]*) | (?P<line>\n) | (?P<text>"(?:\\.|[^"\\\n])*"i? | /(?![/*])(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<name>[!?]?[A-Za-z_][A-Za-z0-9_]*)
    | (?P<often>\{\s*+\d*+\s*+(?:,\s*+\d*+\s*+)?+\} | ~\s*+\d++(?:\s*+\.\.\s*+\d++)?)
    | (?P<sign>[()|?*+:])""",
    re.VERBOSE,
)
"""Possessive where a part may be empty: two adjacent runs of spaces would be tried in all divisions."""
MAX_WORK = 500_000
"""Most tokens of rules to visit; a rule is visited again each time a rule that it names is found to end."""
MAX_GROUPS = 100
"""Depth of nested parentheses, bounded by Python's recursion limit."""
Tokens = list[tuple[str, str]]


class _UnknownError(Exception):
    """Signal syntax that this module does not interpret."""


def lark_can_end(text: str) -> bool:
    """Return False only if the grammar certainly has no finite sentence.

    Grammars with other constructs than rules, groups and repetitions are assumed to end.
    """
    try:
        rules = _rules(_tokens(text))
    except _UnknownError:
        return True
    if "start" not in rules:
        return True
    mentioned_by: dict[str, set[str]] = {}
    for name, body in rules.items():
        for _, mentioned in body:
            mentioned_by.setdefault(mentioned, set()).add(name)
    ending: set[str] = set()
    todo, work = list(rules), 0
    while todo:
        name = todo.pop()
        work += len(rules[name])
        if work > MAX_WORK:
            return True
        if name not in ending and _Body(rules[name], rules, ending).ends():
            ending.add(name)
            todo += mentioned_by.get(name, ())
    return "start" in ending


def _tokens(text: str) -> Tokens:
    found, at, depth = [], 0, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _UnknownError
        at = match.end()
        depth += (match[0] == "(") - (match[0] == ")")
        if depth > MAX_GROUPS:
            raise _UnknownError
        if match.lastgroup != "blank":
            found.append((str(match.lastgroup), match[0]))
    return found


def _rules(tokens: Tokens) -> dict[str, Tokens]:
    """Map each rule's name to its alternatives; a rule begins at the beginning of a line with its name and a colon."""
    rules: dict[str, Tokens] = {}
    body: Tokens = []
    at_line = True
    for number, (kind, text) in enumerate(tokens):
        begins = at_line and kind == "name" and tokens[number + 1 : number + 2] == [("sign", ":")]
        if begins:
            body = rules[text.lstrip("!?")] = []
        elif kind != "line" and (kind, text) != ("sign", ":"):
            body.append((kind, text))
        at_line = kind == "line"
    return rules


@dataclass
class _Body:
    """Interpret one rule's alternatives from left to right."""

    tokens: Tokens
    rules: Mapping[str, Tokens]
    ending: set[str]
    at: int = 0

    def ends(self) -> bool:
        ends = self._alternatives()
        return ends or self.at < len(self.tokens)  # the rest was not understood

    def _alternatives(self) -> bool:
        any_ends, this_ends = False, True
        while self.at < len(self.tokens):
            kind, text = self.tokens[self.at]
            if text == ")" and kind == "sign":
                break
            self.at += 1
            if kind == "sign" and text == "|":
                any_ends, this_ends = any_ends or this_ends, True
            else:
                item_ends = self._item(kind, text)
                this_ends = this_ends and item_ends
        return any_ends or this_ends

    def _item(self, kind: str, text: str) -> bool:
        ends = True
        if kind == "name" and text in self.rules and text == text.lower():
            ends = text in self.ending
        elif (kind, text) == ("sign", "("):
            ends = self._alternatives()
            self.at += 1
        while self.at < len(self.tokens) and self._is_repeated(*self.tokens[self.at]):
            ends = ends or self._may_be_none(self.tokens[self.at][1])
            self.at += 1
        return ends

    @staticmethod
    def _is_repeated(kind: str, text: str) -> bool:
        return kind == "often" or (kind == "sign" and text in "?*+")

    @staticmethod
    def _may_be_none(text: str) -> bool:
        return text in "?*" or re.match(r"[{~]\s*+0*+\s*+([,}.]|$)", text) is not None


MAX_VISITS = 10_000
MAX_LEVELS = 150
"""Depth of nested schemas, references followed, bounded by Python's recursion limit."""


def can_end(root: Mapping[str, Any]) -> bool:
    """Return False only if certainly no finite value satisfies the schema; unclear or too large schemas count as
    satisfiable.
    """
    return _Walk(root).ends(root, frozenset())


class _Walk:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._visits = 0
        self._level = 0
        # A schema is visited once for each reference to it.
        self._targets: dict[str, Any] = {}
        self._needed: dict[int, list[Any]] = {}

    def ends(self, schema: Any, inside: frozenset[str]) -> bool:
        """Return whether a schema can end. `inside` are the references being followed: a reference to one of them
        cannot end.
        """
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
            if ref not in self._targets:
                self._targets[ref] = self._target(ref)
            if not self.ends(self._targets[ref], inside | {ref}):
                return False
        for name, needed in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            parts = schema.get(name)
            if isinstance(parts, list) and parts and not needed(self.ends(part, inside) for part in parts):
                return False
        if id(schema) not in self._needed:
            self._needed[id(schema)] = _needed(schema)
        return all(self.ends(part, inside) for part in self._needed[id(schema)])

    def _target(self, ref: str) -> Any:
        # Other references name another document, or an anchor, which llguidance resolves.
        target = target_of(self._root, ref)
        return True if target is None else target


def target_of(root: Mapping[str, Any], ref: str) -> Any:
    """Return what a reference's JSON pointer points to; None if it is another reference or points nowhere."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found: Any = root
    for name in pointer_names(ref):
        found = child(found, name)
    return found


def child(value: Any, name: str) -> Any:
    """Return what one name of a JSON pointer points to; None if there is nothing."""
    if isinstance(value, list):
        # Python converts no text of thousands of digits.
        return value[int(name)] if name.isdecimal() and len(name) < 10 and int(name) < len(value) else None
    return value.get(name) if isinstance(value, Mapping) else None


def pointer_names(ref: str) -> list[str]:
    """Return the names in the JSON pointer after a reference's `#`; none for other references."""
    names = unquote(ref.partition("#")[2]).split("/")[1:]
    return [name.replace("~1", "/").replace("~0", "~") for name in names]


def _needed(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of the parts that every value must contain."""
    kinds = schema.get("type")
    kind = kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds
    if kind == "object":
        properties, required = schema.get("properties", {}), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
            return [properties.get(name, others) for name in required if isinstance(name, str)]
    if kind == "array":
        least, prefix = schema.get("minItems"), schema.get("prefixItems")
        items = list(prefix) if isinstance(prefix, list) else []
        if isinstance(least, int):
            return items[:least] + ([schema.get("items", True)] if least > len(items) else [])
    return []


MAX_REPETITIONS = 100_000
_MANY = 10**15
"""Cap of products: thousands of counts multiply to numbers too large to compute with or to print."""


def repetitions(pattern: str) -> int:
    """Count the pattern's characters and classes, each as often as it is repeated: an upper bound, in one pass."""
    sizes, last, at = [0], 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "(":
            sizes[-1] += last
            sizes.append(0)
            last = 0
        elif char == ")" and len(sizes) > 1:
            last += sizes.pop()
        elif char == "{" and (counted := _counted(pattern, at)) is not None:
            most, at = counted
            last = min(last * most, _MANY)
            continue
        elif char not in "*+?|":
            sizes[-1] += last
            last = 1
            at = _end_of_atom(pattern, at)
            continue
        at += 1
    return sum(sizes) + last


def _counted(pattern: str, at: int) -> tuple[int, int] | None:
    """Read `{m}`, `{m,}` or `{m,n}`: return the most repetitions and the end position; None if there is no count."""
    end = pattern.find("}", at, at + 32)
    if end < 0:
        return None
    least, _, most = pattern[at + 1 : end].partition(",")
    numbers = [int(part) for part in (least, most) if part.strip().isascii() and part.strip().isdigit()]
    return (max(numbers), end + 1) if numbers else None


def _end_of_atom(pattern: str, at: int) -> int:
    if pattern[at] == "\\":
        if pattern[at + 1 : at + 3] in ("p{", "P{", "x{", "u{"):
            return max(pattern.find("}", at), at + 1) + 1
        return at + 2
    if pattern[at] != "[":
        return at + 1
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
        elif pattern[at] == "]":
            depth -= 1
        at += 1
        if depth == 0:
            break
    return at
