"""Define a request's speculation options and their ranges. Torch-free; docs/speculation.md explains them."""

from dataclasses import dataclass, replace

from lorasrv.errors import InvalidRequest

DRAFTERS = ("grammar", "prediction", "lookup", "corpus", "lookahead", "medusa", "model", "layers")
SAME_DRAW, REJECTION = ACCEPT = ("same-draw", "rejection")
"""How draft tokens are accepted: only the token that plain decoding would draw, or by rejection sampling."""
MODEL_DRAFTERS = ("medusa", "model", "layers")
"""Drafters that are models on the worker."""
LONG_SIGHTED_DRAFTERS = frozenset({"lookahead", "model"})
"""Drafters that cannot draft for rows that see different pages: they need trees, or the keys of all tokens."""
MAX_DRAFT_TOKENS = 16
"""Most draft tokens of a request in one step."""
MAX_PROBES = 48
"""Most tokens of a request in one step that are computed only to learn their likeliest continuations."""


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Define how an answer may be drafted. No option changes the answer, unless drafts are accepted by rejection.

    Raises:
        InvalidRequest: a value is out of range; the message names the field.
    """

    # Most draft tokens in a step; 0: none.
    max_draft: int = MAX_DRAFT_TOKENS
    # Drafters that may be used; None: all of the server's.
    drafters: frozenset[str] | None = None
    # Whether this answer may serve as a draft for later answers of the same persona and key.
    remember: bool = True
    # Text that the client expects as the answer; "": none.
    prediction: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.max_draft <= MAX_DRAFT_TOKENS:
            raise InvalidRequest(
                f"speculation.max_draft must be from 0 to {MAX_DRAFT_TOKENS}, not {self.max_draft}",
                param="speculation.max_draft",
            )
        for name in sorted((self.drafters or frozenset()) - set(DRAFTERS)):
            raise InvalidRequest(
                f"speculation.drafters: unknown drafter {name!r}; choose from {', '.join(DRAFTERS)}",
                param="speculation.drafters",
            )

    def allows(self, drafter: str) -> bool:
        """Return whether a drafter may be used."""
        return self.max_draft > 0 and (self.drafters is None or drafter in self.drafters)

    def without(self, drafters: frozenset[str]) -> "SpeculationParams":
        """Return the options without some drafters."""
        return replace(self, drafters=(frozenset(DRAFTERS) if self.drafters is None else self.drafters) - drafters)


ANY_SPECULATION = SpeculationParams()
NO_SPECULATION = SpeculationParams(max_draft=0, remember=False)
