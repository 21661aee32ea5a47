"""Prompt lookup: an answer often copies from its prompt, from itself, or from a text that the client predicts.

Sources: prompt lookup decoding (Saxena 2023); inference with reference (Yang et al. 2023, arXiv:2304.04487).
"""

from collections.abc import Sequence

from adapter_store.spec import AdapterKey
from lorasrv.outputs import RequestId
from lorasrv.request import Request
from lorasrv.speculation.drafter import NO_DRAFT, Draft, DraftAsk
from lorasrv.speculation.text_match import BOUNDARY, MAX_MATCH, continuation
from lorasrv.speculation.token_buffer import TokenBuffer


class PromptLookup:
    """Search a request's own tokens for what followed its last ones before."""

    name = "lookup"
    kept_bytes = 0

    def __init__(self) -> None:
        self._texts: dict[RequestId, TokenBuffer] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def observe(self, request: Request, new_token_ids: Sequence[int]) -> None:
        if (text := self._texts.get(request.request_id)) is not None:
            text.extend(new_token_ids)

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)

    def drop(self, adapter: AdapterKey | None, salt: str | None) -> None:
        """Do nothing: no answer is kept."""

    def _draft(self, ask: DraftAsk) -> Draft:
        request = ask.request
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = TokenBuffer(request.token_ids)
        return continuation(text.tokens, request.token_ids[-MAX_MATCH:], ask.max_tokens)


class Prediction:
    """Follow the text that the client expects as the answer."""

    name = "prediction"
    kept_bytes = 0

    def __init__(self) -> None:
        self._texts: dict[RequestId, TokenBuffer] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def observe(self, request: Request, new_token_ids: Sequence[int]) -> None:
        """Do nothing: what an answer has said is compared with its prediction when a draft is asked for."""

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)

    def drop(self, adapter: AdapterKey | None, salt: str | None) -> None:
        """Do nothing: no answer is kept."""

    def _draft(self, ask: DraftAsk) -> Draft:
        request = ask.request
        predicted = request.message.prediction_token_ids
        if not predicted:
            return NO_DRAFT
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = TokenBuffer([BOUNDARY, *predicted])
        return continuation(text.tokens, spoken(request), ask.max_tokens)


def spoken(request: Request) -> list[int]:
    """Return the last tokens of an answer, after a `BOUNDARY` if these are all."""
    count = request.num_generated_tokens
    last = request.token_ids[-min(count, MAX_MATCH) :]
    return last if count >= MAX_MATCH else [BOUNDARY, *last]
