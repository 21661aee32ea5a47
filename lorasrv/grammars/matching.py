"""Compiled grammars as the engine sees them: `TokenConstraint` and `ConstraintState` over llguidance's matcher.

Nothing here raises in the engine's thread: what goes wrong in a matcher is kept as `error`, and ends its own request.
"""

import llguidance
import numpy as np
import numpy.typing as npt

BITS = 32
NO_SENTENCE = "no text satisfies it"
# A grammar that needs more than this has become too large for its step: its request fails, the others go on. llguidance
# computes some 14,000 units of lexer fuel a millisecond, 20,000 items, and takes 1 to 2 kB for a lexer's state.
STEP_LEXER_FUEL = 100_000
STEP_ITEMS = 10_000
LEXER_STATES = 50_000
GRAMMAR_SIZE = 200_000
INITIAL_LEXER_FUEL = 1_000_000


def compile_matcher(tokenizer: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    """A matcher before its first token; `get_error()` says what is wrong with the grammar. Releases the GIL."""
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=LEXER_STATES,
        max_grammar_size=GRAMMAR_SIZE,
        # Off: it walks the vocabulary for every large expression of a grammar before it is known whether it is used.
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)


class CompiledGrammar:
    """A `TokenConstraint`. `nbytes` is what it was seen to take."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, ends: tuple[int, ...], nbytes: int) -> None:
        self.nbytes = nbytes
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        # What the first mask computes is kept by the matcher, for all copies.
        self.begin().allowed()

    def begin(self) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self._ends)


class GrammarState:
    """A `ConstraintState`: one answer's matcher, and the buffer that its masks are written to.

    `error`: what the matcher failed with; from then on only the end is allowed, and the engine ends the request.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, ends: tuple[int, ...]) -> None:
        self.error: str | None = None
        self._matcher = matcher
        self._ends = ends
        self._mask = np.zeros(-(-vocab_size // BITS), np.int32)
        self._address, self._nbytes = self._mask.ctypes.data, self._mask.nbytes

    @property
    def is_over(self) -> bool:
        """Nothing but the end may follow."""
        return self.error is None and self._matcher.is_stopped()

    def advance(self, token_id: int) -> None:
        if self.error is None and not self._matcher.consume_token(token_id):
            self._fail()

    def allowed(self) -> npt.NDArray[np.int32]:
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(self._address, self._nbytes)
            if self._matcher.is_error():
                self._fail()
        if self.error is not None:
            self._allow_only_ends()
        return self._mask

    def _fail(self) -> None:
        self.error = f"the grammar cannot be followed any further: {one_line(self._matcher.get_error())}"

    def _allow_only_ends(self) -> None:
        self._mask.fill(0)
        words = self._mask.view(np.uint32)
        for token in self._ends:
            words[token // BITS] |= np.uint32(1 << token % BITS)


def one_line(error: str, most: int = 240) -> str:
    """llguidance's message without its line breaks and state dumps."""
    message = " ".join(error.replace("<non-verbose/>", "").split())[:most]
    return NO_SENTENCE if message == "NoExtensionBias" else message
