"""Drafter interface: propose tokens that may continue an answer.

A wrong draft costs time but never changes the answer: each draft token is compared with the token that the model
samples there (`lorasrv.sampling.draft_verification`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.request import Request
from lorasrv.scheduler_output import NO_PROBES, ProbeTree


@dataclass(frozen=True, slots=True)
class DraftQuery:
    """Ask for a draft of one request."""

    # The scheduler's object: only read it, and only within the call.
    request: Request
    # Longer drafts are cut to this.
    max_tokens: int
    # Tokens that are less likely than this do not pay off.
    min_survival: float = 0.0


@dataclass(frozen=True, slots=True)
class Draft:
    """Propose the tokens that follow a request's known ones."""

    # A chain: each token follows the one before it. Empty if there is nothing to guess from.
    token_ids: tuple[int, ...] = ()
    # What each token is guessed from. For each evidence, answers show how often its tokens were right, given that those
    # before them were.
    evidence: tuple[Hashable, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.evidence), "each draft token needs its evidence"


NO_DRAFT = Draft()


class Drafter:
    """Propose draft tokens. Called by the engine thread only, between two steps."""

    name: str
    # Whether `probes` may return any.
    has_probes = False

    def draft(self, query: DraftQuery) -> Draft:
        """Return a draft of one request."""
        raise NotImplementedError

    def probes(self, query: DraftQuery) -> ProbeTree:
        """Return guessed tokens for which the drafter wants to know the continuations, at most `MAX_PROBES`."""
        return NO_PROBES

    def observe_probes(self, request: Request, token_ids: Sequence[int]) -> None:
        """Learn the likeliest token after each probe of the previous step."""

    def observe(self, request: Request, new_token_ids: Sequence[int]) -> None:
        """Learn a request's new tokens, drafted or not; its `token_ids` end with them."""

    def forget(self, request: Request) -> None:
        """Drop the state of a finished request."""

    def drop(self, adapter: AdapterKey | None, salt: str | None) -> None:
        """Drop the kept answers of an adapter, or those under a salt; None matches no answers."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of past answers that are kept."""
        return 0
