"""Define a request's speculation options and their ranges. Torch-free; docs/speculation.md explains them."""

from dataclasses import dataclass, replace

from lorasrv.errors import InvalidRequest

DRAFTERS = ("grammar", "prediction", "lookup", "corpus", "lookahead", "medusa", "model", "layers")
SAME_DRAW, REJECTION = ACCEPT = ("same-draw", "rejection")
"""How draft tokens are accepted: the token that plain decoding would draw, or any of its distribution."""
MODEL_DRAFTERS = ("medusa", "model", "layers")
"""Those that are models on the worker."""
LONG_SIGHTED_DRAFTERS = frozenset({"lookahead", "model"})
"""Those that cannot draft for rows that see different pages: by trees, or with keys of all tokens."""
MAX_DRAFT_TOKENS = 16
"""Most draft tokens of a request in one step."""
MAX_PROBES = 48
"""Most tokens of a request in one step that are computed only to see what the model says behind them."""


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Say how an answer may be drafted. No option changes the answer.

    Raises:
        InvalidRequest: a value is out of range; names the field.
    """

    # Most draft tokens in a step; 0: none.
    max_draft: int = MAX_DRAFT_TOKENS
    # Drafters that may be asked; None: all that the server has.
    drafters: frozenset[str] | None = None
    # Whether later answers of the same persona and key may be drafted from this one.
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
        """Return whether a drafter may be asked."""
        return self.max_draft > 0 and (self.drafters is None or drafter in self.drafters)

    def without(self, drafters: frozenset[str]) -> "SpeculationParams":
        """Return the options without some drafters."""
        return replace(self, drafters=(frozenset(DRAFTERS) if self.drafters is None else self.drafters) - drafters)


ANY_SPECULATION = SpeculationParams()
NO_SPECULATION = SpeculationParams(max_draft=0, remember=False)
