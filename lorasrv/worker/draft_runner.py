"""Draft runner: a model continues answers by a few tokens, which the next step verifies.

The model is another base with the same vocabulary, or some layers of the served one with each row's own adapter
(self-speculation, Zhang et al. 2023, arXiv:2309.08168). It draws as the served model would, by the same race of the
same seed, so that the two agree wherever they nearly agree about the probabilities.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from cachetools import LRUCache
from torch import Tensor

from lorasrv.outputs import RequestId
from lorasrv.sampling.draft_verification import choose_tokens
from lorasrv.sampling.logits_processors import SamplingMetadata
from lorasrv.sampling.rejection import Probabilities
from lorasrv.sampling.sampler import distribution
from lorasrv.scheduler_output import NO_DRAFTS, DrafterOutput, ModelDraft, ScheduledRequest, SchedulerOutput
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.forward_batch import ForwardBatch

MIN_CONFIDENCE = 0.1
"""A draft ends where the model gives all of it together a smaller probability."""
MAX_CATCH_UP = 256
"""Tokens of a request that the model computes in a step before it drafts."""
BuildBatch = Callable[[SchedulerOutput], ForwardBatch]


class _Cached(NamedTuple):
    token_ids: Sequence[int]
    pages: Sequence[int]


_NOTHING = _Cached((), ())


@dataclass(slots=True)
class _Row:
    """An answer that is being drafted."""

    share: ScheduledRequest
    # Prompt, answer and draft.
    token_ids: list[int]
    num_known: int
    num_computed: int
    confidence: list[float]
    product: float = 1.0
    # What the draft was drawn from, for rejection sampling.
    drawn_from: list[Probabilities] = field(default_factory=list)

    @property
    def has_next(self) -> bool:
        is_sure = self.product >= MIN_CONFIDENCE or self.share.by_rejection
        return is_sure and len(self.confidence) < self.share.drafts.num_asked

    def take(self, token: int, confidence: float) -> None:
        self.num_computed = len(self.token_ids)
        self.token_ids.append(token)
        self.confidence.append(confidence)
        self.product *= confidence


class DraftRunner:
    """Draft with one model.

    Args:
        decoder: the model.
        build_batch: lays a step out for it.
        has_own_cache: whether its keys and values are its own, and lie beside those of the served model; else they are
            the served model's.
    """

    def __init__(
        self, decoder: Decoder, build_batch: BuildBatch, limits: DecoderLimits, *, has_own_cache: bool
    ) -> None:
        self._decoder, self._build_batch = decoder, build_batch
        self._max_rows = limits.max_rows
        self._has_own_cache = has_own_cache
        # Of the requests drafted last, the tokens whose keys and values the cache holds, and the pages where.
        self._cached: LRUCache[RequestId, _Cached] = LRUCache(2 * limits.max_samples)
        # Of the same requests, the place of the first draft token, and what it and the others were drawn from.
        self._drawn: LRUCache[RequestId, tuple[int, list[Probabilities]]] = LRUCache(limits.max_samples)

    def draft(
        self, step: SchedulerOutput, asking: Sequence[ScheduledRequest], said: Mapping[RequestId, Sequence[int]]
    ) -> DrafterOutput:
        """Draft for the shares of a step that ask for it.

        Args:
            said: the tokens that the step has chosen.
        """
        begun, num_passes = time.perf_counter(), 0
        rows = [self._begin(share, said[share.request_id]) for share in asking if share.request_id in said]
        active = [row for row in rows if self._catch_up(step, row, self._max_rows // len(rows))]
        while active:
            num_passes += 1
            active = self._pass(step, active)
        for row in rows:
            self._cached[row.share.request_id] = _Cached(row.token_ids[: row.num_computed], row.share.page_table)
            self._drawn[row.share.request_id] = (row.num_known, row.drawn_from)
        drafts = {
            row.share.request_id: ModelDraft(tuple(row.token_ids[row.num_known :]), tuple(row.confidence))
            for row in rows
        }
        return DrafterOutput(drafts, time.perf_counter() - begun, num_passes)

    def drawn_from(self, share: ScheduledRequest, at: int) -> Probabilities | None:
        """Return the probabilities [V] that draft token `at` of a share, which this model has drafted, was drawn from;
        None if that is not known any more: then it counts as chosen, which is right for any token."""
        first, drawn = self._drawn.get(share.request_id, (0, []))
        place = len(share.history) + at - first
        return drawn[place] if 0 <= place < len(drawn) else None

    def _begin(self, share: ScheduledRequest, said: Sequence[int]) -> _Row:
        tokens = [*share.history, *said]
        return _Row(share, tokens, len(tokens), self._num_cached(share, tokens), [])

    def _num_cached(self, share: ScheduledRequest, tokens: Sequence[int]) -> int:
        """Return how many tokens the model need not compute again: all but the last in the served model's cache."""
        if not self._has_own_cache:
            return len(tokens) - 1
        cached = self._cached.get(share.request_id, _NOTHING)
        same_pages = _num_common(cached.pages, share.page_table) * self._decoder.page_size
        return min(_num_common(cached.token_ids, tokens), same_pages, len(tokens) - 1)

    def _catch_up(self, step: SchedulerOutput, row: _Row, room: int) -> bool:
        """Compute tokens that the model has not seen before the first pass, which has `room` for those of each row;
        return whether the row is ready."""
        if row.num_known - row.num_computed > room:
            share = self._next_share(row)
            count = min(MAX_CATCH_UP, self._max_rows, len(share.token_ids) - 1)
            self._forward(step, [replace(share, token_ids=share.token_ids[:count], samples=False)])
            row.num_computed += count
        return row.num_known - row.num_computed <= room

    def _pass(self, step: SchedulerOutput, rows: Sequence[_Row]) -> list[_Row]:
        """Draw one token of each row; return those that go on."""
        shares = [self._next_share(row) for row in rows]
        logits, sampled = self._forward(step, shares)
        chosen = choose_tokens(logits, sampled)
        at = {share.request_id: number for number, share in enumerate(sampled)}
        going = [row for row in rows if row.share.request_id in chosen]
        tokens = [chosen[row.share.request_id][0] for row in going]
        places = torch.tensor([at[row.share.request_id] for row in going], dtype=torch.int64, device=logits.device)
        some = logits[places]
        picked = some.gather(1, torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None])[:, 0]
        shares_of_one = (picked - some.logsumexp(dim=-1)).exp().tolist()
        for row, token, confidence in zip(going, tokens, shares_of_one, strict=True):
            row.take(token, confidence)
            if row.share.by_rejection:
                number = at[row.share.request_id]
                row.drawn_from.append(distribution(logits[number], SamplingMetadata.of(sampled[number])))
        return [row for row in going if row.has_next]

    def _forward(
        self, step: SchedulerOutput, shares: Sequence[ScheduledRequest]
    ) -> tuple[Tensor, tuple[ScheduledRequest, ...]]:
        batch = self._build_batch(step.only(shares))
        return self._decoder.forward(batch), batch.sampled

    def _next_share(self, row: _Row) -> ScheduledRequest:
        """Return the tokens that the model computes next of an answer."""
        share = row.share
        return replace(
            share,
            token_ids=tuple(row.token_ids[row.num_computed :]),
            start=row.num_computed,
            adapter_key=None if self._has_own_cache else share.adapter_key,
            num_generated=share.num_generated + len(row.token_ids) - len(share.history),
            history=row.token_ids,
            constraint=None,
            prompt_rows=range(0),
            by_rejection=False,
            drafts=NO_DRAFTS,
        )


def _num_common(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of first elements that are equal."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(some), len(others)))
