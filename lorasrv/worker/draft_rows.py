"""Draft rows: the answers that a model on the worker drafts for, and the tokens that it draws for them.

A draft model draws tokens as the served model would, with the same random numbers from the same seed. So both draw the
same token wherever their probabilities nearly agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from cachetools import LRUCache
from torch import Tensor

from lorasrv.outputs import RequestId
from lorasrv.sampling.draft_verification import choose_tokens
from lorasrv.sampling.logits_processors import SamplingMetadata
from lorasrv.sampling.rejection import Probabilities
from lorasrv.sampling.sampler import distribution
from lorasrv.scheduler_output import NO_DRAFTS, ModelDraft, ScheduledRequest, path_along
from sgmv_kernels.metadata.h2d import take, upload

MIN_CONFIDENCE = 0.1
"""A draft ends when the model gives the whole draft a smaller probability than this."""


@dataclass(slots=True, eq=False)
class DraftRow:
    """Hold an answer that is being drafted."""

    scheduled: ScheduledRequest
    # Prompt, answer and draft.
    token_ids: list[int]
    num_known: int
    confidence: list[float] = field(default_factory=list)
    product: float = 1.0
    # Distributions that the draft tokens were drawn from, for rejection sampling.
    drawn_from: list[Probabilities] = field(default_factory=list)

    @classmethod
    def of(cls, scheduled: ScheduledRequest, said: Sequence[int]) -> Self:
        """Begin to draft after the new tokens of a step."""
        tokens = [*scheduled.history, *said]
        return cls(scheduled, tokens, len(tokens))

    @property
    def has_next(self) -> bool:
        """Return whether the draft continues."""
        is_sure = self.product >= MIN_CONFIDENCE or self.scheduled.by_rejection
        return is_sure and len(self.confidence) < self.scheduled.drafts.num_asked

    @property
    def draft(self) -> ModelDraft:
        """Return what was drafted."""
        return ModelDraft(tuple(self.token_ids[self.num_known :]), tuple(self.confidence))

    @property
    def takes_likeliest(self) -> bool:
        """Return whether each token is the one with the highest unprocessed logit."""
        scheduled = self.next_scheduled()
        return scheduled.sampling.is_greedy and not SamplingMetadata.of(scheduled).changes_logits

    def take(self, token: int, confidence: float) -> None:
        """Append a drafted token, to which the model gives the probability `confidence`."""
        self.token_ids.append(token)
        self.confidence.append(confidence)
        self.product *= confidence

    def next_scheduled(self) -> ScheduledRequest:
        """Return the scheduled request that computes the row's last token, from which the next is drawn."""
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
        logits: [N, V] fp32, one row for each of `rows`.
    Returns: the rows whose drafts continue; drafts with logits that are not finite end.
    """
    requests = [row.next_scheduled() for row in rows]
    chosen = choose_tokens(logits, requests)
    going = [at for at, s in enumerate(requests) if s.request_id in chosen]
    tokens = [chosen[requests[at].request_id][0] for at in going]
    if rejecting := [at for at in going if rows[at].scheduled.by_rejection]:
        # Before the tokens are taken: they would become part of `history`.
        for at, own in zip(rejecting, take(logits, rejecting).cpu(), strict=True):
            rows[at].drawn_from.append(distribution(own, SamplingMetadata.of(requests[at])))
    for at, token, sure in zip(going, tokens, confidence_of(logits, going, tokens), strict=True):
        rows[at].take(token, sure)
    return [rows[at] for at in going if rows[at].has_next]


def confidence_of(logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return the probability of each token in its row of logits [N, V]."""
    some = logits if len(rows) == len(logits) else take(logits, rows)
    (picked,) = upload([np.array(tokens, dtype=np.int64)], logits.device)
    found: list[float] = some.softmax(dim=-1).gather(1, picked[:, None])[:, 0].tolist()
    return found


@dataclass(frozen=True, slots=True)
class LastStates:
    """Hold the hidden states from which the last tokens of a step were drawn."""

    # [rows with logits, H], normed.
    states: Tensor
    sampled: Sequence[ScheduledRequest]

    def of(self, requests: Sequence[ScheduledRequest], said: Mapping[RequestId, Sequence[int]]) -> Tensor:
        """Return the states [N, H] from which each request's last token was drawn."""
        first, row = 0, dict[RequestId, int]()
        for scheduled in self.sampled:
            tokens = said.get(scheduled.request_id, ())
            path = path_along(scheduled.draft_token_ids, scheduled.draft_parents, tokens[:-1])
            row[scheduled.request_id] = first + (path[-1] + 1 if path else 0)
            first += scheduled.num_logit_rows
        return take(self.states, [row[s.request_id] for s in requests])


class DrawnTokens:
    """Remember the distributions that the latest drafts of requests were drawn from."""

    def __init__(self, max_requests: int) -> None:
        # The place of the first draft token, and the distributions that it and the others were drawn from.
        self._drawn: LRUCache[RequestId, tuple[int, list[Probabilities]]] = LRUCache(max_requests)

    def remember(self, rows: Sequence[DraftRow]) -> None:
        """Remember the rows' drafts in place of earlier ones."""
        for row in rows:
            self._drawn[row.scheduled.request_id] = (row.num_known, row.drawn_from)

    def find(self, scheduled: ScheduledRequest, depth: int) -> Probabilities | None:
        """Return the probabilities [V] from which a request's draft token, `depth` places after the first, was drawn.

        None if they are no longer known: the token then counts as chosen without a draw, which is always correct.
        """
        first, drawn = self._drawn.get(scheduled.request_id, (0, []))
        place = len(scheduled.history) + depth - first
        return drawn[place] if 0 <= place < len(drawn) else None
