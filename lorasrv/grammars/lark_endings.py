"""Whether a Lark grammar has a finite sentence: `start: word start` has none. llguidance would follow it for ever."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<blank>[ \t]+|//[^\n]*) | (?P<line>\n) | (?P<text>"(?:\\.|[^"\\\n])*"i? | /(?![/*])(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<name>[!?]?[A-Za-z_][A-Za-z0-9_]*) | (?P<often>\{\s*\d*\s*(?:,\s*\d*\s*)?\} | ~\s*\d+(?:\s*\.\.\s*\d+)?)
    | (?P<sign>[()|?*+:])""",
    re.VERBOSE,
)
MAX_WORK = 500_000
"""Tokens of rules that are looked at, again each time that one of the rules they name is known to end."""
MAX_GROUPS = 100
"""Parentheses inside one another: Python's own stack is not much deeper."""
Tokens = list[tuple[str, str]]


class _UnknownError(Exception):
    """Something of the language that is not looked through here."""


def lark_can_end(text: str) -> bool:
    """False only if it is certain. Grammars with more than rules, groups and repetitions may end, for all we know."""
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
    """Name -> its alternatives. A rule begins at the beginning of a line, with its name and a colon."""
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
    """One rule's alternatives, read from left to right."""

    tokens: Tokens
    rules: Mapping[str, Tokens]
    ending: set[str]
    at: int = 0

    def ends(self) -> bool:
        ends = self._alternatives()
        return ends or self.at < len(self.tokens)  # what is left over was not understood

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
        return text in "?*" or re.match(r"[{~]\s*0*\s*([,}.]|$)", text) is not None
