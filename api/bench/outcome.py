"""One request: what is asked, and what came of it."""

import itertools
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Ask:
    """A streamed completion of exactly `max_tokens` tokens. `at_s`: when it is sent after the beginning, if that is
    fixed; `has_adapter` tells an adapter from the base.
    """

    model: str
    prompt: str
    max_tokens: int
    has_adapter: bool = True
    at_s: float | None = None


@dataclass(slots=True)
class Outcome:
    """Times on the performance counter's clock: sent, each event with text, ended. `failure` is a kind, which failures
    are counted by; `detail` is what was seen.
    """

    model: str
    has_adapter: bool
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failure: str | None = None
    detail: str = ""

    def fail(self, kind: str, detail: str) -> None:
        self.failure, self.detail = kind, detail[:300]

    @property
    def first_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def last_s(self) -> float:
        return self.arrivals_s[-1]

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.first_s - self.sent_s)

    @property
    def e2e_ms(self) -> float:
        return 1e3 * (self.last_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        """Of every token but the first; None of a single one."""
        if self.output_tokens < 2:
            return None
        return 1e3 * (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Between events with text: of each token, where the server sends one at a time."""
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.arrivals_s)]
