"""Regular expressions of a config, matched with module names as PEFT matches them.

An uploaded expression could keep Python's engine busy for years. Simple keys of rank_pattern and alpha_pattern are
compared directly: letters, digits, `_`, `.` for any character, `\\.` for a literal dot, `^` or `$` at the ends.
All others are matched by RE2, whose time is linear in the name's length, and the sum of their sizes is limited. Only
forms with the same meaning in Python and RE2 are accepted (`_FORMS`): no lookaround, backreferences or flags.
"""

import re
import string
from dataclasses import dataclass
from typing import Any, Protocol

MAX_INSTRUCTIONS = 4096
"""Limit for all expressions of a config together: each is matched with every module's name."""
MAX_EXPRESSION_CHARS = 1024
_MAX_BYTES = 1 << 20
SERVED_FORMS = (
    r"letters, digits, _ . - ^ $ | * + ?, \. \d \w \b, groups () (?:), sets like [a-z0-9] and repeats like {2,3}"
)
_FORMS = re.compile(
    r"""(?:
        [A-Za-z0-9_./^$|)-]
      | [*+?] (?! \+ )
      | \( (?! \? ) | \(\?:
      | \\ [.dDwWb_/-]
      | \[ \^? (?: \\ [dw] | [A-Za-z0-9_.] (?: - [A-Za-z0-9] )? )+ \]
      | \{ (?: 0 | [1-9][0-9]{0,2} ) (?: , (?: 0 | [1-9][0-9]{0,2} )? )? \} (?! \+ )
    )*""",
    re.VERBOSE,
)
_LAYER = "layer"
_PLAIN = frozenset(string.ascii_letters + string.digits + "_")


class Pattern(Protocol):
    """Match module names; `size` is 0 for patterns that do not need RE2."""

    @property
    def size(self) -> int: ...

    def matches(self, module_name: str) -> bool:
        """Return whether PEFT would apply the key to this module."""
        ...


def parse_pattern(key: str) -> Pattern:
    """Read a key of rank_pattern or alpha_pattern, which PEFT matches with the end of a module's name.

    Raises:
        ValueError: see `Expression`.
    """
    return NamePattern.parse(key) or Expression(key, rf"(.*\.)?({key})$")


def whole_name(expression: str) -> "Expression":
    """Read `target_modules` or `exclude_modules`, which PEFT matches with the whole name.

    Raises:
        ValueError: see `Expression`.
    """
    return Expression(expression, f"(?:{expression})$")


def layer_of(expression: str) -> "Expression":
    """Read an entry of `layers_pattern`; the expression's `group` is the number of the layer in a name.

    Raises:
        ValueError: see `Expression`.
    """
    return Expression(expression, rf"(?:^|.*?\.){expression}\.(?P<{_LAYER}>\d+)\.")


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
    """Match by a regular expression whose forms mean the same in Python and RE2.

    Args:
        given: the expression of the config.
        whole: PEFT's expression around it, matched from the beginning of a name.

    Raises:
        ValueError: it has other forms, or Python does not accept it; the message says why.
    """

    def __init__(self, given: str, whole: str) -> None:
        if len(given) > MAX_EXPRESSION_CHARS:
            raise ValueError(f"has {len(given)} characters; at most {MAX_EXPRESSION_CHARS} are read")
        if (read := _FORMS.match(given)) is None or read.end() < len(given):
            rest = given[read.end() if read else 0 :][:20]
            raise ValueError(f"has at {rest!r} what is not matched here: {SERVED_FORMS} are")
        # Imported here: most adapters do not need it.
        import re2

        options = re2.Options()
        options.max_mem, options.log_errors = _MAX_BYTES, False
        try:
            self._compiled: Any = re2.compile(whole, options)
            re.compile(whole)
        except (re.error, re2.error) as error:
            reason = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
            raise ValueError(f"is no regular expression that can be matched here: {reason}") from None
        self.size: int = self._compiled.programsize

    def matches(self, module_name: str) -> bool:
        """Return whether the expression matches the name."""
        return self._compiled.match(module_name) is not None

    def group(self, module_name: str) -> Any:
        """Return the text of the group `layer` in a name that the expression matches; None if the group is empty."""
        return self._compiled.match(module_name)[_LAYER]
