"""Text as it streams: whole characters, nothing lost, the same as decoding at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import sentencepiece

from lorasrv.sampling_params import TextOptions
from lorasrv.text.detokenizer import Detokenizer, _byte_alphabet
from lorasrv.text.gguf_vocabularies import BpeVocabulary
from lorasrv.text.tokenizer import Tokenizer, TokenizerSource

IDS = st.lists(st.integers(0, 49_500), max_size=40)
WORDS = (*"abcdefgh.한", "▁ab", "<0xZZ>")
SENTENCEPIECE = {strip: sentencepiece(WORDS, strips=strip) for strip in (False, True)}


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, TextOptions(skip_special_tokens=skip))
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(ids=IDS, skip=st.booleans())
def test_any_ids_stream_to_their_decoding(builtin_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(builtin_tokenizer, ids, skip)) == builtin_tokenizer.decode(ids, skip)


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=24), skip=st.booleans())
def test_any_bytes_stream_to_their_decoding(builtin_tokenizer: Tokenizer, raw: bytes, skip: bool) -> None:
    """Single-byte tokens: valid UTF-8, broken UTF-8 and everything between."""
    letters = {byte: char for char, byte in _byte_alphabet().items()}
    ids = [builtin_tokenizer.token_id(letters[byte]) for byte in raw]
    known = [i for i in ids if i is not None]
    assert "".join(stream(builtin_tokenizer, known, skip)) == builtin_tokenizer.decode(known, skip)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 275) | st.integers(256, 272), max_size=30),
    strip=st.booleans(),
    skip=st.booleans(),
)
def test_byte_fallback_streams_to_its_decoding(ids: list[int], strip: bool, skip: bool) -> None:
    tokenizer = SENTENCEPIECE[strip]
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize(("strip", "text"), [(False, " ab a"), (True, "ab a")])
def test_byte_fallback_strips_the_first_blank_only(strip: bool, text: str) -> None:
    tokenizer = SENTENCEPIECE[strip]
    ids = [tokenizer.token_id(token) for token in ("<s>", "▁ab", "▁", "a")]
    assert "".join(stream(tokenizer, ids)) == text


def test_byte_fallback_text() -> None:
    tokenizer = SENTENCEPIECE[False]
    text = "ab cd. 한 😀 é"
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "😀" in "".join(pieces[:-1])


def test_corpus_streams_in_whole_characters(builtin_tokenizer: Tokenizer, corpus: list[str]) -> None:
    for text in (text for text in corpus if "\ufffd" not in text):
        pieces = stream(builtin_tokenizer, builtin_tokenizer.encode(text), skip=False)
        assert "".join(pieces) == text
        assert pieces[-1] == ""
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_over_several_tokens_waits_for_its_last(builtin_tokenizer: Tokenizer) -> None:
    ids = builtin_tokenizer.encode("🤷🏻")
    assert len(ids) > 2
    pieces = stream(builtin_tokenizer, ids)
    assert "".join(pieces) == "🤷🏻"
    assert any(piece == "" for piece in pieces[:-2])
    detokenizer = Detokenizer(builtin_tokenizer)
    assert detokenizer.push(ids[0]) == ""
    assert detokenizer.flush() == builtin_tokenizer.decode(ids[:1]) == "\ufffd"


def test_text_that_goes_on_keeps_the_blank_that_others_lose() -> None:
    tokenizer = SENTENCEPIECE[True]
    ids = tokenizer.encode(f" {WORDS[0]}", add_special_tokens=False)
    texts = [
        "".join([*map(detokenizer.push, ids), detokenizer.flush()])
        for detokenizer in (Detokenizer(tokenizer), Detokenizer(tokenizer, TextOptions(strip_start=False)))
    ]
    assert texts == [WORDS[0], f" {WORDS[0]}"]


def test_special_tokens_are_skipped_unless_wanted(builtin_tokenizer: Tokenizer) -> None:
    ids = builtin_tokenizer.encode("a<|im_end|>b")
    assert "".join(stream(builtin_tokenizer, ids)) == "ab"
    assert "".join(stream(builtin_tokenizer, ids, skip=False)) == "a<|im_end|>b"


def test_added_tokens_outside_the_byte_alphabet_are_their_own_text(builtin_source: TokenizerSource) -> None:
    words = builtin_source.vocabulary
    assert isinstance(words, BpeVocabulary)
    extra = BpeVocabulary((*words.tokens, "two words", "한국"), words.merges, words.pre, words.control, (49152, 49153))
    tokenizer = Tokenizer.from_source(TokenizerSource(extra))
    ids = tokenizer.encode("x two words 한국")
    assert {49152, 49153} <= set(ids)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "x two words 한국"


@pytest.mark.parametrize("token", ["Ġthe", "ð"])
def test_each_token_is_looked_at_once(
    builtin_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """Nothing is decoded again, also when no character ever ends."""
    seen, look_up = [], builtin_tokenizer.token
    monkeypatch.setattr(builtin_tokenizer, "token", lambda i: seen.append(i) or look_up(i))
    monkeypatch.delattr(Tokenizer, "decode")
    ids = [builtin_tokenizer.token_id(token)] * 500
    assert len("".join(stream(builtin_tokenizer, ids))) >= 500
    assert seen == ids


def test_pieces_come_at_once(builtin_tokenizer: Tokenizer) -> None:
    """Plain words are never held back."""
    assert all(stream(builtin_tokenizer, builtin_tokenizer.encode("Hello, world! This is plain."))[:-1])
