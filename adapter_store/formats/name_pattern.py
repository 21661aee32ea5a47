"""Keys of rank_pattern and alpha_pattern, matched as PEFT does: `re.match(rf"(.*\\.)?({key})$", module_name)`.

PEFT's keys are regular expressions, and an uploaded one could keep Python's engine busy for years. Simple keys are
compared by hand: letters, digits, `_`, `.` for any character, `\\.` for a literal dot, `^` or `$` at the ends.
All others are matched by RE2, whose time is linear in the name's length, and their sizes together are bounded. What
RE2 does not have, or reads otherwise than Python, is refused: lookaround, backreferences, possessive quantifiers and
atomic groups, `{,n}`, POSIX classes.
"""

import re
import string
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

MAX_INSTRUCTIONS = 4096
"""Of all expressions of a config together: each is matched with every module's name."""
MAX_EXPRESSION_CHARS = 1024
_MAX_BYTES = 1 << 20
_PLAIN = frozenset(string.ascii_letters + string.digits + "_")


class Pattern(Protocol):
    """Match module names; `size` is 0 for what costs nothing."""

    @property
    def size(self) -> int: ...

    def matches(self, module_name: str) -> bool:
        """Return whether PEFT would apply the key to this module."""
        ...


def parse_pattern(key: str) -> Pattern:
    """Read a key.

    Raises:
        ValueError: it is no expression of Python's, or one that is not matched here; says why.
    """
    return NamePattern.parse(key) or Expression(key)


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Match a name of fixed length; None matches any character. `anchored` must match the whole module name."""

    chars: tuple[str | None, ...]
    anchored: bool = False

    @property
    def size(self) -> int:
        return 0

    @classmethod
    def parse(cls, key: str) -> "NamePattern | None":
        """Parse a key; return None if it needs a real regular expression engine."""
        anchored = key.startswith("^")
        text = key.removeprefix("^").removesuffix("$")
        chars: list[str | None] = []
        position = 0
        while position < len(text):
            if text.startswith("\\.", position):
                chars.append(".")
                position += 2
                continue
            if text[position] not in _PLAIN and text[position] != ".":
                return None
            chars.append(None if text[position] == "." else text[position])
            position += 1
        return cls(tuple(chars), anchored)

    def matches(self, module_name: str) -> bool:
        """Return whether the name equals the pattern or ends with it after a dot. Linear in the pattern's length."""
        head = len(module_name) - len(self.chars)
        if head < 0 or (head > 0 and (self.anchored or module_name[head - 1] != ".")):
            return False
        return all(c is None or c == name for c, name in zip(self.chars, module_name[head:], strict=True))


class Expression:
    """Match by a regular expression that Python and RE2 read alike; both were asked to compile it.

    Raises:
        ValueError: they do not.
    """

    def __init__(self, key: str) -> None:
        if len(key) > MAX_EXPRESSION_CHARS:
            raise ValueError(f"has {len(key)} characters; at most {MAX_EXPRESSION_CHARS} are read")
        if not key.isascii() or "{," in key:
            raise ValueError("has characters beyond ASCII, or {,n}; write it without")
        # Imported only here: other adapters do not need it.
        import re2

        whole = rf"(.*\.)?({key})$"
        options = re2.Options()
        options.max_mem, options.log_errors = _MAX_BYTES, False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                re.compile(whole)
            self._compiled: Any = re2.compile(whole, options)
        except (re.error, re2.error, Warning, OverflowError, RecursionError) as error:
            reason = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
            raise ValueError(f"is no regular expression that can be matched here: {reason}") from None
        self.size: int = self._compiled.programsize

    def matches(self, module_name: str) -> bool:
        """Return whether PEFT would apply the key to this module."""
        return self._compiled.match(module_name) is not None
