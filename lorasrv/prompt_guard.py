"""Keeps special tokens written in messages from becoming special tokens of the prompt.

A mark, a Unicode noncharacter that the messages do not contain, goes in front of every control token in them, and in
front of every beginning of one at the end of a string, which the next string could complete. Templates may trim,
split or join strings; the mark stays with its text. After rendering the marks are taken out, and the text is cut behind
the first character of each control token that begins where a mark was: no piece holds that token any more, so that
encoding piece by piece cannot find it. Text without such tokens is one piece, encoded as if nobody had looked.

The idea of marking is transformers' (`sanitize_control_tokens`), which does not see a token split over two strings.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from lorasrv.errors import InvalidRequest

MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""The noncharacters of the basic plane: never assigned, for internal use (Unicode corrigendum 9)."""


class PromptGuard:
    """For one tokenizer and template: control tokens are the special ones, and added ones that the template writes.

    `added_tokens` maps text to whether it is special.
    """

    def __init__(self, added_tokens: Mapping[str, bool], template: str) -> None:
        tokens = [
            token
            for token, special in added_tokens.items()
            # A token of one character cannot be cut; blank ones (Gemma's newlines) are ordinary text.
            if len(token) > 1 and not token.isspace() and (special or token in template)
        ]
        # Longest first, as the tokenizer prefers; (?!) never matches.
        self._tokens = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
        self._beginnings = frozenset(token[:n] for token in tokens for n in range(1, len(token)))
        self._longest = max(map(len, tokens), default=0)

    def choose_mark(self, value: Any) -> str:
        """A noncharacter that no string within `value` contains.

        Raises:
            InvalidRequest: all 32 occur, which no text has a reason for.
        """
        used: set[str] = set()
        _collect_marks(value, used)
        free = next((mark for mark in MARKS if mark not in used), None)
        if free is None:
            raise InvalidRequest("messages contain Unicode noncharacters U+FDD0 to U+FDEF", param="messages")
        return free

    def mark_tokens(self, value: Any, mark: str) -> Any:
        """A copy of plain JSON data with marks set, in keys too.

        Raises:
            InvalidRequest: a value that is no JSON.
        """
        if isinstance(value, str):
            return self._mark_text(value, mark)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self.mark_tokens(k, mark): self.mark_tokens(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_tokens(item, mark) for item in value]
        raise InvalidRequest(f"messages hold a {type(value).__name__}, which is no JSON", param="messages")

    def pieces(self, text: str, mark: str) -> list[str]:
        """Rendered text without its marks, cut so that no marked control token is whole in any piece."""
        parts = text.split(mark)
        text, marked, at = "".join(parts), set(), 0
        for part in parts[:-1]:
            at += len(part)
            marked.add(at)
        pieces, start, position = [], 0, 0
        while marked and (match := self._tokens.search(text, position)):
            position = match.end()
            if match.start() in marked:
                position = match.start() + 1
                pieces.append(text[start:position])
                start = position
        return [*pieces, text[start:]]

    def _mark_text(self, text: str, mark: str) -> str:
        """Marks in front of control tokens, overlapping ones too, and of beginnings of one at the end."""
        places = {m.start() for m in self._overlapping(text)}
        end = len(text.rstrip())
        places |= {i for i in range(max(0, end - self._longest), end) if text[i:end] in self._beginnings}
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[a:b] for a, b in pairwise(cuts))

    def _overlapping(self, text: str) -> list[re.Match[str]]:
        found, at = [], 0
        while match := self._tokens.search(text, at):
            found.append(match)
            at = match.start() + 1
        return found


def _collect_marks(value: Any, used: set[str]) -> None:
    if isinstance(value, str):
        used |= set(MARKS) & set(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect_marks(key, used)
            _collect_marks(item, used)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect_marks(item, used)
