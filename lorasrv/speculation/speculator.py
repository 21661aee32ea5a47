"""Speculator: ask the drafters, estimate the chances of their proposals, and learn these chances from the answers.

Every proposal is compared with the answer up to its first wrong token, whether a step has verified it or not. So a
drafter that does not pay off under the current load is still evaluated, and is used again when it does.
"""

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from adapter_store.spec import AdapterKey
from lorasrv.outputs import RequestId
from lorasrv.request import Request
from lorasrv.scheduler_output import NO_PROBES, DrafterOutput, ProbeTree
from lorasrv.speculation.draft_counts import DraftAccounts
from lorasrv.speculation.draft_lengths import PlainStep
from lorasrv.speculation.drafter import Draft, Drafter, DraftQuery
from lorasrv.speculation.model_drafter import ModelDrafter, as_draft
from lorasrv.speculation.proposal import NO_PROPOSAL, Chain, Proposal
from lorasrv.speculation.survival import SurvivalTable
from lorasrv.speculation_params import REJECTION

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
ASKED_TOGETHER = 2
"""Requests for which drafters are asked at a time."""
MAX_MODEL_DRAFT = 8
"""Most tokens that a model drafts at a time."""


@dataclass(slots=True)
class _Trail:
    """Hold a draft, and how much of it the answer has matched so far."""

    draft: Draft
    num_said: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.draft.token_ids[self.num_said :]

    @property
    def evidence(self) -> tuple[Hashable, ...]:
        return self.draft.evidence[self.num_said :]


class Speculator:
    """Propose the likeliest draft of each answer. Called by the engine thread only, between two steps.

    A drafter that raises is never used again; answers continue without it.

    Args:
        drafters: in the order in which equally likely drafts are preferred.
        models: names of the draft models on the worker.
        makes_trees: whether drafts of several drafters are verified together, as a tree.
        vocab_size: valid token ids are below it.
        clock: returns seconds, to bound the time of proposing.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        models: Sequence[str] = (),
        *,
        makes_trees: bool = False,
    ) -> None:
        self._drafters = list(drafters)
        # Drafters that are told every token of every answer.
        self._listeners = [drafter for drafter in drafters if type(drafter).observe is not Drafter.observe]
        self._vocab_size = vocab_size
        self._clock = clock
        self._survival = SurvivalTable()
        self._models = {name: ModelDrafter(name, self._survival) for name in models}
        # For each request, by drafter, the drafts that have not been wrong yet.
        self._trails: dict[RequestId, dict[str, _Trail]] = {}
        self._num_asked = 0
        self.accounts = DraftAccounts((*(drafter.name for drafter in drafters), *models))
        self._makes_trees = makes_trees
        # The last proposal of each request.
        self._proposed: dict[RequestId, Proposal] = {}

    @property
    def is_active(self) -> bool:
        """Return whether drafts can be expected."""
        return bool(self._drafters or self._models)

    def propose(self, queries: Sequence[DraftQuery], seconds: float) -> list[Proposal]:
        """Return a proposal for each query. Drafts with tokens left are used again. If the next token is pending, the
        proposal begins after it, and the chances include that the draft has guessed the pending token.

        Args:
            seconds: time for new drafts. A few requests always get them; the others get theirs in later steps.
        """
        until, first = self._clock() + seconds, self._num_asked % max(1, len(queries))
        in_turn = [*queries[first:], *queries[:first]]
        for at in range(0, len(queries), ASKED_TOGETHER):
            some = in_turn[at : at + ASKED_TOGETHER]
            self._num_asked += len(some)
            self._draft(some)
            if self._clock() > until:
                break
        return [self._proposal(query) for query in queries]

    def probes(self, query: DraftQuery) -> ProbeTree:
        """Return the tokens that a drafter wants computed beside an answer's own."""
        for drafter in self._probing():
            if query.request.message.speculation.allows(drafter.name):
                return self._guard(drafter, partial(drafter.probes, query)) or NO_PROBES
        return NO_PROBES

    def ask_models(
        self, queries: Sequence[DraftQuery], verified: Sequence[Proposal], token_s: Sequence[float], step: PlainStep
    ) -> list[tuple[str, int]]:
        """Choose the model that drafts for each answer's next step, and how many tokens; "" and 0 for none.

        A model does not draft for answers whose verified drafts come from other drafters.

        Args:
            verified: the drafts that the step verifies for each answer.
            token_s: seconds that verifying one token of each answer adds to a step.
            step: the step without drafts.
        """
        asked = [("", 0)] * len(queries)
        for name, model in self._models.items():
            rows, numbers = list[tuple[Request, int]](), list[int]()
            for number, (query, own) in enumerate(zip(queries, verified, strict=True)):
                most = min(_most_behind(query.request, len(own.token_ids)), _longest(name, query.request))
                is_free = not asked[number][1] and set(own.drafters) <= {name}
                if most > 0 and is_free and query.request.message.speculation.allows(name):
                    rows.append((query.request, most))
                    numbers.append(number)
            if not rows:
                continue
            draws = [_draw(request) for request, _ in rows]
            found = model.lengths(rows, draws, [token_s[n] for n in numbers], step)
            for number, length in zip(numbers, found, strict=True):
                asked[number] = (name, length) if length > 0 else asked[number]
        return asked

    def take_results(
        self,
        drafted: Mapping[str, DrafterOutput],
        probed: Mapping[RequestId, Sequence[int]],
        live: Mapping[RequestId, Request],
    ) -> None:
        """Take the results of a step that serve the next step's drafts, for requests that have not finished in it.

        Args:
            drafted: drafts of models at its end.
            probed: the likeliest token after each probe.
        """
        for request_id, tokens in probed.items():
            if (request := live.get(request_id)) is not None:
                for drafter in self._probing():
                    self._guard(drafter, partial(drafter.observe_probes, request, tokens))
        for name, output in drafted.items():
            if output.has_failed:
                del self._models[name]
                continue
            self._models[name].observe(output)
            for request_id, draft in output.drafts.items():
                if (request := live.get(request_id)) is not None:
                    self._models[name].observe_draft(request.adapter_key, draft)
                    trails = self._trails.setdefault(request_id, {})
                    trails.pop(name, None)  # the model knows only its last draft
                    if draft.token_ids:
                        by_rejection = request.message.accept == REJECTION
                        trails[name] = _Trail(as_draft(*draft, sees_tokens=not by_rejection))

    def observe(self, request: Request, new_token_ids: Sequence[int], num_drafts: int) -> None:
        """Tell the drafters a request's new tokens, and learn which of their drafts were right.

        Args:
            num_drafts: draft tokens that the step has verified.
        """
        if num_drafts:
            self.accounts.observe(self._proposed[request.request_id].first(num_drafts), new_token_ids)
        if trails := self._trails.get(request.request_id):
            for name, trail in list(trails.items()):
                if not self._follow(trail, name, request, new_token_ids):
                    del trails[name]
        for drafter in self._listeners:
            try:
                drafter.observe(request, new_token_ids)
            except Exception:
                self._dismiss(drafter)

    def forget(self, request: Request) -> None:
        """Tell the drafters that a request has finished."""
        self._trails.pop(request.request_id, None)
        self._proposed.pop(request.request_id, None)
        for drafter in tuple(self._drafters):
            self._guard(drafter, partial(drafter.forget, request))

    def drop(self, adapter: AdapterKey | None, salt: str | None) -> None:
        """Have the drafters drop the kept answers of an adapter, or those under a salt."""
        for drafter in tuple(self._drafters):
            self._guard(drafter, partial(drafter.drop, adapter, salt))

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of past answers that the drafters keep."""
        return sum(drafter.kept_bytes for drafter in self._drafters)

    def _probing(self) -> list[Drafter]:
        return [drafter for drafter in self._drafters if drafter.has_probes]

    def _draft(self, queries: Sequence[DraftQuery]) -> None:
        """Ask each drafter for drafts of the requests for which it has none left."""
        for drafter in tuple(self._drafters):
            those = [query for query in queries if self._wants(query.request, drafter.name)]
            if those:
                self._guard(drafter, partial(self._begin, drafter, those))

    def _begin(self, drafter: Drafter, queries: Sequence[DraftQuery]) -> None:
        for query in queries:
            if (draft := drafter.draft(query)).token_ids:
                self._trails.setdefault(query.request.request_id, {})[drafter.name] = _Trail(draft)

    def _wants(self, request: Request, name: str) -> bool:
        has_draft = name in self._trails.get(request.request_id, ())
        return not has_draft and request.message.speculation.allows(name)

    def _proposal(self, query: DraftQuery) -> Proposal:
        """Return the draft that is expected to yield the most tokens, or a tree of all."""
        request, chains = query.request, list[Chain]()
        skipped = request.num_pending_tokens
        for name, trail in self._trails.get(request.request_id, {}).items():
            survival = self._chances(name, trail, query)
            tokens = self._valid(request, trail.tokens[: len(survival)])
            chains.append(Chain(name, tokens[skipped:], survival[skipped : len(tokens)]))
        makes_trees = self._makes_trees and request.message.kv_policy is None
        if len(chains) > 1 and not makes_trees:
            chains = [max(chains, key=lambda chain: sum(chain.survival))]
        found = Proposal.merged(chains).first(query.max_tokens) if chains else NO_PROPOSAL
        self._proposed[request.request_id] = found
        return found

    def _chances(self, name: str, trail: _Trail, query: DraftQuery) -> tuple[float, ...]:
        """Return, for each token of a draft that pays off, the chance that it and those before it are right."""
        chances, chance, draw = [], 1.0, _draw(query.request)
        for evidence in trail.evidence[: query.max_tokens]:
            chance *= self._survival.estimate(name, query.request.adapter_key, (draw, evidence))
            if chance <= query.min_survival:
                break
            chances.append(chance)
        return tuple(chances)

    def _valid(self, request: Request, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens before the first one that the vocabulary lacks or the request's grammar forbids."""
        size = min(self._vocab_size, request.message.vocab_size or self._vocab_size)
        bad = next((at for at, token in enumerate(tokens) if not 0 <= token < size), len(tokens))
        if request.constraint_state is not None and bad:
            bad = request.constraint_state.num_allowed(tokens[:bad])
        return tokens[:bad]

    def _follow(self, trail: _Trail, name: str, request: Request, new_token_ids: Sequence[int]) -> bool:
        """Compare a draft with the new tokens; return whether some of it is left."""
        for token in new_token_ids:
            if not trail.tokens:
                return False
            was_right = trail.tokens[0] == token
            evidence = _draw(request), trail.evidence[0]
            self._survival.observe(name, request.adapter_key, evidence, was_right=was_right)
            if name in self._models and request.message.accept != REJECTION:
                self._models[name].observe_depth(request, evidence[0], trail.num_said, was_right=was_right)
            if not was_right:
                return False
            trail.num_said += 1
        return bool(trail.tokens)

    def _guard(self, drafter: Drafter, call: Callable[[], T]) -> T | None:
        """Call a drafter; drop it and return None if it raises."""
        try:
            return call()
        except Exception:
            self._dismiss(drafter)
            return None

    def _dismiss(self, drafter: Drafter) -> None:
        """Stop using a drafter that has just raised."""
        _LOG.exception("drafter %s failed; answers go on without it", drafter.name)
        self._drafters.remove(drafter)
        self._listeners = [other for other in self._listeners if other is not drafter]


def _most_behind(request: Request, num_drafts: int) -> int:
    """Return the most tokens that can be drafted after a step that verifies `num_drafts`: all that may be left, except
    the one that verifying the last draft token yields."""
    left = request.message.max_tokens - request.num_generated_tokens - request.num_pending_tokens - num_drafts - 2
    return min(MAX_MODEL_DRAFT, request.message.speculation.max_draft, left)


def _longest(model: str, request: Request) -> int:
    return request.message.num_draft_heads if model == "medusa" else MAX_MODEL_DRAFT


def _draw(request: Request) -> str:
    """Name how tokens are chosen: text is less likely to repeat if tokens are sampled, or if repetition is
    penalized."""
    sampling = request.sampling
    return "adjusted" if sampling.changes_logits else "greedy" if sampling.is_greedy else "random"
