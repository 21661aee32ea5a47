"""Bad words: texts that an answer must not contain, as the tokens that spell them."""

from collections.abc import Iterable

from lorasrv.text.tokenizer import Tokenizer


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each text, after a space and directly after other text, each sequence once.

    A text that the model spells differently, with shorter tokens, is not recognised, as in vLLM and transformers.

    Raises:
        InvalidRequest: a text has lone surrogates.
    """
    spelled = (blank + word.lstrip() for word in words for blank in ("", " "))
    found = (tuple(tokenizer.encode_behind(text)) for text in spelled)
    return tuple(dict.fromkeys(ids for ids in found if ids and max(ids) < vocab_size))
