"""Compile grammars with llguidance and provide them to the engine as `TokenConstraint` and `ConstraintState`.

The vocabulary is built once from the tokenizer, byte for byte as `Detokenizer` writes tokens, and sent as bytes to the
sandbox process, which has no tokenizer. Nothing here raises in the engine's thread: a matcher's failure is kept as
`error` and ends its own request only.
"""

import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
import numpy.typing as npt

from lorasrv.errors import InvalidRequest
from lorasrv.text.detokenizer import token_bytes
from lorasrv.text.tokenizer import Tokenizer

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Hold the bytes of each token, and the tokens that end an answer."""

    # V entries, as many as the model has logits; b"" for missing tokens.
    tokens: tuple[bytes, ...]
    # Ids that are not text and never allowed, except for those in `ends`.
    special: tuple[int, ...]
    # Ids allowed where the answer may end.
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> "Vocabulary":
        """Read the vocabulary from a tokenizer. `vocab_size` is the number of the model's logits, which may exceed
        the tokens.
        """
        texts = [tokenizer.token(i) for i in range(vocab_size)]
        tokens = tuple(b"" if text is None else token_bytes(text, tokenizer.decoding) for text in texts)
        special = sorted({*tokenizer.special_ids, *ends})
        in_range = range(vocab_size)
        return cls(tokens, tuple(i for i in special if i in in_range), tuple(i for i in sorted(ends) if i in in_range))

    def packed(self) -> bytes:
        """Serialise as a header, the lengths of the tokens and their bytes, for `unpacked`."""
        header = json.dumps([self.special, self.ends]).encode()
        lengths = [len(token) for token in self.tokens]
        numbers = struct.pack(f"<II{len(lengths)}I", len(header), len(lengths), *lengths)
        return numbers + header + b"".join(self.tokens)

    @classmethod
    def unpacked(cls, packed: bytes) -> "Vocabulary":
        header_size, count = struct.unpack_from("<II", packed)
        lengths = struct.unpack_from(f"<{count}I", packed, 8)
        at = 8 + 4 * count
        special, ends = json.loads(packed[at : at + header_size])
        at += header_size
        tokens = []
        for length in lengths:
            tokens.append(packed[at : at + length])
            at += length
        return cls(tuple(tokens), tuple(special), tuple(ends))

    def build(self, encode: Encode | None = None) -> llguidance.LLTokenizer:
        """Build llguidance's trie; takes 0.2 s for 50,000 tokens while holding the GIL.

        `encode` returns the usual tokens of a text, so that forced text is tokenized as the model expects.
        """
        wrapper = _Wrapper(self, encode)
        return llguidance.LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=list(self.ends))  # type: ignore[arg-type]


FORCED_BYTES = 256
"""Most bytes of a forced text that are tokenized: drafts need less, and each mask tokenizes it again."""


class _Wrapper:
    """Implement llguidance's tokenizer interface, which tokenizes text that a grammar forces. Of a long text only the
    beginning is tokenized; the next steps continue from there.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special)
        self.eos_token_id = vocabulary.ends[0]
        self._encode = encode
        special = set(vocabulary.special)
        self._text_tokens = {i: t for i, t in enumerate(vocabulary.tokens) if t and i not in special}
        self._ids = {token: i for i, token in reversed(self._text_tokens.items())}
        # Some vocabularies have a character twice: as itself, and as the token of its byte, which no text is
        # tokenized to.
        self._ids |= {token: ids[0] for token in self._ids if len(token) == 1 and (ids := self._usual(token))}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        wanted = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)
        if len(wanted) <= FORCED_BYTES:
            return self._tokens_of(wanted)
        # Cut between two characters. The last token is dropped, as it may be the beginning of a longer one.
        end = next((at for at in range(FORCED_BYTES, FORCED_BYTES - 4, -1) if wanted[at] & 0xC0 != 0x80), FORCED_BYTES)
        return self._tokens_of(wanted[:end])[:-1]

    def _tokens_of(self, wanted: bytes) -> list[int]:
        return self._usual(wanted) or self._longest_first(wanted)

    def _usual(self, wanted: bytes) -> list[int]:
        """Tokenize as the tokenizer does; return [] if its tokens decode to something else (a special token)."""
        if self._encode is None:
            return []
        try:
            ids = list(self._encode(wanted.decode()))
        except (UnicodeDecodeError, InvalidRequest):
            return []
        return ids if b"".join(self._text_tokens.get(i, b"\xff") for i in ids) == wanted else []

    def _longest_first(self, wanted: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(wanted):
            for end in range(min(len(wanted), at + self._longest), at, -1):
                found = self._ids.get(wanted[at:end])
                if found is not None:
                    ids.append(found)
                    break
            else:
                return ids  # no token has this byte
            at = end
        return ids


BITS = 32
_SAID = {
    "NoExtensionBias": "no text satisfies it",
    "oneOf constraints are not supported": "the parts of oneOf may overlap; use anyOf",
}
"""Beginnings of llguidance's messages, and the messages in their place."""
_CAUSE = re.compile(r"regex parse error:.*^error: ([^\n]*)", re.DOTALL | re.MULTILINE)
"""The cause; in the message it follows the whole expression, which may be long."""
# Limits per step and 50,000 tokens of the vocabulary, all of which a mask may try: a grammar that exceeds them fails
# its own request only. llguidance computes some 14,000 units of lexer fuel or 20,000 items per millisecond, and takes 1
# to 2 kB per lexer state.
STEP_TOKENS = 50_000
STEP_LEXER_FUEL = 100_000
STEP_ITEMS = 10_000
LEXER_STATES = 50_000
GRAMMAR_SIZE = 200_000
INITIAL_LEXER_FUEL = 1_000_000


def compile_matcher(tokenizer: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    """Compile a grammar, with the GIL released; `get_error()` of the result describes an invalid one."""
    share = max(1.0, tokenizer.vocab_size / STEP_TOKENS)
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=int(share * STEP_LEXER_FUEL),
        step_max_items=int(share * STEP_ITEMS),
        max_lexer_states=LEXER_STATES,
        max_grammar_size=GRAMMAR_SIZE,
        # Off: it walks the vocabulary for each large expression of a grammar, even for unused ones.
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)


class CompiledGrammar:
    """Implement `TokenConstraint`.

    Copies of a matcher share its lexer, which stores the states of all of them. Once these are too many, no copy can
    use it any more: each continues in another lexer, at the position of its own tokens.

    Args:
        compile_: compiles the grammar, always with the same result.
    """

    def __init__(self, compile_: Callable[[], llguidance.LLMatcher], vocab_size: int, ends: tuple[int, ...]) -> None:
        self.vocab_size, self.ends, self.ends_answer = vocab_size, ends, True
        self._compile = compile_
        self._matcher = compile_()
        # Computed once here: all copies share the results.
        self._matcher.compute_bitmask()
        # Why the grammar cannot be used, or "".
        self.error: str = self._matcher.get_error()

    def begin(self) -> "GrammarState":
        return GrammarState(self, self._matcher)

    def instead_of(self, failed: llguidance.LLMatcher) -> tuple[llguidance.LLMatcher, bool]:
        """Return a matcher to copy in place of one whose lexer has failed, and whether it is new, not already used by
        others.
        """
        if is_new := failed is self._matcher:
            self._matcher = self._compile()
        return self._matcher, is_new


class GrammarState:
    """Implement `ConstraintState`: the matcher of one answer and the buffer for its masks.

    After a failure that does not depend on other answers, `error` says why. Only the end is allowed then, and the
    engine ends the request.

    Args:
        source: the matcher to copy.
    """

    def __init__(self, grammar: CompiledGrammar, source: llguidance.LLMatcher) -> None:
        self.error: str | None = None
        self._grammar = grammar
        self._source, self._matcher = source, source.deep_copy()
        self._token_ids: list[int] = []
        self._mask = np.zeros(-(-grammar.vocab_size // BITS), np.int32)
        self._address, self._nbytes = self._mask.ctypes.data, self._mask.nbytes

    @property
    def is_over(self) -> bool:
        """Return whether only the end may follow."""
        return self.error is None and self._matcher.is_stopped()

    @property
    def num_free(self) -> int:
        return 0

    @property
    def rest(self) -> "GrammarState":
        return self

    def advance(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        if self.error is None and not self._matcher.consume_token(token_id):
            self._go_on(lambda: True)

    def forced(self) -> list[int]:
        return [] if self.error is not None else self._matcher.compute_ff_tokens()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return 0 if self.error is not None else self._matcher.validate_tokens(list(token_ids))

    def copy(self) -> "GrammarState":
        copied = GrammarState(self._grammar, self._matcher)
        copied.error, copied._token_ids = self.error, [*self._token_ids]
        return copied

    def allowed(self) -> npt.NDArray[np.int32]:
        if self.error is None and not self._compute_mask():
            self._go_on(self._compute_mask)
        if self.error is not None:
            self._allow_only_ends()
        return self._mask

    def _compute_mask(self) -> bool:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._nbytes)
        return not self._matcher.is_error()

    def _go_on(self, attempt: Callable[[], bool]) -> None:
        """Repeat a failed attempt in another lexer; if it also fails in a new one, keep the reason."""
        is_new = False
        while not is_new:
            self._source, is_new = self._grammar.instead_of(self._source)
            self._matcher = self._source.deep_copy()
            if self._matcher.consume_tokens(self._token_ids) and attempt():
                return
        self.error = f"the grammar cannot be followed any further: {one_line(self._matcher.get_error())}"

    def _allow_only_ends(self) -> None:
        self._mask.fill(0)
        words = self._mask.view(np.uint32)
        for token in self._grammar.ends:
            words[token // BITS] |= np.uint32(1 << token % BITS)


def one_line(error: str, most: int = 240) -> str:
    """Return llguidance's message without line breaks, state dumps and the trace of a panic."""
    if cause := _CAUSE.search(error):
        return f"a regular expression is invalid: {cause[1][:most]}"
    message = " ".join(error.partition("<backtrace>")[0].replace("<non-verbose/>", "").split())[:most]
    return next((ours for theirs, ours in _SAID.items() if message.startswith(theirs)), message)
