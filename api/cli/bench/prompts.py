"""Generate prompts with a given number of the server's tokens: unique, or with shared beginnings if requested."""

import random
from dataclasses import dataclass, field

_TEXT = "the robot city river stone quiet bright engine letter garden winter signal copper forest market lantern"
WORDS = _TEXT.split()
SHORT_WORDS, LONG_WORDS = len(WORDS), 3 * len(WORDS)
"""Lengths of the two texts that measure a server's tokenizer: each word once, and three times."""


@dataclass(frozen=True, slots=True)
class Ruler:
    """Convert words to tokens."""

    # Tokens of the nonce and of the chat template.
    fixed: float
    # Tokens per word.
    per_word: float

    @classmethod
    def of(cls, short: int, long: int) -> "Ruler":
        """Fit to the token counts of two texts of `SHORT_WORDS` and `LONG_WORDS`."""
        per_word = max(0.1, (long - short) / (LONG_WORDS - SHORT_WORDS))
        return cls(short - per_word * SHORT_WORDS, per_word)

    def words(self, tokens: float) -> int:
        """Return the number of words for a text of `tokens` tokens; 0 if the nonce alone is longer."""
        return max(0, round((tokens - self.fixed) / self.per_word))

    def words_alone(self, tokens: int) -> int:
        """Return the number of words for a text without a nonce."""
        return round(tokens / self.per_word)


@dataclass
class Prompts:
    """Generate texts with a seeded order of words. Each prompt begins with a nonce, so that no prefix cache helps.

    The first `shared_tokens` of a prompt precede the nonce and are the same for all prompts of one `owner`. They begin
    with another nonce, drawn once per owner, so that nothing is cached from an earlier load.
    """

    ruler: Ruler
    rng: random.Random
    _shared: dict[str, list[str]] = field(default_factory=dict)

    def make(self, tokens: int, shared_tokens: int = 0, owner: str = "") -> str:
        words = self.ruler.words(tokens)
        shared = self._beginning(owner, self.ruler.words_alone(shared_tokens)) if shared_tokens else []
        return " ".join([*shared, nonce(), *self._words(words - len(shared))])

    def _beginning(self, owner: str, length: int) -> list[str]:
        known = self._shared.setdefault(owner, [nonce()])
        if len(known) < length:
            known += self._words(length - len(known))
        return known[:length]

    def _words(self, count: int) -> list[str]:
        words: list[str] = []
        while len(words) < count:
            words += self.rng.sample(WORDS, len(WORDS))
        return words[: max(0, count)]


def nonce() -> str:
    """Return nine unseeded digits, so that a repeated load is not found in a cache."""
    return f"{random.SystemRandom().randrange(10**9):09d}"


def counted_texts() -> tuple[str, str]:
    """Return the texts that measure a server's tokenizer."""
    return " ".join([nonce(), *WORDS]), " ".join([nonce(), *WORDS * 3])
