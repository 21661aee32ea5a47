"""Find the fixed beginning of a persona's prompt, the same in all its requests: up to the first `{{user}}` or turn.

It is computed as the common prefix of two prompts with different names and turns. Its pages are shared by all API keys
and kept on disk, so they must contain nothing that a client wrote. A request therefore uses them only if its client
wrote no part of this beginning.
"""

import threading
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Protocol

from cachetools import LRUCache
from starlette.concurrency import run_in_threadpool

from adapter_store.spec import AdapterKey, AdapterRef
from adapter_store.storage.snapshots import owner_of
from api.schemas.openai import ChatBody
from api.serving.chat import ChatEngine, plan_chat
from api.serving.personas import PROMPT_FIELDS, AppliedPersona, Personas, StoredPersona, apply_to_body
from lorasrv.errors import InvalidRequest
from lorasrv.request import FixedPrefix
from lorasrv.text.tokenizer import Tokenizer

MAX_CACHED = 256
_CONVERSATIONS = (("Bo", "Hello"), ("Xi", "9"))
"""Names and turns without a common beginning."""


@dataclass(frozen=True, slots=True)
class PrefixTokens:
    """Hold the fixed prefix of a version, and its tokens."""

    prefix: FixedPrefix
    token_ids: tuple[int, ...]


class PrefixEngine(ChatEngine, Protocol):
    """Declare the engine's interface for rendering fixed prefixes; `AsyncEngine` implements it."""

    page_size_tokens: int

    async def own_tokenizer(self, adapter: AdapterKey | None) -> Tokenizer | None: ...


class FixedPrefixes:
    """Render fixed prefixes and cache the most recently used. Thread-safe."""

    def __init__(self, engine: PrefixEngine, personas: Personas) -> None:
        self._engine = engine
        self._personas = personas
        self._lock = threading.Lock()
        # The date is part of the key, because templates may write it.
        self._known: LRUCache[tuple[AdapterRef, str], PrefixTokens | None] = LRUCache(MAX_CACHED)

    async def of_prompt(self, persona: AppliedPersona | None, prompt: object) -> FixedPrefix | None:
        """Return the persona's fixed prefix if a prompt begins with all its pages, else None.

        Raises:
            AdapterNotFound: the version was deleted.
        """
        if persona is None or not persona.is_whole or not isinstance(prompt, list):
            return None
        found = await self.of_version(persona.ref)
        if found is None:
            return None
        # Only whole pages are shared. Behind them, the turn's first characters may have joined a token of the prefix.
        shared = found.prefix.num_tokens - found.prefix.num_tokens % self._engine.page_size_tokens
        return found.prefix if tuple(prompt[:shared]) == found.token_ids[:shared] else None

    async def of_version(self, ref: AdapterRef) -> PrefixTokens | None:
        """Return the fixed prefix of a version; None if it has no prompt, or if the prefix is shorter than a page.

        Raises:
            AdapterNotFound: the version was deleted.
        """
        key = (ref, datetime.now().strftime("%x"))
        with self._lock:
            if key in self._known:
                return self._known[key]
        stored, own = await self._personas.find(ref), await self._engine.own_tokenizer(ref.key)
        found = await run_in_threadpool(self._render, stored, own)
        with self._lock:
            self._known[key] = found
        return found

    def _render(self, stored: StoredPersona, own: Tokenizer | None) -> PrefixTokens | None:
        if self._engine.chat_template is None or not stored.has_prompt:
            return None
        defaults = stored.defaults.model_copy(
            update={name: None for name in type(stored.defaults).model_fields if name not in PROMPT_FIELDS}
        )
        alone = StoredPersona(stored.ref, "", defaults, stored.owner)
        try:
            prompts = [self._prompt(alone, user, turn, own) for user, turn in _CONVERSATIONS]
        except InvalidRequest:
            return None
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False))
        tokens = tuple(token for token, _ in pairs)
        if len(tokens) < self._engine.page_size_tokens:
            return None
        owner = owner_of(stored.ref.adapter_id, stored.ref.version)
        return PrefixTokens(FixedPrefix(owner, f"prefix:{stored.ref.persona}", len(tokens)), tokens)

    def _prompt(self, stored: StoredPersona, user: str, turn: str, own: Tokenizer | None) -> list[int]:
        asked = ChatBody.model_validate({"messages": [{"role": "user", "content": turn}], "user": user})
        body, applied = apply_to_body(asked, stored, may_read=True)
        return plan_chat(body, self._engine, applied, own).prompt
