"""Texts of a wanted length in a server's own tokens, which nobody has sent before; or which begin alike, if asked."""

import random
from dataclasses import dataclass, field

_TEXT = "the robot city river stone quiet bright engine letter garden winter signal copper forest market lantern"
WORDS = _TEXT.split()
SHORT_WORDS, LONG_WORDS = len(WORDS), 3 * len(WORDS)
"""Lengths of the two texts that a server is asked to count: every word once, and three times."""


@dataclass(frozen=True, slots=True)
class Ruler:
    """Tokens of a text, by its words: `fixed` for the nonce and what a template adds, and so many for each word."""

    fixed: float
    per_word: float

    @classmethod
    def of(cls, short: int, long: int) -> "Ruler":
        """From the counts of two texts, of `SHORT_WORDS` and `LONG_WORDS`."""
        per_word = max(0.1, (long - short) / (LONG_WORDS - SHORT_WORDS))
        return cls(short - per_word * SHORT_WORDS, per_word)

    def words(self, tokens: float) -> int:
        """How many words make a text of so many tokens; none, where the nonce alone is longer."""
        return max(0, round((tokens - self.fixed) / self.per_word))

    def words_alone(self, tokens: int) -> int:
        """Of a text without a nonce."""
        return round(tokens / self.per_word)


@dataclass
class Prompts:
    """Texts in a seeded order of words. A prompt begins with a number of its own, so that no prefix cache helps.

    `shared_tokens` of each come before that number and are the same for all with one `owner`; they begin with a number
    of this object, so that the first of them finds nothing that an earlier load has left.
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
    """Nine digits that are not seeded: the same load, repeated, is not found in a cache."""
    return f"{random.SystemRandom().randrange(10**9):09d}"


def counted_texts() -> tuple[str, str]:
    """What a server is asked to count for its ruler."""
    return " ".join([nonce(), *WORDS]), " ".join([nonce(), *WORDS * 3])
