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

    share: ScheduledRequest
    # Prompt, answer and draft.
    token_ids: list[int]
    num_known: int
    confidence: list[float] = field(default_factory=list)
    product: float = 1.0
    # What the draft was drawn from, for rejection sampling.
    drawn_from: list[Probabilities] = field(default_factory=list)

    @classmethod
    def of(cls, share: ScheduledRequest, said: Sequence[int]) -> Self:
        """Begin to draft behind the tokens that a step has said."""
        tokens = [*share.history, *said]
        return cls(share, tokens, len(tokens))

    @property
    def has_next(self) -> bool:
        """Return whether the draft goes on."""
        is_sure = self.product >= MIN_CONFIDENCE or self.share.by_rejection
        return is_sure and len(self.confidence) < self.share.drafts.num_asked

    @property
    def draft(self) -> ModelDraft:
        """Return what was drafted."""
        return ModelDraft(tuple(self.token_ids[self.num_known :]), tuple(self.confidence))

    @property
    def takes_likeliest(self) -> bool:
        """Return whether all its tokens are those of the highest logits, as they are."""
        share = self.next_share()
        return share.sampling.is_greedy and not SamplingMetadata.of(share).changes_logits

    def take(self, token: int, confidence: float) -> None:
        """Append a drafted token, to which the model gives the probability `confidence`."""
        self.token_ids.append(token)
        self.confidence.append(confidence)
        self.product *= confidence

    def next_share(self) -> ScheduledRequest:
        """Return the share of a step that computes the row's last token and draws the next."""
        share, last = self.share, len(self.token_ids) - 1
        return replace(
            share,
            token_ids=(self.token_ids[last],),
            start=last,
            num_generated=share.num_generated + last + 1 - len(share.history),
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
    shares = [row.next_share() for row in rows]
    chosen = choose_tokens(logits, shares)
    going = [at for at, share in enumerate(shares) if share.request_id in chosen]
    tokens = [chosen[shares[at].request_id][0] for at in going]
    for at, token, sure in zip(going, tokens, confidence_of(logits, going, tokens), strict=True):
        row = rows[at]
        row.take(token, sure)
        if row.share.by_rejection:
            row.drawn_from.append(distribution(logits[at], SamplingMetadata.of(shares[at])))
    return [rows[at] for at in going if rows[at].has_next]


def confidence_of(logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return the probability of a token in each of some rows of logits [N, V]."""
    some = logits if len(rows) == len(logits) else logits[list(rows)]
    picked = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    shares: list[float] = some.softmax(dim=-1).gather(1, picked)[:, 0].tolist()
    return shares


@dataclass(frozen=True, slots=True)
class LastStates:
    """Hold the hidden states that the last tokens of a step came from."""

    # [rows that want logits, H], normed.
    states: Tensor
    sampled: Sequence[ScheduledRequest]

    def of(self, shares: Sequence[ScheduledRequest], said: Mapping[RequestId, Sequence[int]]) -> Tensor:
        """Return the state [N, H] of the row that each share's last token was drawn from."""
        first, row = 0, dict[RequestId, int]()
        for share in self.sampled:
            tokens = said.get(share.request_id, ())
            path = path_along(share.draft_token_ids, share.draft_parents, tokens[:-1])
            row[share.request_id] = first + (path[-1] + 1 if path else 0)
            first += share.num_logit_rows
        rows = [row[share.request_id] for share in shares]
        return self.states[torch.tensor(rows, dtype=torch.int64, device=self.states.device)]


class DrawnTokens:
    """Remember what the drafts of the requests drafted last were drawn from."""

    def __init__(self, max_requests: int) -> None:
        # The place of the first draft token, and what it and the others were drawn from.
        self._drawn: LRUCache[RequestId, tuple[int, list[Probabilities]]] = LRUCache(max_requests)

    def remember(self, rows: Sequence[DraftRow]) -> None:
        """Remember the rows' drafts in place of those before."""
        for row in rows:
            self._drawn[row.share.request_id] = (row.num_known, row.drawn_from)

    def find(self, share: ScheduledRequest, depth: int) -> Probabilities | None:
        """Return the probabilities [V] that a share's draft token was drawn from, `depth` places behind the first; None
        if that is not known any more: then it counts as chosen, which is right for any token."""
        first, drawn = self._drawn.get(share.request_id, (0, []))
        place = len(share.history) + depth - first
        return drawn[place] if 0 <= place < len(drawn) else None
