"""Continuations of matches, against a search that spells everything out."""

from array import array
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lorasrv.speculation.text_match import BOUNDARY, INT32, MAX_MATCH, MAX_MATCHES, MIN_MATCH, continuation

TOKENS = st.integers(BOUNDARY, 3)


def spelled(text: list[int], last: list[int], most: int) -> list[int]:
    last, least = last[-MAX_MATCH:], last[-MIN_MATCH:]
    ends = [
        end for end in range(MIN_MATCH, len(text)) if len(least) == MIN_MATCH and text[end - MIN_MATCH : end] == least
    ]
    ends = ends[-MAX_MATCHES:]
    for length in range(len(last), 0, -1):
        if longest := [end for end in ends if end >= length and text[end - length : end] == last[-length:]]:
            ends = longest
            break
    found: list[int] = []
    while ends and len(found) < most:
        counts = Counter(text[end] for end in ends)
        token = max(counts, key=lambda token: (counts[token], max(end for end in ends if text[end] == token)))
        if token == BOUNDARY:
            break
        found.append(token)
        ends = [end + 1 for end in ends if text[end] == token and end + 1 < len(text)]
    return found


@given(st.lists(TOKENS, max_size=120), st.lists(TOKENS, min_size=1, max_size=20), st.integers(1, 8))
def test_as_spelled_out(text: list[int], last: list[int], most: int) -> None:
    draft = continuation(array(INT32, text), last, most)
    assert list(draft.token_ids) == spelled(text, last, most)


def test_of_its_own_text_the_end_is_no_match() -> None:
    text = [5, 6, 7, 8, 5, 6]
    assert continuation(array(INT32, text), text, 3).token_ids == (7, 8, 5)


def test_evidence_tells_what_the_guess_rests_on() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2]
    assert continuation(array(INT32, text), [1, 2], 2).evidence == ((1, 2, 2), (2, 2, 4))
    alone = [7, 1, 2, 3, 4, 5, 6]
    assert continuation(array(INT32, alone), [7, 1, 2, 3], 2).evidence == ((3, 1, 4), (3, 1, 4))
