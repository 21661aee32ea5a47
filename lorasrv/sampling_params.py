"""Define a request's options of sampling, beam search, watermark and text, and the ranges of their fields. Torch-free.

docs/sampling.md explains the options. NaN is outside every range, because every comparison with it is false.
"""

from dataclasses import dataclass, field
from numbers import Integral, Real

from lorasrv.errors import ConfigError, InvalidRequest

DEFAULT_KEY = 15485863


@dataclass(frozen=True, slots=True)
class Watermark:
    """Configure a watermark.

    Raises:
        ConfigError: a value is out of range; the message names the option.
    """

    # Share of tokens that are green.
    gamma: float = 0.5
    # Added to the logits of green tokens.
    delta: float = 2.0
    # Secret needed to detect the watermark.
    key: int = field(default=DEFAULT_KEY, repr=False)

    def __post_init__(self) -> None:
        if not 0.01 <= self.gamma <= 0.99:
            raise ConfigError(f"--watermark-gamma must be between 0.01 and 0.99, not {self.gamma}")
        if not 0.0 < self.delta <= 100.0:
            raise ConfigError(f"--watermark-delta must be above 0 and at most 100, not {self.delta}")
        if not 0 <= self.key < 2**64:
            raise ConfigError("--watermark-key must be an integer from 0 to 2^64 - 1")


MAX_COUNT = 2**31 - 1
MAX_CHOICES = 8
"""Most answers to one prompt (`n`, `best_of`)."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGPROBS = 20
"""Largest number of likeliest tokens that a request may ask for at each position."""
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_FSD_NGRAM = 8
MAX_BAD_WORDS, MAX_BAD_WORD_BYTES = 128, 256
MAX_ALLOWED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Define how the next token is chosen; docs/sampling.md has each field's formula and the order in which they
    apply.

    Raises:
        InvalidRequest: a value is out of range; `param` names the field.
    """

    max_tokens: int | None = None
    # 0: greedy.
    temperature: float = 1.0
    # 1.0: off.
    top_p: float = 1.0
    # 0: off.
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    typical_p: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Only these tokens may be chosen; None: all.
    allowed_token_ids: tuple[int, ...] | None = None
    # Texts that the answer must not contain, as far as they are spelled with the usual tokens.
    bad_words: tuple[str, ...] = ()
    # No n-gram of so many tokens occurs twice, including those of the prompt; 0: off.
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    # True: the server's own watermark.
    watermark: bool | Watermark = False
    fsd_alpha: float = 0.0
    fsd_ngram: int = 3
    # Tokens that end an answer, which `min_tokens` bans; filled in at admission.
    end_token_ids: tuple[int, ...] = ()
    # Tokens of `bad_words`: the last one is banned after the others; filled in at admission.
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Compute the prompt and generate nothing: the answer is empty, and no token is counted.
    prompt_only: bool = False
    # Whether a field that acts on logits in every step is set.
    changes_logits: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_types(self)
        _check(
            self.max_tokens is None or 1 <= self.max_tokens <= MAX_COUNT,
            "max_tokens",
            f"must be between 1 and {MAX_COUNT}",
        )
        _check(0.0 <= self.temperature <= 100.0, "temperature", "must be between 0 and 100")
        _check(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
        _check(0 <= self.top_k <= MAX_COUNT, "top_k", f"must be between 0 (off) and {MAX_COUNT}")
        _check(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        _check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "must fit in 64 bits")
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"must have at most {MAX_STOP_STRINGS} strings")
        for stop in self.stop:
            _check(stop != "", "stop", "must not contain an empty string")
            _check(
                len(stop.encode("utf-8", "replace")) <= MAX_STOP_BYTES,
                "stop",
                f"must have texts of at most {MAX_STOP_BYTES} bytes",
            )
        _check_logit_fields(self)
        bans = self.allowed_token_ids is not None or bool(self.bad_words) or self.no_repeat_ngram_size > 0
        biased = bool(self.logit_bias) or self.watermark is not False or self.fsd_alpha > 0.0
        changes = self.has_penalties or biased or bans
        object.__setattr__(self, "changes_logits", changes)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _check(count is None or 0 <= count <= MAX_LOGPROBS, name, f"must be between 0 and {MAX_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        """Return whether the choice is the argmax: temperatures below 1e-5 count as 0."""
        return self.temperature < 1e-5

    @property
    def takes_logits_alone(self) -> bool:
        """Return whether the choice needs only the logits of its row, not the text, and returns only the token."""
        return not self.changes_logits and self.logprobs is None and self.prompt_logprobs is None

    @property
    def has_penalties(self) -> bool:
        """Return whether earlier tokens change the logits."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


_INTEGERS = (
    *("max_tokens", "top_k", "seed", "min_tokens", "no_repeat_ngram_size", "fsd_ngram"),
    *("logprobs", "prompt_logprobs"),
)
_NUMBERS = (
    *("temperature", "top_p", "min_p", "typical_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "fsd_alpha"),
)
_OPTIONAL = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs"})


def _check_types(p: SamplingParams) -> None:
    """Check the types of values from Python code; bodies of requests are typed already."""
    for names, kind, what in ((_INTEGERS, Integral, "an integer"), (_NUMBERS, Real, "a number")):
        for name in names:
            value = getattr(p, name)
            is_given = value is not None or name not in _OPTIONAL
            is_right = isinstance(value, kind) and not isinstance(value, bool)
            _check(is_right or not is_given, name, f"must be {what}, not {value!r}")
    is_stop = isinstance(p.stop, tuple | list) and all(isinstance(stop, str) for stop in p.stop)
    _check(is_stop, "stop", f"must be a tuple of texts, not {p.stop!r}")
    is_words = isinstance(p.bad_words, tuple | list) and all(isinstance(word, str) for word in p.bad_words)
    _check(is_words, "bad_words", f"must be a tuple of texts, not {p.bad_words!r}")
    ids = p.allowed_token_ids
    is_ids = ids is None or (isinstance(ids, tuple | list) and all(isinstance(token, Integral) for token in ids))
    _check(is_ids, "allowed_token_ids", f"must be a tuple of token ids, not {ids!r}")
    pairs = p.logit_bias if isinstance(p.logit_bias, tuple | list) else (p.logit_bias,)
    is_bias = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs)
    _check(is_bias, "logit_bias", "must be a tuple of pairs, of a token's id and its bias")


def _check_logit_fields(p: SamplingParams) -> None:
    """Check the fields that change logits.

    Raises:
        InvalidRequest: a value is out of range, or fields contradict each other; `param` names the field.
    """
    for name in ("presence_penalty", "frequency_penalty"):
        _check(abs(getattr(p, name)) <= MAX_PENALTY, name, f"must be between -{MAX_PENALTY:g} and {MAX_PENALTY:g}")
    least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    _check(least <= p.repetition_penalty <= most, "repetition_penalty", f"must be between {least:g} and {most:g}")
    _check(0.0 < p.typical_p <= 1.0, "typical_p", "must be above 0 and at most 1")
    _check(0 <= p.min_tokens <= MAX_COUNT, "min_tokens", f"must be between 0 and {MAX_COUNT}")
    if p.max_tokens is not None:
        _check(p.min_tokens <= p.max_tokens, "min_tokens", f"must be at most the {p.max_tokens} tokens of the answer")
    _check(0.0 <= p.fsd_alpha <= 1.0, "fsd_alpha", "must be between 0 (off) and 1")
    _check(1 <= p.fsd_ngram <= MAX_FSD_NGRAM, "fsd_ngram", f"must be between 1 and {MAX_FSD_NGRAM}")
    _check(p.fsd_alpha == 0.0 or p.is_greedy, "fsd_alpha", "needs temperature 0: it is deterministic")
    _check_bias(p)
    _check_bans(p)


def _check_bans(p: SamplingParams) -> None:
    is_size = 0 <= p.no_repeat_ngram_size <= MAX_COUNT
    _check(is_size, "no_repeat_ngram_size", f"must be between 0 (off) and {MAX_COUNT}")
    _check(len(p.bad_words) <= MAX_BAD_WORDS, "bad_words", f"must have at most {MAX_BAD_WORDS} texts")
    for word in p.bad_words:
        _check(word.strip() != "", "bad_words", "must not contain an empty text")
        is_short = len(word.encode("utf-8", "replace")) <= MAX_BAD_WORD_BYTES
        _check(is_short, "bad_words", f"must have texts of at most {MAX_BAD_WORD_BYTES} bytes")
    if p.allowed_token_ids is not None:
        is_some = 0 < len(p.allowed_token_ids) <= MAX_ALLOWED_TOKENS
        _check(is_some, "allowed_token_ids", f"must have 1 to {MAX_ALLOWED_TOKENS} tokens")
        are_ids = all(0 <= token < 2**31 for token in p.allowed_token_ids)
        _check(are_ids, "allowed_token_ids", "must contain token ids, which are not negative")


def _check_bias(p: SamplingParams) -> None:
    _check(len(p.logit_bias) <= MAX_BIASED_TOKENS, "logit_bias", f"must have at most {MAX_BIASED_TOKENS} tokens")
    ids = {token for token, _ in p.logit_bias}
    _check(len(ids) == len(p.logit_bias), "logit_bias", "must name each token once")
    _check(all(0 <= token < 2**31 for token in ids), "logit_bias", "must contain token ids, which are not negative")
    _check(all(abs(bias) <= MAX_BIAS for _, bias in p.logit_bias), "logit_bias", "must be between -100 and 100")


def check_token_ids(p: SamplingParams, vocab_size: int) -> None:
    """Check the fields that depend on the vocabulary.

    Raises:
        InvalidRequest: a token does not exist, or no token may be chosen; `param` names the field.
    """
    in_range = f"must contain token ids in [0, {vocab_size})"
    _check(all(0 <= token < vocab_size for token in p.stop_token_ids), "stop_token_ids", in_range)
    _check(all(token < vocab_size for token, _ in p.logit_bias), "logit_bias", in_range)
    allowed = p.allowed_token_ids or ()
    _check(all(0 <= token < vocab_size for token in allowed), "allowed_token_ids", in_range)
    banned = sum(bias == -MAX_BIAS for _, bias in p.logit_bias)
    _check(banned < vocab_size, "logit_bias", "bans every token; leave at least one above -100")


def check_constrained(p: SamplingParams) -> None:
    """Check that only a grammar decides what is written and where the answer ends.

    Raises:
        InvalidRequest: a field also decides this; `param` names the field.
    """
    for name in ("ignore_eos", "min_tokens"):
        _check(not getattr(p, name), name, "contradicts a grammar, which says where the answer ends")
    _check(p.allowed_token_ids is None, "allowed_token_ids", "does not go with a grammar, which says what is allowed")


def _check(holds: bool, param: str, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{{param}} {rule}", param=param)


MAX_BEAMS = 8
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Configure beam search.

    Raises:
        InvalidRequest: a value is out of range; `param` names the field.
    """

    # Number of beams.
    width: int
    # Scores are divided by length to this power.
    length_penalty: float = 1.0
    # When to stop: True: with `width` whole answers; False: when no beam is likely to beat them; "never": when none
    # can.
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_BEAMS:
            raise InvalidRequest(f"best_of must be between 1 and {MAX_BEAMS} beams", param="best_of")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise InvalidRequest(
                f"length_penalty must be between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}",
                param="length_penalty",
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequest('early_stopping must be true, false or "never"', param="early_stopping")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Choose how the tokens of an answer become text."""

    # Special tokens have no text, except those that are to be shown.
    skip_special_tokens: bool = True
    shown_token_ids: frozenset[int] = frozenset()
    # Whether a leading space that the tokenizer would strip is removed. False if the text continues the prompt's, or if
    # a grammar determines how it begins.
    strip_start: bool = True
    # Whether the text includes the stop string or stop token that ends the answer.
    keep_stop: bool = False

    def hidden(self, special_ids: frozenset[int]) -> frozenset[int]:
        """Return the special tokens that have no text."""
        return special_ids - self.shown_token_ids if self.skip_special_tokens else frozenset()


PLAIN_TEXT = TextOptions()
EVERY_TOKEN = TextOptions(skip_special_tokens=False)
