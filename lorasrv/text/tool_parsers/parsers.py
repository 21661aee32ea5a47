"""Read tool calls out of a streamed answer, one reader per family of formats.

Mistral ends an answer with `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, its later models with one or more
`[TOOL_CALLS]NAME[ARGS]{...}`, some with `[CALL_ID]ID` after the name. Granite 3 writes Mistral's list behind a marker
of its own, Granite 3.1 behind `<tool_call>`, whatever its template says. Llama's whole answer is
`{"name": ..., "parameters": {...}}`, optionally preceded by `<|python_tag|>`. Hermes and Qwen put each call between
tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from lorasrv.text.tool_parsers.base import Part, ToolCall, parse_json, possible_beginning, read_call, refuse_constant

MISTRAL_MARKER, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
LLAMA_MARKER, GRANITE_MARKER = "<|python_tag|>", "<|tool_call|>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _list_behind(*markers: str) -> re.Pattern[str]:
    """Return a pattern of what precedes a call in a list: a marker and a bracket, or a comma."""
    return re.compile(rf"\s*(?:(?:{'|'.join(map(re.escape, markers))})\s*\[|,)")


class MistralReader:
    """Stream text until the first marker, then hold the rest back until the answer ends."""

    markers: Sequence[str] = (MISTRAL_MARKER,)
    begin_of_list, end_of_list = _list_behind(*markers), re.compile(r"\s*\]")

    def __init__(self, names: frozenset[str], parallel: bool) -> None:
        self._names = names
        self._most = None if parallel else 1
        self._text = ""
        self._is_calling = False

    def push(self, text: str) -> list[Part]:
        self._text += text
        if self._is_calling:
            return []
        found = [at for marker in self.markers if (at := self._text.find(marker)) >= 0]
        self._is_calling = bool(found)
        held = max(possible_beginning(self._text, marker) for marker in self.markers)
        at = min(found, default=len(self._text) - held)
        certain = self._text[:at].rstrip()
        self._text = self._text[len(certain) :]
        return [certain] if certain else []

    def flush(self) -> list[Part]:
        text, self._text = self._text, ""
        return _calls_and_rest(text, self._call_at, self._most)

    def _call_at(self, text: str, at: int) -> "_Found | None":
        front = self.begin_of_list.match(text, at)
        if front is None:
            return None
        value, end = _value_at(text, front.end())
        return _found(value, self._names, ("arguments",), _behind(self.end_of_list, text, end))


class GraniteReader(MistralReader):
    """Read a list of calls behind Granite's markers, and Phi-4-mini's, which also ends with a marker."""

    markers = GRANITE_MARKER, OPEN
    begin_of_list, end_of_list = _list_behind(*markers), re.compile(r"\s*\](?:\s*<\|/tool_call\|>)?")


class MistralNamesReader(MistralReader):
    """Read calls whose names precede their arguments."""

    def _call_at(self, text: str, at: int) -> "_Found | None":
        at = _behind_blanks(text, at)
        begin = text.find(ARGS, at)
        if begin < 0 or not text.startswith(MISTRAL_MARKER, at):
            return None
        name = text[at + len(MISTRAL_MARKER) : begin].partition(CALL_ID)[0].strip()
        arguments, end = _value_at(text, begin + len(ARGS))
        return _found({"name": name, "arguments": arguments}, self._names, ("arguments",), end)


class LlamaReader:
    """Hold back an answer that begins like a call until it ends; stream any other answer."""

    def __init__(self, names: frozenset[str], parallel: bool) -> None:
        self._names = names
        self._most = None if parallel else 1
        self._text = ""
        self._is_text = False

    def push(self, text: str) -> list[Part]:
        self._text += text
        begun = self._text.lstrip()
        self._is_text |= bool(begun) and not (begun.startswith(("{", LLAMA_MARKER)) or LLAMA_MARKER.startswith(begun))
        if not self._is_text:
            return []
        text, self._text = self._text, ""
        return [text]

    def flush(self) -> list[Part]:
        text, self._text = self._text, ""
        return _calls_and_rest(text, self._call_at, self._most)

    def _call_at(self, text: str, at: int) -> "_Found | None":
        value, end = _value_at(text, _behind(_MARKED, text, at))
        return _found(value, self._names, ("parameters", "arguments"), _behind(_SEMICOLONS, text, end))


_MARKED, _SEMICOLONS = re.compile(r"\s*<\|python_tag\|>"), re.compile(r"[;\s]*;")
"""Text before a call, and after it."""
_DECODER = json.JSONDecoder(parse_constant=refuse_constant)
_Found = tuple[ToolCall, int]


def _calls_and_rest(text: str, call_at: Callable[[str, int], _Found | None], most: int | None) -> list[Part]:
    """Return the complete calls at the beginning of a text, and the rest as text: an answer may end inside a call.

    Args:
        call_at: returns the call at a position, after any separator, and its end; None if there is none.
        most: how many calls are returned, without what is behind them; None: all.
    """
    calls, end = list[Part](), 0
    while found := call_at(text, end):
        calls.append(found[0])
        end = found[1]
    rest = text[end:]
    if calls and (most is not None or not rest.strip()):
        return calls[:most]
    return [*calls, rest] if rest else calls


def _found(value: Any, names: frozenset[str], keys: Sequence[str], end: int) -> _Found | None:
    call = read_call(value, names, keys)
    return None if call is None else (call, end)


def _value_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at a position, after white space, and its end; (None, `at`) if there is no complete one."""
    try:
        return _DECODER.raw_decode(text, _behind_blanks(text, at))
    except (ValueError, RecursionError):
        return None, at


def _behind(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the match at a position; `at` if there is none."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _behind_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


_SIGNS = re.compile(rf'"|{CLOSE}|\\(?!{CLOSE}).', re.DOTALL)
"""Quotes, closing tags and escapes, which show whether a closing tag is inside a JSON string."""


class _Inside:
    """Collect the text after an opening tag, and find its end; each character is visited once."""

    def __init__(self) -> None:
        self.text = ""
        self._looked_at, self._is_string = 0, False

    def find_end(self, text: str) -> int:
        """Add text, and return the position of the first closing tag outside the JSON's strings; -1 without one."""
        self.text += text
        # Beyond this, a closing tag may still be incomplete.
        certain = len(self.text) - len(CLOSE)
        for sign in _SIGNS.finditer(self.text, self._looked_at):
            if sign[0] == CLOSE:
                if not self._is_string:
                    return sign.start()
            elif sign.start() >= certain:
                break
            elif sign[0] == '"':
                self._is_string = not self._is_string
            self._looked_at = sign.end()
        self._looked_at = max(self._looked_at, certain)
        return -1


class _Ends:
    """Find closing tags in the rest of an answer, by whether the number of quotes before them is even or odd."""

    def __init__(self, text: str) -> None:
        self._quotes: list[int] = []
        self._tags: tuple[list[int], list[int]] = [], []
        for sign in _SIGNS.finditer(text):
            if sign[0] == '"':
                self._quotes.append(sign.start())
            elif sign[0] == CLOSE:
                self._tags[len(self._quotes) % 2].append(sign.start())

    def find(self, begin: int) -> int:
        """Return the position of the first closing tag outside the strings of the JSON that begins at `begin`, or else
        of the first closing tag; -1 if there is none.
        """
        num_before = bisect_left(self._quotes, begin)
        for tags in (self._tags[num_before % 2], self._tags[1 - num_before % 2]):
            at = bisect_left(tags, begin)
            if at < len(tags):
                return tags[at]
        return -1


class TaggedReader:
    """Stream the text outside of tags, and return each call when its tag closes or the answer ends.

    White space outside of tags is held back, and dropped if a call follows. With `parallel` False, everything after the
    first call is dropped.
    """

    def __init__(self, names: frozenset[str], parallel: bool) -> None:
        self._names = names
        self._parallel = parallel
        self._outside = ""
        self._inside: _Inside | None = None
        self._has_called = False

    def push(self, text: str) -> list[Part]:
        if self._inside is None:
            self._outside += text
        parts: list[Part] = []
        while self._inside is not None or OPEN in self._outside:
            if self._inside is None:
                before, _, text = self._outside.partition(OPEN)
                self._inside = _Inside()
                parts += self._said(before, "")
            at = self._inside.find_end(text)
            if at < 0:
                break
            inside, rest = self._inside.text[:at], self._inside.text[at + len(CLOSE) :]
            parts += self._ended(inside, CLOSE)
            self._outside, self._inside = rest, None
        if self._inside is None:
            parts += self._said_all_but_tag(self._outside)
        return parts

    def flush(self) -> list[Part]:
        parts: list[Part] = []
        if self._inside is not None:
            parts += self._read_whole(self._inside.text)
            self._inside = None
        text, self._outside = self._outside, ""
        return parts if self._has_called and not text.strip() else [*parts, *self._text(text)]

    def _read_whole(self, text: str) -> list[Part]:
        """Return the parts after an opening tag, up to the end of the answer. If every closing tag seems to be inside a
        string, the first one ends the call.
        """
        ends, parts, begin = _Ends(text), list[Part](), 0
        while True:
            end = ends.find(begin)
            if end < 0:
                return parts + self._ended(text[begin:], "")
            parts += self._ended(text[begin:end], CLOSE)
            behind, opening = end + len(CLOSE), text.find(OPEN, end)
            if opening < 0:
                return parts + self._said_all_but_tag(text[behind:])
            parts += self._said(text[behind:opening], "")
            begin = opening + len(OPEN)

    def _ended(self, inside: str, close: str) -> list[Part]:
        """Return the content of a tag; if it is not a call, preceded by the white space before it."""
        before, self._outside = self._outside, ""
        call = read_call(parse_json(inside.strip()), self._names, ("arguments", "parameters"))
        return self._text(before + OPEN + inside + close) if call is None else self._called(call)

    def _said_all_but_tag(self, text: str) -> list[Part]:
        """Return text outside of tags, except a possible beginning of a tag at its end."""
        at = len(text) - possible_beginning(text, OPEN)
        return self._said(text[:at], text[at:])

    def _said(self, text: str, held: str) -> list[Part]:
        """Return text outside of tags, except white space at its end, which is held back with `held`."""
        certain = text.rstrip()
        self._outside = text[len(certain) :] + held
        return self._text(certain)

    def _called(self, call: ToolCall) -> list[Part]:
        if self._has_called and not self._parallel:
            return []
        self._has_called = True
        return [call]

    def _text(self, text: str) -> list[Part]:
        if not text or (self._has_called and (not self._parallel or not text.strip())):
            return []
        return [text]
