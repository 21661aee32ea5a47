"""Compile a grammar without a server, and ask what texts it allows."""

import asyncio
import threading
from functools import cache

from adapter_store.spec import AddedToken
from lorasrv.text.structured_output.compiler import GrammarCompiler
from lorasrv.text.structured_output.grammar import Grammar
from lorasrv.text.structured_output.matcher import CompiledGrammar
from lorasrv.text.tokenizer import Tokenizer


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return a loop that runs beside those of the tests: their grammars share a sandbox process, which takes longer to
    start than a grammar to compile."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grammars of tests", daemon=True).start()
    return loop


@cache
def with_tokens(tokenizer: Tokenizer, *texts: str, special: bool) -> Tokenizer:
    """Return a tokenizer with more tokens: the same each time, so that its grammars share a process, too."""
    first = tokenizer.vocab_size
    return tokenizer.extended([AddedToken(first + n, text, special) for n, text in enumerate(texts)])


@cache
def _compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


async def compiled_grammar(tokenizer: Tokenizer, grammar: Grammar) -> CompiledGrammar:
    """Try and compile a grammar as the server does.

    Raises:
        InvalidRequest: it is refused.
    """
    compiling = _compiler(tokenizer).compile(grammar)
    constraint = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(compiling, _loop()))
    assert isinstance(constraint, CompiledGrammar)
    return constraint


def allows(compiled: CompiledGrammar, tokenizer: Tokenizer, text: str) -> bool:
    """Return whether the grammar allows a text in the tokenizer's own tokens, and its end."""
    state = compiled.begin()
    for token in tokenizer.encode(text, add_special_tokens=False):
        mask = state.allowed()
        if not mask[token // 32] >> token % 32 & 1:
            return False
        state.advance(token)
    return state.is_over or any(state.allowed()[end // 32] >> end % 32 & 1 for end in tokenizer.eos_token_ids)
