"""Bad words in vocabularies that put a blank in front of each text, and in others."""

import pytest

from lorasrv.text.bad_words import bad_word_ids
from lorasrv.text.gguf_vocabularies import SentencePieceVocabulary
from lorasrv.text.tokenizer import Tokenizer, TokenizerSource

TOKENS = ("<unk>", "a", "b", "▁", "ab", "▁ab", *(f"<0x{byte:02X}>" for byte in range(256)))


@pytest.mark.parametrize("adds_blank", [False, True])
@pytest.mark.parametrize("front", ["b ", "b\n", "(", "b,"])
def test_a_word_is_found_behind_any_text(adds_blank: bool, front: str) -> None:
    scores, joined = tuple(-float(i) for i in range(len(TOKENS))), (1, 2, 3, 4, 5)
    words = SentencePieceVocabulary(TOKENS, scores, joined, unknown_id=0, adds_space_prefix=adds_blank)
    tokenizer = Tokenizer.from_source(TokenizerSource(words))
    ids = tuple(tokenizer.encode(f"{front}ab"))
    assert any(ids[-len(word) :] == word for word in bad_word_ids(["ab"], tokenizer, len(TOKENS)))
