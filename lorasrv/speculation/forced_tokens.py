"""Forced tokens: if a grammar allows only one continuation, no model is needed (keys and punctuation of JSON)."""

from lorasrv.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftQuery


class ForcedTokens(Drafter):
    """Draft the text that the grammar of a constrained answer requires next, in its usual tokens.

    The model may write the same text with other tokens; the drafts' success rate is learned.
    """

    name = "grammar"

    def draft(self, query: DraftQuery) -> Draft:
        state = query.request.constraint_state
        if state is None:
            return NO_DRAFT
        tokens = tuple(state.forced()[: query.max_tokens])
        return Draft(tokens, ("forced",) * len(tokens))
