"""Find what followed earlier occurrences of the last tokens, by one scan of a text in numpy, without an index.

A scan of 32,768 tokens takes some ten microseconds; suffix trees and automata (Arctic's suffix decoding, SAM decoding)
take ten times the memory and are only needed for far longer texts.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from lorasrv.speculation.drafter import Draft

INT32 = "i"
"""Type code of token arrays."""
BOUNDARY = -1
"""Marks the start of each of several texts in one array; no draft crosses it."""
MAX_MATCH = 16
"""Longest match that is searched for: a longer one is no better evidence."""
MIN_MATCH = 2
MAX_MATCHES = 32
"""Most matches of `MIN_MATCH` tokens that are used: the latest ones."""
MAX_LENGTH_CLASS = 4
MAX_COUNT_CLASS = 3


def continuation(text: "array[int]", last: Sequence[int], max_tokens: int) -> Draft:
    """Return the tokens that most often followed the longest matches of the `last` tokens in a text, one by one; among
    equally frequent tokens, the one that occurred last.

    Evidence of a token: the classes of its match's length, of the number of matches, and of its share of them.

    Args:
        text: int32, may contain `BOUNDARY`.
        last: the tokens before the draft, newest last.
    """
    ends, length = _matches(text, last[-MAX_MATCH:])
    runs = [text[end : end + max_tokens] for end in ends]
    tokens, evidence = list[int](), list[tuple[int, int, int]]()
    while len(tokens) < max_tokens and runs:
        at = len(tokens)
        following = [run[at] for run in runs]
        token = max(following, key=following.count) if len(runs) > 1 else following[0]
        if token == BOUNDARY:
            break
        share = 4 * following.count(token) // len(runs)
        tokens.append(token)
        evidence.append((_length_class(length + at), _count_class(len(runs)), share))
        runs = [run for run in runs if run[at] == token and len(run) > at + 1]
    return Draft(tuple(tokens), tuple(evidence))


def _matches(text: "array[int]", last: Sequence[int]) -> tuple[list[int], int]:
    """Return the places after the longest matches of the last tokens, latest first, and the length of the matches."""
    if len(last) < MIN_MATCH or len(text) <= MIN_MATCH:
        return [], 0
    # A view: the text cannot grow while the view exists.
    tokens = np.frombuffer(text, np.int32)
    found = np.flatnonzero((tokens[1:-1] == last[-1]) & (tokens[:-2] == last[-2]))
    ends: list[int] = (found + MIN_MATCH)[: -MAX_MATCHES - 1 : -1].tolist()
    lengths = [_match_length(text[max(0, end - MAX_MATCH) : end], last) for end in ends]
    longest = max(lengths, default=0)
    return [end for end, length in zip(ends, lengths, strict=True) if length == longest], longest


def _match_length(text: Sequence[int], last: Sequence[int]) -> int:
    length = 0
    for one, other in zip(reversed(text), reversed(last), strict=False):
        if one != other:
            break
        length += 1
    return length


def _length_class(length: int) -> int:
    """Return 1 to 4 for matches of 2, 3, 4 to 7, and more tokens."""
    return min(MAX_LENGTH_CLASS, length - 1 if length < MIN_MATCH + 2 else 3 if length < 8 else 4)


def _count_class(count: int) -> int:
    """Return 1 to 3 for one match, two to three, and more."""
    return min(MAX_COUNT_CLASS, count.bit_length())
