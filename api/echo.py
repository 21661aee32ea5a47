"""Prompts that come back before their answer (`echo`): their text, and where in it each token begins."""

from collections.abc import Sequence
from dataclasses import dataclass

from api.logprobs import PlacedToken
from lorasrv.detokenizer import Detokenizer
from lorasrv.request import TokenLogprobs
from lorasrv.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is shown. `offsets`: the character of `text` at which each token begins."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def of(cls, prompt: str | Sequence[int], tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> "Echo":
        """A text as it was sent, token ids as their text, special tokens included."""
        if isinstance(prompt, str):
            return cls._of_text(prompt, tokenizer, add_special_tokens)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        pieces, offsets, length = [], [], 0
        for token in prompt:
            offsets.append(length)
            pieces.append(detokenizer.push((token,)))
            length += len(pieces[-1])
        return cls("".join(pieces) + detokenizer.flush(), prompt, offsets)

    @classmethod
    def _of_text(cls, text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> "Echo":
        ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens)
        plain = cls.of(tokenizer.encode(text, add_special_tokens=False), tokenizer)
        at = next((n for n in range(len(ids)) if ids[n] == plain.token_ids[0]), 0) if plain.token_ids else 0
        if plain.text == text and list(ids[at : at + len(plain.token_ids)]) == plain.token_ids:
            # The library's own offsets leave a blank out that a token begins with.
            offsets[at : at + len(plain.offsets)] = plain.offsets
        return cls(text, ids, offsets)

    def placed(self, known: Sequence[TokenLogprobs | None]) -> list[PlacedToken]:
        """Its tokens with how likely they are."""
        return [PlacedToken(*each) for each in zip(self.token_ids, known, self.offsets, strict=True)]
