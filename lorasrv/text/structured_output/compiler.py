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

KEPT_BYTES = 256 << 20
KEPT_REFUSALS = 512
MAX_WAITING = 256
LEAST_BYTES = 256 << 10
"""Minimum size that a grammar counts as: small ones do not show in a process's memory."""


class GrammarCompiler:
    """Compile and cache the grammars of one tokenizer. Call from the event loop's thread; construction takes some
    0.1 s.

    Args:
        vocab_size: number of the model's logits.
        ends: the tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        self._vocabulary = Vocabulary.of(tokenizer, vocab_size, sorted(ends))
        self._tokenizer: llguidance.LLTokenizer | None = None
        if self._vocabulary.ends:
            self._tokenizer = self._vocabulary.build(lambda text: tokenizer.encode(text, add_special_tokens=False))
        self.examiner = GrammarSandbox(self._vocabulary.packed())
        self._kept: LRUCache[str, CompiledGrammar] = LRUCache(KEPT_BYTES, getsizeof=lambda grammar: grammar.nbytes)
        self._refused: LRUCache[str, str] = LRUCache(KEPT_REFUSALS)
        self._turns = FairLock("grammars to be compiled", MAX_WAITING)

    async def compile(self, grammar: Grammar, principal: str = ANONYMOUS) -> TokenConstraint:
        """Compile a grammar, one at a time with fair turns between keys: each may take half a second.

        Raises:
            InvalidRequest: invalid, unsatisfiable or too costly; names the field.
            EngineOverloaded: too many grammars wait, of this key or in total.
        """
        if (kept := self._known(grammar)) is not None:
            return kept
        async with self._turns.turn(principal):
            return self._known(grammar) or await self._compiled(grammar)

    async def aclose(self) -> None:
        """End the sandbox process."""
        await self.examiner.aclose()

    def _known(self, grammar: Grammar) -> CompiledGrammar | None:
        if (why := self._refused.get(grammar.text)) is not None:
            raise _refusal(grammar, why)
        return self._kept.get(grammar.text)

    async def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        if self._tokenizer is None:
            raise InvalidRequest(f"{grammar.param}: this base names no token that ends an answer", param=grammar.param)
        verdict = await self.examiner.examine(grammar.text)
        if verdict.error is not None:
            self._refused[grammar.text] = verdict.error
            raise _refusal(grammar, verdict.error)
        matcher = await asyncio.to_thread(compile_matcher, self._tokenizer, grammar.text)
        if matcher.is_error():
            raise _refusal(grammar, one_line(matcher.get_error()))
        nbytes = max(LEAST_BYTES, verdict.nbytes)
        vocabulary = self._vocabulary
        compiled = await asyncio.to_thread(CompiledGrammar, matcher, len(vocabulary.tokens), vocabulary.ends, nbytes)
        if nbytes <= KEPT_BYTES:
            self._kept[grammar.text] = compiled
        return compiled


def _refusal(grammar: Grammar, why: str) -> InvalidRequest:
    return InvalidRequest(f"{grammar.param} cannot be used: {why}", param=grammar.param)
