"""A drafter as the scheduler sees it: what it proposes is cut to what a step can take, and it cannot harm a request."""

import logging
from collections.abc import Callable, Sequence

from lorasrv.request import Request
from lorasrv.speculation.drafter import DraftAsk, Drafter

_LOG = logging.getLogger(__name__)
MAX_DRAFT_TOKENS = 16
"""Draft tokens of a request in one step at most."""


class CheckedDrafter:
    """Asks a drafter for as long as nothing goes wrong in it; after that there are no drafts.

    Args:
        drafter: None proposes nothing.
        vocab_size: ids from there on are no tokens.
    """

    def __init__(self, drafter: Drafter | None, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size

    @property
    def is_active(self) -> bool:
        """Whether drafts are to be expected."""
        return self._drafter is not None

    def propose(self, asks: Sequence[DraftAsk]) -> list[tuple[int, ...]]:
        """Return the draft tokens for each ask: at most as many as it wants, up to the first that is no token."""
        proposed: list[tuple[int, ...]] = [()] * len(asks)
        if self._drafter is None or not asks:
            return proposed
        try:
            drafts = self._drafter.propose(asks)
            return [self._tokens(draft.token_ids[: ask.max_tokens]) for ask, draft in zip(asks, drafts, strict=True)]
        except Exception:
            self._stop("propose")
            return proposed

    def observe(self, request: Request, new_token_ids: Sequence[int]) -> None:
        """Tell the drafter what a request was answered."""
        if self._drafter is not None:
            self._tell("observe", lambda drafter: drafter.observe(request, new_token_ids))

    def forget(self, request: Request) -> None:
        """Tell the drafter that a request has ended."""
        if self._drafter is not None:
            self._tell("forget", lambda drafter: drafter.forget(request))

    def _tell(self, what: str, call: Callable[[Drafter], None]) -> None:
        assert self._drafter is not None
        try:
            call(self._drafter)
        except Exception:
            self._stop(what)

    def _stop(self, what: str) -> None:
        _LOG.exception("the drafter failed in %s; requests are answered without drafts", what)
        self._drafter = None

    def _tokens(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        tokens = tuple(token_ids)
        bad = next((at for at, token in enumerate(tokens) if not 0 <= token < self._vocab_size), len(tokens))
        return tokens[:bad]
