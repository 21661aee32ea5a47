"""Draft rows: the answers that a model on the worker drafts for, and the tokens that it draws for them.

A model draws as the served one would, by the same race of the same seed, so that the two agree wherever they nearly
agree about the probabilities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from cachetools import LRUCache
from torch import Tensor

from lorasrv.outputs import RequestId
from lorasrv.sampling.draft_verification import choose_tokens
from lorasrv.sampling.logits_processors import SamplingMetadata
from lorasrv.sampling.rejection import Probabilities
from lorasrv.sampling.sampler import distribution
from lorasrv.scheduler_output import NO_DRAFTS, ModelDraft, ScheduledRequest, path_along

MIN_CONFIDENCE = 0.1
"""A draft ends where the model gives all of it together a smaller probability."""


@dataclass(slots=True, eq=False)
class DraftRow:
    """Hold an answer that is being drafted."""

    scheduled: ScheduledRequest
    # Prompt, answer and draft.
    token_ids: list[int]
    num_known: int
    confidence: list[float] = field(default_factory=list)
    product: float = 1.0
    # What the draft was drawn from, for rejection sampling.
    drawn_from: list[Probabilities] = field(default_factory=list)

    @classmethod
    def of(cls, scheduled: ScheduledRequest, said: Sequence[int]) -> Self:
        """Begin to draft behind the tokens that a step has said."""
        tokens = [*scheduled.history, *said]
        return cls(scheduled, tokens, len(tokens))

    @property
    def has_next(self) -> bool:
        """Return whether the draft goes on."""
        is_sure = self.product >= MIN_CONFIDENCE or self.scheduled.by_rejection
        return is_sure and len(self.confidence) < self.scheduled.drafts.num_asked

    @property
    def draft(self) -> ModelDraft:
        """Return what was drafted."""
        return ModelDraft(tuple(self.token_ids[self.num_known :]), tuple(self.confidence))

    @property
    def takes_likeliest(self) -> bool:
        """Return whether all its tokens are those of the highest logits, as they are."""
        scheduled = self.next_scheduled()
        return scheduled.sampling.is_greedy and not SamplingMetadata.of(scheduled).changes_logits

    def take(self, token: int, confidence: float) -> None:
        """Append a drafted token, to which the model gives the probability `confidence`."""
        self.token_ids.append(token)
        self.confidence.append(confidence)
        self.product *= confidence

    def next_scheduled(self) -> ScheduledRequest:
        """Return what a step computes for the row's last token, which draws the next."""
        scheduled, last = self.scheduled, len(self.token_ids) - 1
        return replace(
            scheduled,
            token_ids=(self.token_ids[last],),
            start=last,
            num_generated=scheduled.num_generated + last + 1 - len(scheduled.history),
            history=self.token_ids,
            constraint=None,
            prompt_rows=range(0),
            by_rejection=False,
            drafts=NO_DRAFTS,
        )


def draw(rows: Sequence[DraftRow], logits: Tensor) -> list[DraftRow]:
    """Draw the next token of each row.

    Args:
        logits: [N, V] fp32, of the rows.
    Returns: rows whose drafts go on; those whose logits are not finite end.
    """
    requests = [row.next_scheduled() for row in rows]
    chosen = choose_tokens(logits, requests)
    going = [at for at, s in enumerate(requests) if s.request_id in chosen]
    tokens = [chosen[requests[at].request_id][0] for at in going]
    for at, token, sure in zip(going, tokens, confidence_of(logits, going, tokens), strict=True):
        row = rows[at]
        row.take(token, sure)
        if row.scheduled.by_rejection:
            row.drawn_from.append(distribution(logits[at], SamplingMetadata.of(requests[at])))
    return [rows[at] for at in going if rows[at].has_next]


def confidence_of(logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return the probability of a token in each of some rows of logits [N, V]."""
    some = logits if len(rows) == len(logits) else logits[list(rows)]
    picked = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    found: list[float] = some.softmax(dim=-1).gather(1, picked)[:, 0].tolist()
    return found


@dataclass(frozen=True, slots=True)
class LastStates:
    """Hold the hidden states that the last tokens of a step came from."""

    # [rows that want logits, H], normed.
    states: Tensor
    sampled: Sequence[ScheduledRequest]

    def of(self, requests: Sequence[ScheduledRequest], said: Mapping[RequestId, Sequence[int]]) -> Tensor:
        """Return the state [N, H] of the row that each request's last token was drawn from."""
        first, row = 0, dict[RequestId, int]()
        for scheduled in self.sampled:
            tokens = said.get(scheduled.request_id, ())
            path = path_along(scheduled.draft_token_ids, scheduled.draft_parents, tokens[:-1])
            row[scheduled.request_id] = first + (path[-1] + 1 if path else 0)
            first += scheduled.num_logit_rows
        rows = [row[s.request_id] for s in requests]
        return self.states[torch.tensor(rows, dtype=torch.int64, device=self.states.device)]


class DrawnTokens:
    """Remember what the drafts of the requests drafted last were drawn from."""

    def __init__(self, max_requests: int) -> None:
        # The place of the first draft token, and what it and the others were drawn from.
        self._drawn: LRUCache[RequestId, tuple[int, list[Probabilities]]] = LRUCache(max_requests)

    def remember(self, rows: Sequence[DraftRow]) -> None:
        """Remember the rows' drafts in place of those before."""
        for row in rows:
            self._drawn[row.scheduled.request_id] = (row.num_known, row.drawn_from)

    def find(self, scheduled: ScheduledRequest, depth: int) -> Probabilities | None:
        """Return the probabilities [V] that a request's draft token was drawn from, `depth` places behind the first.

        None if that is not known any more: then it counts as chosen, which is right for any token.
        """
        first, drawn = self._drawn.get(scheduled.request_id, (0, []))
        place = len(scheduled.history) + depth - first
        return drawn[place] if 0 <= place < len(drawn) else None
