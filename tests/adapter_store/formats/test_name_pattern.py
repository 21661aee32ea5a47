"""Patterns of module names: matched as PEFT matches them, or refused; none takes long."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.formats.name_pattern import NamePattern, parse_pattern

KEYS = st.text(alphabet="ab1_.", max_size=6)
NAMES = st.text(alphabet="ab1_.", max_size=10)


@given(key=KEYS, name=NAMES, start=st.sampled_from(["", "^"]), end=st.sampled_from(["", "$"]), escaped=st.booleans())
def test_plain_keys_match_as_in_peft(key: str, name: str, start: str, end: str, escaped: bool) -> None:
    written = start + (key.replace(".", "\\.") if escaped else key) + end
    pattern = NamePattern.parse(written)
    assert pattern is not None
    assert pattern.matches(name) == bool(re.match(rf"(.*\.)?({written})$", name))


ATOMS = [
    "a",
    "b",
    "1",
    ".",
    r"\.",
    r"\d",
    r"\W",
    r"\w",
    "[a-b_]",
    "[ab]",
    "[^a]",
    "(?:ab|b)",
    "(a|1_)",
    "_",
    "^",
    "$",
    r"\b",
]


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Expressions of few letters, that Python's engine matches fast."""
    repeats = st.sampled_from(["", "", "", "*", "+", "?", "{1,2}", "*?", "{2}"])
    parts = draw(st.lists(st.tuples(st.sampled_from(ATOMS), repeats), max_size=4))
    return draw(st.sampled_from(["", "|"])).join(one + repeat for one, repeat in parts)


@given(key=expressions(), name=NAMES)
def test_expressions_match_as_in_peft(key: str, name: str) -> None:
    try:
        pattern = parse_pattern(key)
    except ValueError:
        return
    assert pattern.matches(name) == bool(re.match(rf"(.*\.)?({key})$", name))


@pytest.mark.parametrize(
    ("key", "name", "other"),
    [
        ("q_proj|v_proj", "model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.k_proj"),
        (r"layers\.\d+\.q_proj", "model.layers.12.q_proj", "model.layers.q_proj"),
        (r"model\.layers\.(0|[2-4])\..*(up|down)_proj", "model.layers.3.mlp.up_proj", "model.layers.1.mlp.up_proj"),
        ("[qv]_proj$", "x.q_proj", "x.xq_proj"),
    ],
)
def test_expressions_that_people_write(key: str, name: str, other: str) -> None:
    assert NamePattern.parse(key) is None
    assert parse_pattern(key).matches(name)
    assert not parse_pattern(key).matches(other)


@pytest.mark.parametrize(
    "key",
    [
        r"(a)\3", r"\10", "(?=a)b", "a++", "a{2}+", "(?>a)", "q\\", "a{,3}", "a{01}", "a{1,02}", "a{0,4294967294}",
        "[[:alpha:]]", "[a[:digit:]]", "[^[:upper:]]", "[a--b]", "[a&&b]", "é+", "(?i)a", "(?i:a)", "(?P<x>a)", r"\pN",
        r"[\x00-\uffff]", "a b+",
        "(?#x)a", "[]a]", r"\A+", r"\Qa\E", "{", "a{x}",
    ],
)  # fmt: skip
def test_forms_that_are_read_otherwise_are_refused_with_the_place(key: str) -> None:
    with pytest.raises(ValueError, match=r"has at .* what is not matched here: letters"):
        parse_pattern(key)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("(", "missing"),
        ("^**", "repetition"),
        ("a{3,2}", "repetition size"),
        ("(((a{100}){100}){100})", "repetition size"),
    ],
)
def test_what_is_no_expression_is_refused_with_the_reason(key: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_pattern(key)
    with pytest.raises(ValueError, match="1026 characters"):
        parse_pattern("a" * 1025 + "+")


@pytest.mark.parametrize("key", ["(.*a){20}x", "(a|aa)+$", "(a*)*b", "([a-z_]+)*[0-9]"])
def test_a_hostile_expression_is_matched_in_linear_time(key: str) -> None:
    """One that backtracks would take years."""
    assert not parse_pattern(key).matches("model." + "a" * 200 + "!")
