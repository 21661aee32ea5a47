"""Drafter interface: propose tokens that may continue an answer.

A wrong draft costs time and never a wrong token: each draft token is compared with the one that the model samples there
(`lorasrv.sampling.draft_verification`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.request import Request
from lorasrv.scheduler_output import NO_PROBES, ProbeTree


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """Ask for a draft of one request."""

    # The scheduler's own: for reading, within the call only.
    request: Request
    # Longer drafts are cut to this.
    max_tokens: int
    # Tokens that are less likely than this do not pay.
    min_survival: float = 0.0


@dataclass(frozen=True, slots=True)
class Draft:
    """Propose the tokens that follow a request's known ones."""

    # A chain: each token follows the one before it. Empty where there is nothing to guess from.
    token_ids: tuple[int, ...] = ()
    # What each token is guessed from. How often tokens of the same evidence were right, if those before them were, is
    # learned from what answers say.
    evidence: tuple[Hashable, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.evidence), "each draft token needs its evidence"


NO_DRAFT = Draft()


class Drafter:
    """Propose draft tokens. Called by the engine thread only, between two steps."""

    name: str
    # Whether `probes` may return some.
    has_probes = False

    def draft(self, ask: DraftAsk) -> Draft:
        """Return a draft of one request."""
        raise NotImplementedError

    def probes(self, ask: DraftAsk) -> ProbeTree:
        """Return guessed tokens whose continuations the drafter wants to see, at most `MAX_PROBES`."""
        return NO_PROBES

    def observe_probes(self, request: Request, token_ids: Sequence[int]) -> None:
        """Learn the likeliest token behind each probe of the step before."""

    def observe(self, request: Request, new_token_ids: Sequence[int]) -> None:
        """Learn a request's new tokens, drafted or not; its `token_ids` end with them."""

    def forget(self, request: Request) -> None:
        """Drop the state of a finished request."""

    def drop(self, adapter: AdapterKey | None, salt: str | None) -> None:
        """Drop what is kept of an adapter's answers, or of those under a salt; None names none."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of past answers that are kept."""
        return 0
