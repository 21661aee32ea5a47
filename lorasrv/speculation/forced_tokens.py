"""Forced tokens: where a grammar leaves one way to go on, it needs no model (keys and punctuation of JSON)."""

from lorasrv.speculation.drafter import NO_DRAFT, Draft, DraftAsk, Drafter


class ForcedTokens(Drafter):
    """Ask the grammars of constrained answers for the text that must come next, in its usual tokens.

    The model may write the same text in other tokens; how often it does is learned.
    """

    name = "grammar"

    def draft(self, ask: DraftAsk) -> Draft:
        state = ask.request.constraint_state
        if state is None:
            return NO_DRAFT
        tokens = tuple(state.forced()[: ask.max_tokens])
        return Draft(tokens, ("forced",) * len(tokens))
