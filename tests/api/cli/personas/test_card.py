"""Character cards: what becomes of each field, JSON and PNG, and what is refused."""

import json
from typing import Any

import pytest
from cards import ADA, EXPECTED, card, chunk, png
from hypothesis import given
from hypothesis import strategies as st

from api.cli.common.terminal import CliError
from api.cli.personas.card import PNG, defaults_of_card


@pytest.mark.parametrize(
    "data",
    [
        card(),
        b"\xef\xbb\xbf" + card(),
        card("chara_card_v3"),
        png(chara=card()),
        png(chara=card(name="Old"), ccv3=card("chara_card_v3")),
    ],
)
def test_every_form_is_the_same_persona(data: bytes) -> None:
    found, notices = defaults_of_card(data)
    assert found == EXPECTED
    assert notices == ["left out of mes_example: turns without their question or answer"]


def test_what_is_left_out_is_told() -> None:
    book = {"entries": [{"keys": ["x"], "content": "y"}]}
    full = card(post_history_instructions="Remember!", character_book=book, mes_example="", nickname="Countess")
    with pytest.raises(CliError, match="character book of 1 entry,"):
        defaults_of_card(full)
    found, notices = defaults_of_card(full, without_book=True)
    assert (found["name"], "examples" in found) == ("Countess", False)
    assert notices == ["left out: character_book, 1 entry", "left out: post_history_instructions"]
    assert defaults_of_card(card(character_book={"entries": []}))[1] == defaults_of_card(card())[1]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "neither JSON nor a PNG"),
        (b"[1]", "a JSON object is expected"),
        (json.dumps(ADA).encode(), "spec must be one of"),
        (b'{"spec": "chara_card_v2"}', "spec must be one of"),
        (card(description=5), "description is not a text"),
        (card(alternate_greetings="x"), "alternate_greetings is not a list"),
        (card(character_book={"entries": 5}), "entries that are not a list"),
        (card(first_mes="\ud83d"), "first_mes has half a character"),
        (card(alternate_greetings=["\udc00"]), "alternate_greetings has half a character"),
        (png(), "holds no character card"),
        (png(comment=card()), "holds no character card"),
        (png(chara=card())[:-20], "ends early"),
        (png(chara=card()).replace(b"tEXtchara", b"tEXtcharb"), "checksum is wrong"),
        (PNG + chunk(b"tEXt", b"chara\0{}"), "not base64"),
        (PNG + b"\xff\xff\xff\xff", "ends early"),
        (b"[" * 100_000, "neither JSON nor a PNG"),
    ],
)
def test_what_is_no_card(data: bytes, says: str) -> None:
    with pytest.raises(CliError, match=says):
        defaults_of_card(data)


@given(data=st.binary(max_size=80) | st.binary(max_size=80).map(lambda data: chunk(b"tEXt", b"chara\0" + data)))
def test_any_file_is_a_card_or_refused(data: bytes) -> None:
    for each in (data, PNG + data):
        with pytest.raises(CliError):
            defaults_of_card(each)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=2))


@given(fields=st.dictionaries(st.sampled_from([*ADA, "character_book", "nickname"]), JSON))
def test_any_value_of_a_field_is_taken_or_refused(fields: dict[str, Any]) -> None:
    try:
        found, _ = defaults_of_card(card(**fields))
    except CliError:
        return
    json.dumps(found, ensure_ascii=False).encode()
