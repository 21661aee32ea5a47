"""Checked drafter: cut a drafter's proposals to what a step can take, and isolate requests from its errors."""

import logging
from collections.abc import Callable, Sequence

from lorasrv.request import Request
from lorasrv.speculation.drafter import DraftAsk, Drafter

_LOG = logging.getLogger(__name__)
MAX_DRAFT_TOKENS = 16
"""Most draft tokens of a request in one step."""


class CheckedDrafter:
    """Call a drafter until it raises; after that there are no drafts.

    Args:
        drafter: None proposes nothing.
        vocab_size: valid token ids are below it.
    """

    def __init__(self, drafter: Drafter | None, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size

    @property
    def is_active(self) -> bool:
        """Return whether drafts can be expected."""
        return self._drafter is not None

    def propose(self, asks: Sequence[DraftAsk]) -> list[tuple[int, ...]]:
        """Return the draft tokens of each request: at most as many as it may have, up to the first invalid id."""
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
        """Tell the drafter a request's new tokens."""
        if self._drafter is not None:
            self._tell("observe", lambda drafter: drafter.observe(request, new_token_ids))

    def forget(self, request: Request) -> None:
        """Tell the drafter that a request has finished."""
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
