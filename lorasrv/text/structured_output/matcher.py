"""The served tokenizer's vocabulary as llguidance needs it: every token's bytes, and which tokens end an answer.

Made once from the tokenizer, byte for byte as `Detokenizer` writes tokens; sent as bytes to the process that tries
grammars out, which has no tokenizer.

Compiled grammars as the engine sees them: `TokenConstraint` and `ConstraintState` over llguidance's matcher.

Nothing here raises in the engine's thread: what goes wrong in a matcher is kept as `error`, and ends its own request.
"""

import json
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
    """`tokens` has the model's V entries: b"" where there is no token. `special` ones are no text and never allowed,
    but for those of `ends`, which are allowed where the answer may end."""

    tokens: tuple[bytes, ...]
    special: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> "Vocabulary":
        """`vocab_size`: how many logits the model has, which may be more than there are tokens."""
        texts = [tokenizer.token(i) for i in range(vocab_size)]
        tokens = tuple(b"" if text is None else token_bytes(text, tokenizer.decoding) for text in texts)
        special = sorted({*tokenizer.special_ids, *ends})
        in_range = range(vocab_size)
        return cls(tokens, tuple(i for i in special if i in in_range), tuple(i for i in sorted(ends) if i in in_range))

    def packed(self) -> bytes:
        """For `unpacked`: a header, the tokens' lengths, their bytes."""
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
        """llguidance's own form: a trie. Takes 0.2 s for 50,000 tokens, and nothing else in Python runs meanwhile.

        `encode` gives a text's usual tokens, so that forced text is spelled as the model knows it.
        """
        wrapper = _Wrapper(self, encode)
        return llguidance.LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=list(self.ends))  # type: ignore[arg-type]


class _Wrapper:
    """What llguidance wants of a tokenizer. It asks for the tokens of text that a grammar forces."""

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
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        wanted = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)
        return self._usual(wanted) or self._longest_first(wanted)

    def _usual(self, wanted: bytes) -> list[int]:
        """[] if the tokenizer would write something else: a blank in front, or a special token."""
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
                return ids  # a byte that no token has
            at = end
        return ids


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
        self._vocab_size = vocab_size
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

    def copy(self) -> "GrammarState":
        copied = GrammarState(self._matcher.deep_copy(), self._vocab_size, self._ends)
        copied.error = self.error
        return copied

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
