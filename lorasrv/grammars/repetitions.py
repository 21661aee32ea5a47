"""How large a regular expression becomes when its counted repetitions are written out: `(a{0,500}){0,500}` is 250,000.

llguidance does not write them out, it takes derivatives; but nested counts give it as many different ones.
"""

MAX_REPETITIONS = 100_000
_MANY = 10**15
"""More are not told apart: the product of thousands of counts is no number to work with, or to print."""


def repetitions(pattern: str) -> int:
    """Characters and classes of the pattern, each as often as it is repeated. An upper bound, in one pass."""
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
    """The most repetitions that `{m}`, `{m,}` or `{m,n}` stands for, and where it ends; None: it is none of these."""
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
