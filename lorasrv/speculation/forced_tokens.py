"""Forced tokens: where a grammar leaves one way to go on, it needs no model (keys and punctuation of JSON)."""

from collections.abc import Sequence

from adapter_store.spec import AdapterKey
from lorasrv.request import Request
from lorasrv.speculation.drafter import NO_DRAFT, Draft, DraftAsk


class ForcedTokens:
    """Ask the grammars of constrained answers for the text that must come next, in its usual tokens.

    The model may write the same text in other tokens; how often it does is learned.
    """

    name = "grammar"
    kept_bytes = 0

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [_draft(ask) for ask in asks]

    def observe(self, request: Request, new_token_ids: Sequence[int]) -> None:
        """Do nothing: the grammar follows the answer by itself."""

    def forget(self, request: Request) -> None:
        """Do nothing."""

    def drop(self, adapter: AdapterKey | None, salt: str | None) -> None:
        """Do nothing: no answer is kept."""


def _draft(ask: DraftAsk) -> Draft:
    state = ask.request.constraint_state
    if state is None:
        return NO_DRAFT
    tokens = tuple(state.forced()[: ask.max_tokens])
    return Draft(tokens, ("forced",) * len(tokens))
