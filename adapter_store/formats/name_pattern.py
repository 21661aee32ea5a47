"""Module names in rank_pattern and alpha_pattern, matched as PEFT does but without a regular expression engine.

PEFT treats a key as a regular expression: `re.match(rf"(.*\\.)?({key})$", module_name)`. An uploaded expression could
run for years, so only simple keys are accepted: letters, digits, `_`, `.` (which matches any one character), `\\.` (a
literal dot), and `^` or `$` at the ends.
"""

import string
from dataclasses import dataclass

_PLAIN = frozenset(string.ascii_letters + string.digits + "_")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Match a name of fixed length; None matches any character. `anchored` must match the whole module name."""

    chars: tuple[str | None, ...]
    anchored: bool = False

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
