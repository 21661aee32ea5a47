"""The interface of a drafter: something that guesses what answers go on with.

A guess costs time when it is wrong and never a wrong token: each draft token is compared with the one that the model
says there (`lorasrv.sampling.draft_verification`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lorasrv.request import Request


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """A request whose answer is to be guessed."""

    # The scheduler's own: for reading, within the call only.
    request: Request
    # Longer drafts are cut to this.
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess of the tokens that follow a request's known ones."""

    # A chain: each token follows the one before it. Empty where there is nothing to guess from.
    token_ids: tuple[int, ...] = ()


class Drafter(Protocol):
    """Guesses tokens. Called by the engine's thread only, between two steps."""

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Draft]:
        """Return a draft for each ask, in their order."""

    def observe(self, request: Request, new_token_ids: Sequence[int]) -> None:
        """Learn what a request was answered, drafted or not; its `token_ids` end with these tokens."""

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request, which has ended."""
