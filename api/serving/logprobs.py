"""Format log-probabilities for OpenAI's clients: for chat, and in the older form for plain completions.

A token is sent with the text in which it begins, at the latest at the end of the answer. Tokens of a removed stop
string are not sent. With `echo`, the prompt is returned with the position of each token in its text.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from api.asgi.json_lines import Json
from lorasrv.outputs import RequestOutput, TokenLogprobs
from lorasrv.sampling_params import EVERY_TOKEN
from lorasrv.text.detokenizer import Detokenizer, token_id_bytes
from lorasrv.text.tokenizer import Tokenizer

LEAST = -9999.0
"""OpenAI's value for zero probability, as JSON has no infinity."""


class PlacedToken(NamedTuple):
    """Place a token in the text."""

    token_id: int
    # None for the first token of a prompt.
    known: TokenLogprobs | None
    # Character at which the token begins.
    offset: int


@dataclass(slots=True)
class ShownTokens:
    """Assign the tokens of one choice to the pieces of its text."""

    # Number of characters in front of the answer.
    shift: int = 0
    _num_shown: int = 0
    _waiting: list[PlacedToken] = field(default_factory=list)

    def take(self, output: RequestOutput) -> list[PlacedToken]:
        """Return the tokens to send with this output's text."""
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
    """Format tokens as text."""

    tokenizer: Tokenizer
    # Spell tokens `token_id:17`, as vLLM does on request.
    as_ids: bool = False

    def chat(self, tokens: Sequence[PlacedToken]) -> Json:
        """Return the form for chat."""
        content = []
        for placed in tokens:
            assert placed.known is not None, "a conversation's prompt is not shown"
            top = [self._chat_token(*pair) for pair in placed.known.top]
            content.append({**self._chat_token(placed.token_id, placed.known.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[PlacedToken], top: int) -> Json:
        """Return the older form. The likeliest `top` always include the token itself."""
        return {
            "tokens": [self._legacy(placed.token_id) for placed in tokens],
            "token_logprobs": [placed.known and finite(placed.known.logprob) for placed in tokens],
            "top_logprobs": [placed.known and self._legacy_top(placed.known, top) for placed in tokens],
            "text_offset": [placed.offset for placed in tokens],
        }

    def prompt(self, known: Iterable[TokenLogprobs | None], top: int) -> list[Json | None]:
        """Return vLLM's form for prompts, by token id. Tokens that are not among the likeliest have no rank."""
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
        # Likelier tokens first; reversed, so that of two tokens with the same spelling the likelier wins.
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
    """Decode UTF-8; None for part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _escaped(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """Return a value that JSON can represent."""
    return max(LEAST, logprob)


def mean_logprob(outputs: Sequence[RequestOutput]) -> float:
    """Return the mean log-probability over all tokens of an answer, by which OpenAI and TGI rank `best_of`."""
    known = [one.logprob for output in outputs for one in output.logprobs]
    return math.fsum(known) / max(1, len(known))


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """Hold a prompt as it is returned."""

    text: str
    token_ids: Sequence[int]
    # Character of `text` at which each token begins.
    offsets: Sequence[int]

    @classmethod
    def of(cls, prompt: str | Sequence[int], tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> "PromptEcho":
        """Build from a text, which is returned as sent, or from token ids, whose text includes special tokens."""
        if isinstance(prompt, str):
            return cls._of_text(prompt, tokenizer, add_special_tokens)
        detokenizer = Detokenizer(tokenizer, EVERY_TOKEN)
        pieces, offsets, length = [], [], 0
        for token in prompt:
            offsets.append(length + detokenizer.num_owed(token))
            pieces.append(detokenizer.push(token))
            length += len(pieces[-1])
        return cls("".join(pieces) + detokenizer.flush(), prompt, offsets)

    @classmethod
    def _of_text(cls, text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> "PromptEcho":
        ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens)
        plain = cls.of(tokenizer.encode(text, add_special_tokens=False), tokenizer)
        at = next((n for n in range(len(ids)) if ids[n] == plain.token_ids[0]), 0) if plain.token_ids else 0
        if plain.text == text and list(ids[at : at + len(plain.token_ids)]) == plain.token_ids:
            # The tokenizer library's own offsets leave out a token's leading blank.
            offsets[at : at + len(plain.offsets)] = plain.offsets
        return cls(text, ids, offsets)

    def placed(self, known: Sequence[TokenLogprobs | None]) -> list[PlacedToken]:
        """Return the tokens with their log-probabilities."""
        return [PlacedToken(*each) for each in zip(self.token_ids, known, self.offsets, strict=True)]
