"""Compile grammars to constraints: tested in the sandbox, compiled in a thread, cached by content."""

import asyncio

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

KEPT_BYTES = 1 << 30
KEPT_REFUSALS = 512
MAX_WAITING = 256
MAX_TRIES = 4
"""Most extended tokenizers whose tokens, and grammars, are kept."""
LEXER_BYTES = 28 << 20
"""Most that answers add to a grammar while it is kept: `LEXER_STATES`, some 550 bytes each."""


class GrammarCompiler:
    """Compile and cache the grammars of a base, and of tokenizers that extend its own. Call from the event loop's
    thread; construction takes some 0.1 s.

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
        self.examiner = GrammarSandbox(vocabulary.packed())
        # By the tokenizer, unless it is the base's.
        self._kept: LRUCache[tuple[Tokenizer | None, str], CompiledGrammar] = LRUCache(
            KEPT_BYTES, getsizeof=lambda grammar: grammar.nbytes
        )
        self._refused: LRUCache[str, str] = LRUCache(KEPT_REFUSALS)
        self._turns = FairLock("grammars to be compiled", MAX_WAITING)

    async def compile(
        self, grammar: Grammar, principal: str = ANONYMOUS, own: Tokenizer | None = None
    ) -> TokenConstraint:
        """Compile a grammar, one at a time with fair turns between keys: each may take half a second.

        Args:
            own: the tokenizer of an adapter with tokens of its own, which may be part of texts that the grammar allows.
                Special tokens that a grammar names are the base's.

        Raises:
            InvalidRequest: invalid, unsatisfiable or too costly; names the field.
            EngineOverloaded: too many grammars wait, of this key or in total.
        """
        if (kept := self._known(grammar, own)) is not None:
            return kept
        async with self._turns.turn(principal):
            return self._known(grammar, own) or await self._compiled(grammar, own)

    async def aclose(self) -> None:
        """End the sandbox process."""
        await self.examiner.aclose()

    def _known(self, grammar: Grammar, own: Tokenizer | None) -> CompiledGrammar | None:
        if (why := self._refused.get(grammar.text)) is not None:
            raise _refusal(grammar, why)
        kept = self._kept.get((own, grammar.text))
        if kept is not None and kept.has_failed:
            del self._kept[own, grammar.text]
            return None
        if kept is not None and own is not None:
            # Those of tokenizers used last are kept.
            self._tries.get(own)
        return kept

    async def _compiled(self, grammar: Grammar, own: Tokenizer | None) -> CompiledGrammar:
        if self._base is None:
            raise InvalidRequest("{param}: this base names no token that ends an answer", param=grammar.param)
        verdict = await self.examiner.examine(grammar.text)
        if verdict.error is not None:
            self._refused[grammar.text] = verdict.error
            raise _refusal(grammar, verdict.error)
        trie, size = self._base, self._vocab_size
        if own is not None:
            trie, size = await self._trie_of(own), max(size, own.vocab_size)
        matcher = await asyncio.to_thread(compile_matcher, trie, grammar.text)
        if matcher.is_error():
            raise _refusal(grammar, one_line(matcher.get_error()))
        nbytes = verdict.nbytes + LEXER_BYTES
        compiled = await asyncio.to_thread(CompiledGrammar, matcher, size, self._ends, nbytes)
        if nbytes <= KEPT_BYTES:
            self._kept[own, grammar.text] = compiled
        return compiled

    async def _trie_of(self, own: Tokenizer) -> llguidance.LLTokenizer:
        """Return the tokens of an extended tokenizer; one at a time, as grammars are compiled."""
        known = self._tries.get(own)
        if known is None:
            known = await asyncio.to_thread(self._built, own)
            self._tries[own] = known
            # A grammar keeps the tokens that it was compiled for, which are far larger than itself.
            for kept in [kept for kept in self._kept if kept[0] is not None and kept[0] not in self._tries]:
                del self._kept[kept]
        return known

    def _built(self, own: Tokenizer) -> llguidance.LLTokenizer:
        return _trie(Vocabulary.of(own, max(self._vocab_size, own.vocab_size), self._end_ids), own)


def _trie(vocabulary: Vocabulary, tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    return vocabulary.build(lambda text: tokenizer.encode(text, add_special_tokens=False))


def _refusal(grammar: Grammar, why: str) -> InvalidRequest:
    return InvalidRequest(f"{{param}} cannot be used: {why}", param=grammar.param)
