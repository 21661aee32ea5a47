"""Module names in rank_pattern and alpha_pattern, matched as PEFT matches them but without a regex engine.

PEFT takes a key for a regular expression: `re.match(rf"(.*\\.)?({key})$", module_name)`. An uploaded expression can be
made to run for years, so only keys whose meaning is plain are understood: letters, digits, `_`, `.` (which, being a
regular expression, stands for any one character), `\\.` (a real dot), and `^` or `$` at the ends.
"""

import string
from dataclasses import dataclass

_PLAIN = frozenset(string.ascii_letters + string.digits + "_")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A name of fixed length; None stands for any character. `anchored` must match the whole module name."""

    chars: tuple[str | None, ...]
    anchored: bool = False

    @classmethod
    def parse(cls, key: str) -> "NamePattern | None":
        """None if the key needs a real regex engine."""
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
        """Whether the name ends with the pattern at a dot, or is it. Linear in the length of the pattern."""
        head = len(module_name) - len(self.chars)
        if head < 0 or (head > 0 and (self.anchored or module_name[head - 1] != ".")):
            return False
        return all(c is None or c == name for c, name in zip(self.chars, module_name[head:], strict=True))
