"""Prompt lookup: an answer often copies from its prompt, from itself, or from a text that the client predicts.

Sources: prompt lookup decoding (Saxena 2023); inference with reference (Yang et al. 2023, arXiv:2304.04487).
"""

from array import array
from collections.abc import Sequence

from lorasrv.outputs import RequestId
from lorasrv.request import Request
from lorasrv.speculation.drafter import Draft, Drafter, DraftQuery
from lorasrv.speculation.text_match import BOUNDARY, INT32, MAX_MATCH, continuation


class _TextSearch(Drafter):
    """Search one text of each request for what followed its last tokens."""

    def __init__(self) -> None:
        self._texts: dict[RequestId, array[int]] = {}

    def _text(self, request: Request) -> Sequence[int]:
        """Return the text to search."""
        raise NotImplementedError

    def _last(self, request: Request) -> Sequence[int]:
        """Return the tokens before the draft."""
        raise NotImplementedError

    def draft(self, query: DraftQuery) -> Draft:
        request = query.request
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = array(INT32, self._text(request))
        return continuation(text, self._last(request), query.max_tokens)

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)


class PromptLookup(_TextSearch):
    """Search a request's own tokens."""

    name = "lookup"

    def _text(self, request: Request) -> Sequence[int]:
        return request.token_ids

    def _last(self, request: Request) -> Sequence[int]:
        return request.token_ids[-MAX_MATCH:]

    def observe(self, request: Request, new_token_ids: Sequence[int]) -> None:
        if (text := self._texts.get(request.request_id)) is not None:
            text.extend(new_token_ids)


class Prediction(_TextSearch):
    """Search the text that the client expects as the answer."""

    name = "prediction"

    def _text(self, request: Request) -> Sequence[int]:
        predicted = request.message.prediction_token_ids
        return (BOUNDARY, *predicted) if predicted else ()

    def _last(self, request: Request) -> Sequence[int]:
        return spoken(request)


def spoken(request: Request) -> list[int]:
    """Return the last tokens of an answer, after a `BOUNDARY` if these are all."""
    count = request.num_generated_tokens
    last = request.token_ids[-min(count, MAX_MATCH) :]
    return last if count >= MAX_MATCH else [BOUNDARY, *last]
