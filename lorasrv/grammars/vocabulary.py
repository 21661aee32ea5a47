"""The served tokenizer's vocabulary as llguidance needs it: every token's bytes, and which tokens end an answer.

Made once from the tokenizer, byte for byte as `Detokenizer` writes tokens; sent as bytes to the process that tries
grammars out, which has no tokenizer.
"""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llguidance

from lorasrv.detokenizer import token_bytes
from lorasrv.errors import InvalidRequest
from lorasrv.tokenizer import Tokenizer

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens` has the model's V entries: b"" where there is no token. `special` ones are no text and never allowed,
    but for those of `ends`, which are allowed where the answer may end."""

    tokens: tuple[bytes, ...]
    special: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> "Vocabulary":
        """`vocab_size`: how many logits the model has, which may be more than there are tokens."""
        texts = [tokenizer.token(i) for i in range(vocab_size)]
        tokens = tuple(b"" if text is None else token_bytes(text, tokenizer.decoding) for text in texts)
        special = sorted({*tokenizer.special_ids, *ends})
        in_range = range(vocab_size)
        return cls(tokens, tuple(i for i in special if i in in_range), tuple(i for i in sorted(ends) if i in in_range))

    def packed(self) -> bytes:
        """For `unpacked`: a header, the tokens' lengths, their bytes."""
        header = json.dumps([self.special, self.ends]).encode()
        lengths = [len(token) for token in self.tokens]
        numbers = struct.pack(f"<II{len(lengths)}I", len(header), len(lengths), *lengths)
        return numbers + header + b"".join(self.tokens)

    @classmethod
    def unpacked(cls, packed: bytes) -> "Vocabulary":
        header_size, count = struct.unpack_from("<II", packed)
        lengths = struct.unpack_from(f"<{count}I", packed, 8)
        at = 8 + 4 * count
        special, ends = json.loads(packed[at : at + header_size])
        at += header_size
        tokens = []
        for length in lengths:
            tokens.append(packed[at : at + length])
            at += length
        return cls(tuple(tokens), tuple(special), tuple(ends))

    def build(self, encode: Encode | None = None) -> llguidance.LLTokenizer:
        """llguidance's own form: a trie. Takes 0.2 s for 50,000 tokens, and nothing else in Python runs meanwhile.

        `encode` gives a text's usual tokens, so that forced text is spelled as the model knows it.
        """
        wrapper = _Wrapper(self, encode)
        return llguidance.LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=list(self.ends))  # type: ignore[arg-type]


class _Wrapper:
    """What llguidance wants of a tokenizer. It asks for the tokens of text that a grammar forces."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special)
        self.eos_token_id = vocabulary.ends[0]
        self._encode = encode
        special = set(vocabulary.special)
        self._text_tokens = {i: t for i, t in enumerate(vocabulary.tokens) if t and i not in special}
        self._ids = {token: i for i, token in reversed(self._text_tokens.items())}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        wanted = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)
        return self._usual(wanted) or self._longest_first(wanted)

    def _usual(self, wanted: bytes) -> list[int]:
        """[] if the tokenizer would write something else: a blank in front, or a special token."""
        if self._encode is None:
            return []
        try:
            ids = list(self._encode(wanted.decode()))
        except (UnicodeDecodeError, InvalidRequest):
            return []
        return ids if b"".join(self._text_tokens.get(i, b"\xff") for i in ids) == wanted else []

    def _longest_first(self, wanted: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(wanted):
            for end in range(min(len(wanted), at + self._longest), at, -1):
                found = self._ids.get(wanted[at:end])
                if found is not None:
                    ids.append(found)
                    break
            else:
                return ids  # a byte that no token has
            at = end
        return ids
