import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.errors import AdapterNotFound, InvalidAdapterId, InvalidDigest
from adapter_store.registry.references import check_adapter_id, check_digest, parse_reference, suggest_id

RESERVED = frozenset({"warm", "verify", "smollm2"})
RULE = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}\Z")


@pytest.mark.parametrize("text", ["mia", "a", "0", "mia-2.b_c", "a" * 64, "a.."])
def test_good_ids(text: str) -> None:
    assert check_adapter_id(text, RESERVED) == text


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("../../etc/x", "etc-x"),
        ("a/../b", "a-..-b"),
        ("C:\\x", "c-x"),
        (".", None),
        ("", None),
        ("mia\x00", "mia"),
        ("mia\n", "mia"),
        ("Mia", "mia"),
        ("org/Name", "org-name"),
        ("x" * 300, "x" * 64),
        ("\u202eaim", "aim"),
        ("base:mia", "base-mia"),
        ("mia@3", "mia-3"),
        ("Zoë", "zoe"),
        ("미아", None),
        ("smollm2", "smollm2-adapter"),
        ("warm", "warm-adapter"),
        ("Verify", "verify-adapter"),
        ("\ud800x", "x"),
    ],
)
def test_bad_ids_come_with_the_id_they_could_be(text: str, suggestion: str | None) -> None:
    with pytest.raises(InvalidAdapterId) as caught:
        check_adapter_id(text, RESERVED)
    assert caught.value.suggestion == suggestion
    str(caught.value).encode()
    assert "\u202e" not in str(caught.value)
    assert len(str(caught.value)) < 400


@given(st.text(max_size=80))
def test_suggestions_are_valid(text: str) -> None:
    suggestion = suggest_id(text, RESERVED)
    assert suggestion is None or check_adapter_id(suggestion, RESERVED) == suggestion


@given(st.text(alphabet="aB0._-/\n", max_size=70))
def test_ids_are_what_the_rule_says(text: str) -> None:
    try:
        accepted = check_adapter_id(text, RESERVED)
    except InvalidAdapterId:
        accepted = None
    assert (accepted is not None) == bool(RULE.match(text))


def test_references() -> None:
    assert parse_reference("mia").version is None
    assert parse_reference("mia@3").version == 3
    assert parse_reference("mia@sha256:" + "a" * 12).key_prefix == "a" * 12


@pytest.mark.parametrize(
    "text",
    ["mia@", "mia@0", "mia@-1", "mia@03", "mia@x", "mia@3@4", "mia@sha256:abc", "mia@sha256:" + "g" * 12, "Mia", "",
     "@3", "mia@" + "9" * 5000, "mia@sha256:" + "a" * 65, "mia@٣"],
)  # fmt: skip
def test_bad_references_name_nothing(text: str) -> None:
    with pytest.raises(AdapterNotFound):
        parse_reference(text)


def test_digests() -> None:
    assert check_digest("sha256:" + "0" * 64) == check_digest("0" * 64) == "0" * 64
    for bad in ("", "0" * 63, "0" * 65, "A" * 64, "../" + "0" * 61, "0" * 64 + "\n", "sha256:sha256:" + "0" * 64):
        with pytest.raises(InvalidDigest):
            check_digest(bad)
