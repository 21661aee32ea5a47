import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.formats.name_pattern import NamePattern

KEYS = st.text(alphabet="ab1_.", max_size=6)
NAMES = st.text(alphabet="ab1_.", max_size=10)


@given(key=KEYS, name=NAMES, start=st.sampled_from(["", "^"]), end=st.sampled_from(["", "$"]), escaped=st.booleans())
def test_plain_keys_match_as_in_peft(key: str, name: str, start: str, end: str, escaped: bool) -> None:
    written = start + (key.replace(".", "\\.") if escaped else key) + end
    pattern = NamePattern.parse(written)
    assert pattern is not None
    assert pattern.matches(name) == bool(re.match(rf"(.*\.)?({written})$", name))


@pytest.mark.parametrize(
    "key",
    [
        "(.*a){20}x",
        "q_proj|v_proj",
        r"layers\.\d+\.q_proj",
        ".*q_proj",
        "q_proj+",
        "[qv]_proj",
        "q\\",
        "a\\$",
        "^^q",
        "q\n",
    ],
)
def test_real_expressions_are_not_understood(key: str) -> None:
    assert NamePattern.parse(key) is None
