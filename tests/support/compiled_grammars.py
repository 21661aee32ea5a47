"""Compile a grammar without a server, and ask what texts it allows."""

from contextlib import aclosing

from lorasrv.text.structured_output.compiler import GrammarCompiler
from lorasrv.text.structured_output.grammar import Grammar
from lorasrv.text.structured_output.matcher import CompiledGrammar
from lorasrv.text.tokenizer import Tokenizer


async def compiled_grammar(tokenizer: Tokenizer, grammar: Grammar) -> CompiledGrammar:
    """Try and compile a grammar as the server does.

    Raises:
        InvalidRequest: it is refused.
    """
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    async with aclosing(compiler):
        constraint = await compiler.compile(grammar)
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
