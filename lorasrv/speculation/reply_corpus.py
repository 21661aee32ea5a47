"""Reply corpus: a persona's own past answers, which serve as drafts for its next ones.

A persona repeats its greetings, closings, formats and catchphrases. Answers are kept in memory only, and used only for
the same adapter content and the same salt. So the answers of one API key never draft for another key: the speed of
tokens would reveal what others were told (arXiv:2411.01076).
"""

import sys
from array import array

from cachetools import LRUCache

from adapter_store.spec import AdapterKey
from lorasrv.request import Request, RequestStatus, is_salted
from lorasrv.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftQuery
from lorasrv.speculation.prompt_lookup import spoken
from lorasrv.speculation.text_match import BOUNDARY, INT32, continuation

MAX_TOKENS = 1 << 15
"""Most tokens kept per persona; the oldest quarter of the answers is dropped first."""
MAX_TOKEN_BYTES = 8
"""Most bytes per token: 4, and the spare room of its growing array."""
MAX_REPLY_TOKENS = 1 << 12
"""Most tokens kept of one answer."""
_COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)
CorpusKey = tuple[AdapterKey | None, str]


ENTRY_BYTES = 1024
"""Memory of an entry without its tokens: a key with a salt of up to 256 characters, and its places in two tables."""


class ReplyCorpus(Drafter):
    """Keep the most recently used finished answers by adapter and salt, and draft from them.

    Args:
        max_bytes: memory of all answers together.
    """

    name = "corpus"

    def __init__(self, max_bytes: int) -> None:
        self._texts: LRUCache[CorpusKey, array[int]] = LRUCache(max_bytes, getsizeof=_size)
        self._max_tokens = min(MAX_TOKENS, max(0, max_bytes - ENTRY_BYTES) // MAX_TOKEN_BYTES)

    @property
    def kept_bytes(self) -> int:
        return int(self._texts.currsize)

    def draft(self, query: DraftQuery) -> Draft:
        text = self._texts.get(_key(query.request))
        return NO_DRAFT if text is None else continuation(text, spoken(query.request), query.max_tokens)

    def forget(self, request: Request) -> None:
        """Keep a finished answer, if its client allows that and it was neither aborted nor refused."""
        if not request.message.speculation.remember or request.status not in _COMPLETE:
            return
        reply = request.token_ids[request.num_prompt_tokens :][: min(MAX_REPLY_TOKENS, self._max_tokens // 4)]
        key = _key(request)
        text = self._texts.pop(key, None) or array(INT32)
        if len(text) + len(reply) >= self._max_tokens:
            text = _without_oldest(text)
        text.extend([BOUNDARY, *reply])
        if _size(text) <= self._texts.maxsize:
            self._texts[key] = text

    def drop(self, adapter: AdapterKey | None, salt: str | None) -> None:
        for key in [(a, s) for a, s in self._texts if a == adapter is not None or is_salted(s, salt)]:
            del self._texts[key]


def _size(text: "array[int]") -> int:
    return ENTRY_BYTES + sys.getsizeof(text)


def _key(request: Request) -> CorpusKey:
    return request.adapter_key, request.message.cache_salt


def _without_oldest(text: "array[int]") -> "array[int]":
    """Return the answers that begin in the newer three quarters of a text."""
    begins = [at for at in range(len(text) // 4, len(text)) if text[at] == BOUNDARY]
    return text[begins[0] :] if begins else array(INT32)
