"""Compile grammars to constraints: each is tried in the sandbox, compiled in a thread and shared while answers use
it."""

import asyncio
import hashlib
import re
from functools import partial
from weakref import WeakValueDictionary

import llguidance
from cachetools import LRUCache

from adapter_store.quota import ANONYMOUS
from lorasrv.errors import InvalidRequest
from lorasrv.fair_lock import FairLock
from lorasrv.request import TokenConstraint
from lorasrv.text.structured_output.grammar import Grammar
from lorasrv.text.structured_output.matcher import CompiledGrammar, Vocabulary, compile_matcher, one_line
from lorasrv.text.structured_output.sandbox import GrammarSandbox
from lorasrv.text.tokenizer import Tokenizer

KEPT_VERDICTS = 4096
KEPT_GRAMMARS = 2
"""Number of compiled grammars kept that no answer uses any more; the largest known one grew to 390 MiB."""
MAX_UNTRIED = 256
MAX_TRIED = 8192
"""Most requests that wait for untried grammars, and for tried ones; one key may have half of each. All requests that
arrive together with a tried grammar wait for it, so this bound is larger."""
MAX_TRIES = 4
"""Most extended tokenizers whose tries are kept."""
_TOKEN = re.compile(r"<\[(\d{1,9})\]>")
_Key = tuple[Tokenizer | None, str, str]
"""A grammar of an own tokenizer (None: the base's), by its text and its preamble."""


class GrammarCompiler:
    """Compile the grammars of a base, and of tokenizers that extend its own. Call from the event loop's thread;
    construction takes some 0.1 s.

    For many grammars, only the verdict whether they can be used is kept. A compiled grammar grows as answers use it; it
    is kept as long as any does, or until other grammars replace it.

    Args:
        vocab_size: number of the model's logits.
        ends: the tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        self._vocab_size, self._end_ids = vocab_size, sorted(ends)
        vocabulary = Vocabulary.of(tokenizer, vocab_size, self._end_ids)
        self._ends = vocabulary.ends
        self._tries: LRUCache[Tokenizer, llguidance.LLTokenizer] = LRUCache(MAX_TRIES)
        self._base = _trie(vocabulary, tokenizer) if self._ends else None
        # A special token, one that ends no answer if there is any.
        self._special = next((token for token in vocabulary.special if token not in ends), max(self._ends, default=0))
        self.examiner = GrammarSandbox(vocabulary.packed())
        # By the grammar text's digest: why it is refused, or None.
        self._verdicts: LRUCache[bytes, str | None] = LRUCache(KEPT_VERDICTS)
        self._in_use: WeakValueDictionary[_Key, CompiledGrammar] = WeakValueDictionary()
        self._last: LRUCache[_Key, CompiledGrammar] = LRUCache(KEPT_GRAMMARS)
        self._trying = FairLock("grammars to be tried", MAX_UNTRIED)
        self._compiling = FairLock("grammars to be compiled", MAX_TRIED)

    async def compile(
        self, grammar: Grammar, principal: str = ANONYMOUS, own: Tokenizer | None = None
    ) -> TokenConstraint:
        """Compile a grammar unless answers use it already. New grammars are tried and compiled one at a time, with fair
        turns between keys: each may take half a second.

        Args:
            own: the tokenizer of an adapter with its own tokens, which may be part of texts that the grammar allows.

        Raises:
            InvalidRequest: invalid, unsatisfiable or too costly; names the field.
            EngineOverloaded: too many grammars wait, of this key or in total.
        """
        compiled = self._shared(grammar, own) or await self._compiled(grammar, principal, own)
        self._last[_key(grammar, own)] = compiled
        return compiled

    async def aclose(self) -> None:
        """End the sandbox process."""
        await self.examiner.aclose()

    def _shared(self, grammar: Grammar, own: Tokenizer | None) -> CompiledGrammar | None:
        shared = self._in_use.get(_key(grammar, own))
        if shared is not None and own is not None:
            # Mark it as used: the tries of the tokenizers used last are kept.
            self._tries.get(own)
        return shared

    async def _verdict(self, text: str, principal: str) -> str | None:
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in self._verdicts:
            return self._verdicts[digest]
        async with self._trying.turn(principal):
            if digest not in self._verdicts:
                self._verdicts[digest] = await self.examiner.examine(text)
            return self._verdicts[digest]

    async def _compiled(self, grammar: Grammar, principal: str, own: Tokenizer | None) -> CompiledGrammar:
        if self._base is None:
            raise InvalidRequest("{param}: this base names no token that ends an answer", param=grammar.param)
        if (error := await self._verdict(self._tried(grammar.text, own), principal)) is not None:
            raise _refusal(grammar, error)
        async with self._compiling.turn(principal):
            if (shared := self._shared(grammar, own)) is not None:
                return shared
            trie, size = self._base, self._vocab_size
            if own is not None:
                trie, size = await self._trie_of(own), max(size, own.vocab_size)
            compile_ = partial(compile_matcher, trie, grammar.full_text)
            compiled = await asyncio.to_thread(CompiledGrammar, compile_, size, self._ends)
            if compiled.error:
                raise _refusal(grammar, one_line(compiled.error))
            self._in_use[_key(grammar, own)] = compiled
            return compiled

    def _tried(self, text: str, own: Tokenizer | None) -> str:
        """Return the text of a grammar as the sandbox tries it, which knows no special tokens of adapters. One costs as
        much as another."""
        if own is None:
            return text
        added = {token for token in own.special_ids if token >= self._vocab_size}
        return _TOKEN.sub(lambda found: f"<[{self._special}]>" if int(found[1]) in added else found[0], text)

    async def _trie_of(self, own: Tokenizer) -> llguidance.LLTokenizer:
        """Return the trie of an extended tokenizer; built one at a time, like grammars."""
        known = self._tries.get(own)
        if known is None:
            known = self._tries[own] = await asyncio.to_thread(self._built, own)
        return known

    def _built(self, own: Tokenizer) -> llguidance.LLTokenizer:
        return _trie(Vocabulary.of(own, max(self._vocab_size, own.vocab_size), self._end_ids), own)


def _key(grammar: Grammar, own: Tokenizer | None) -> _Key:
    return own, grammar.text, grammar.preamble


def _trie(vocabulary: Vocabulary, tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    return vocabulary.build(tokenizer.encode_behind)


def _refusal(grammar: Grammar, why: str) -> InvalidRequest:
    return InvalidRequest(f"{{param}} cannot be used: {why}", param=grammar.param)
