"""Lookahead decoding: guess many places ahead at once, and keep the resulting n-grams as drafts.

Besides the answer's own tokens, each step computes a *window* of guessed tokens: W places and N - 1 levels. Level l + 1
is the model's output after level l (a Jacobi iteration), so each place becomes an n-gram that the model finds
plausible. An n-gram is a draft wherever its first token occurs. The window is a tree: level 0 is a chain after the last
known token; the nodes of each further level are children of the level before.

Source: lookahead decoding (Fu et al. 2024, arXiv:2402.02057).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from cachetools import LRUCache

from adapter_store.spec import AdapterKey
from lorasrv.outputs import RequestId
from lorasrv.request import Request
from lorasrv.scheduler_output import NO_PROBES, ProbeTree
from lorasrv.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftQuery
from sgmv_kernels.metadata.draft_trees import ROOT

MAX_NGRAMS = 1 << 10
"""Most first tokens per answer for which n-grams are kept; the least recently used are dropped first."""
MAX_ADAPTERS = 1 << 10
PRIOR_RIGHT, FORGETTING = 0.3, 0.98
"""Assumed share of first tokens that are right, and the factor on its weight for each token that is seen."""
MAX_GAIN = 1.0
"""Most tokens per step that a window is expected to gain: one that costs more is not even tried."""
TRIAL_STEPS, TRIAL_EVERY, MAX_TRIAL_EVERY = 24, 256, 4096
"""Steps of a trial of windows that do not pay off; steps between two trials, initially and at most."""


@dataclass(slots=True)
class _Window:
    """Hold the guesses of one answer and the n-grams that resulted from them."""

    levels: list[list[int]] = field(default_factory=list)
    ngrams: LRUCache[int, tuple[int, ...]] = field(default_factory=lambda: LRUCache(MAX_NGRAMS))
    # Whether the previous step has computed it.
    is_new: bool = False


@dataclass(slots=True)
class _Worth:
    """Track what windows gain for an adapter's answers, and when they are tried again."""

    right: float = PRIOR_RIGHT
    every: int = TRIAL_EVERY
    left: int = 0
    trial: int = 0

    def observe(self, *, was_right: bool) -> None:
        self.right = FORGETTING * self.right + (1 - FORGETTING) * was_right

    def is_due(self) -> bool:
        """Return whether to compute a window although it is not expected to pay off."""
        if self.left <= 0:
            self.left, self.every, self.trial = self.every, min(MAX_TRIAL_EVERY, 2 * self.every), TRIAL_STEPS
        self.left -= 1
        self.trial -= 1
        return self.trial >= 0


class Lookahead(Drafter):
    """Draft n-grams of Jacobi windows.

    Args:
        places: W, number of places guessed at once.
        length: N, number of tokens of an n-gram, including the one before the draft.
    """

    name = "lookahead"
    has_probes = True

    def __init__(self, places: int, length: int) -> None:
        self._places, self._length = places, length
        self._parents = tuple(
            at - places if at >= places else at - 1 if at else ROOT for at in range(places * (length - 1))
        )
        self._depth = places + length - 2
        self._windows: dict[RequestId, _Window] = {}
        self._worth: LRUCache[AdapterKey | None, _Worth] = LRUCache(MAX_ADAPTERS)

    def draft(self, query: DraftQuery) -> Draft:
        window = self._windows.get(query.request.request_id)
        tail = None if window is None else window.ngrams.get(query.request.token_ids[-1])
        if tail is None:
            return NO_DRAFT
        return Draft(tail, tuple(("depth", depth) for depth in range(len(tail))))

    def probes(self, query: DraftQuery) -> ProbeTree:
        request = query.request
        fits = self._depth <= request.message.max_tokens - request.num_generated_tokens
        if not (fits and self._pays(query)):
            return NO_PROBES
        window = self._windows.setdefault(request.request_id, _Window())
        if not window.levels:
            known = request.token_ids
            window.levels = [random.Random(len(known)).choices(known, k=self._places)]
        tokens = tuple(token for level in window.levels for token in level)
        return ProbeTree(tokens, self._parents[: len(tokens)])

    def observe_probes(self, request: Request, token_ids: Sequence[int]) -> None:
        window = self._windows.get(request.request_id)
        if window is None or not window.levels:
            return
        window.is_new = True
        newest = list(token_ids[-self._places :])
        window.levels.append(newest)
        if len(window.levels) == self._length:
            for ngram in zip(*window.levels, strict=True):
                window.ngrams[ngram[0]] = ngram[1:]
            del window.levels[0]

    def observe(self, request: Request, new_token_ids: Sequence[int]) -> None:
        """Learn how often the n-gram of a token continues as the answer did."""
        window = self._windows.get(request.request_id)
        if window is None or not window.is_new or len(window.levels) < self._length - 1:
            return
        window.is_new = False
        before = request.token_ids[-len(new_token_ids) - 1]
        tail = window.ngrams.get(before, ())
        self._of(request).observe(was_right=tail[:1] == tuple(new_token_ids[:1]))

    def forget(self, request: Request) -> None:
        self._windows.pop(request.request_id, None)

    def _of(self, request: Request) -> _Worth:
        return self._worth.setdefault(request.adapter_key, _Worth())

    def _pays(self, query: DraftQuery) -> bool:
        """Return whether the window is expected to gain more tokens than it costs, or is due for a trial."""
        worth, cost = self._of(query.request), query.min_survival * len(self._parents)
        if cost <= sum(worth.right**depth for depth in range(1, self._length)):
            worth.every = TRIAL_EVERY
            return True
        return cost <= MAX_GAIN and worth.is_due()
