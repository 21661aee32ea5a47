"""How likely tokens are, as OpenAI's clients read it: in chat's shape and in the older one of plain completions.

The pieces of an answer and of its probabilities go out together: a token waits until text behind its beginning does, or
the end. Tokens of a stop string that was cut off never do.

Prompts that come back before their answer (`echo`): their text, and where in it each token begins.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lorasrv.outputs import RequestOutput, TokenLogprobs
from lorasrv.text.detokenizer import Detokenizer, token_id_bytes
from lorasrv.text.tokenizer import Tokenizer

Json = dict[str, Any]
LEAST = -9999.0
"""What OpenAI says for "never": JSON has no infinity."""


class PlacedToken(NamedTuple):
    """A token that has its probability, or the first of a prompt, and where in the text it begins, in characters."""

    token_id: int
    known: TokenLogprobs | None
    offset: int


@dataclass(slots=True)
class ShownTokens:
    """Of one choice: which tokens go out with which piece of its text. `shift` characters stand before the answer."""

    shift: int = 0
    _num_shown: int = 0
    _waiting: list[PlacedToken] = field(default_factory=list)

    def take(self, output: RequestOutput) -> list[PlacedToken]:
        """The tokens that go with this output's text."""
        placed = zip(output.logprobs, output.text_offsets, strict=True)
        self._waiting += [PlacedToken(known.token_id, known, offset) for known, offset in placed]
        self._num_shown += len(output.text)
        if output.finished and not isinstance(output.stop_reason, str):
            shown, self._waiting = self._waiting, []
        else:
            count = sum(placed.offset < self._num_shown for placed in self._waiting)
            shown, self._waiting = self._waiting[:count], self._waiting[count:]
        return [placed._replace(offset=placed.offset + self.shift) for placed in shown]


@dataclass(frozen=True, slots=True)
class LogprobsFormatter:
    """Tokens as text. `as_ids` spells them `token_id:17`, as vLLM does on request."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def chat(self, tokens: Sequence[PlacedToken]) -> Json | None:
        """Chat's shape; None if there are no tokens."""
        if not tokens:
            return None
        content = []
        for placed in tokens:
            assert placed.known is not None, "a conversation's prompt is not shown"
            top = [self._chat_token(*pair) for pair in placed.known.top]
            content.append({**self._chat_token(placed.token_id, placed.known.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[PlacedToken], top: int) -> Json | None:
        """The older shape; None if there are no tokens. The token itself is among the likeliest `top` in any case."""
        if not tokens:
            return None
        return {
            "tokens": [self._legacy(placed.token_id) for placed in tokens],
            "token_logprobs": [placed.known and finite(placed.known.logprob) for placed in tokens],
            "top_logprobs": [placed.known and self._legacy_top(placed.known, top) for placed in tokens],
            "text_offset": [placed.offset for placed in tokens],
        }

    def prompt(self, known: Iterable[TokenLogprobs | None], top: int) -> list[Json | None]:
        """vLLM's shape for prompts: by token id. The rank of a token that is not among the likeliest is not known."""
        return [None if one is None else self._prompt_token(one, top) for one in known]

    def _prompt_token(self, one: TokenLogprobs, top: int) -> Json:
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(one.top[:top], 1)]
        if one.token_id not in {token for token, _, _ in ranked}:
            ranked.append((one.token_id, one.logprob, None))  # type: ignore[arg-type]
        return {
            str(token): {"logprob": finite(value), "rank": rank, "decoded_token": self._text(token)}
            for token, value, rank in ranked
        }

    def _legacy_top(self, one: TokenLogprobs, top: int) -> Json:
        # The likelier first: where two are spelled alike, that one is told.
        pairs = [*one.top[:top], (one.token_id, one.logprob)]
        return {self._legacy(token): finite(value) for token, value in reversed(pairs)}

    def _chat_token(self, token_id: int, logprob: float) -> Json:
        raw = token_id_bytes(self.tokenizer, token_id)
        text = f"token_id:{token_id}" if self.as_ids else _text_of(raw) or _escaped(raw)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    def _legacy(self, token_id: int) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        raw = token_id_bytes(self.tokenizer, token_id)
        text = _text_of(raw)
        return f"bytes:{_escaped(raw)}" if text is None else text

    def _text(self, token_id: int) -> str:
        return token_id_bytes(self.tokenizer, token_id).decode("utf-8", "replace")


def _text_of(raw: bytes) -> str | None:
    """None for a part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _escaped(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """As JSON can have it."""
    return max(LEAST, logprob)


def mean_logprob(outputs: Sequence[RequestOutput]) -> float:
    """Of all tokens of an answer: OpenAI and TGI rank `best_of` by it."""
    known = [one.logprob for output in outputs for one in output.logprobs]
    return math.fsum(known) / max(1, len(known))


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt as it is shown. `offsets`: the character of `text` at which each token begins."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def of(cls, prompt: str | Sequence[int], tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> "PromptEcho":
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
    def _of_text(cls, text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> "PromptEcho":
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
