"""Draft runner: a draft model continues answers by a few tokens, which the next step verifies.

The model is another base with the same vocabulary, or some layers of the served one with each row's own adapter
(self-speculation, Zhang et al. 2023, arXiv:2309.08168).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cachetools import LRUCache
from torch import Tensor

from lorasrv.outputs import RequestId
from lorasrv.sampling.rejection import Probabilities
from lorasrv.scheduler_output import DrafterOutput, ScheduledRequest, SchedulerOutput
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.draft_rows import DraftRow, DrawnTokens, LastStates, draw
from lorasrv.worker.forward_batch import ForwardBatch

MAX_CATCH_UP = 256
"""Most tokens of a request that the model computes in a step before it drafts."""
BuildBatch = Callable[[SchedulerOutput], ForwardBatch]


class _Cached(NamedTuple):
    token_ids: Sequence[int]
    pages: Sequence[int]


_NOTHING = _Cached((), ())


@dataclass(slots=True, eq=False)
class _Row(DraftRow):
    """Hold an answer that is being drafted, and how many of its tokens the model has computed."""

    num_computed: int = 0


class DraftRunner:
    """Draft with one model.

    Args:
        decoder: the model.
        build_batch: builds the batch of a step for it.
        has_own_cache: whether it has its own keys and values, beside those of the served model; otherwise it uses the
            served model's.
    """

    def __init__(
        self, decoder: Decoder, build_batch: BuildBatch, limits: DecoderLimits, *, has_own_cache: bool
    ) -> None:
        self._decoder, self._build_batch = decoder, build_batch
        self._max_rows = limits.max_rows
        self._has_own_cache = has_own_cache
        # For the requests drafted last, the tokens whose keys and values are in the cache, and their pages.
        self._cached: LRUCache[RequestId, _Cached] = LRUCache(2 * limits.max_samples)
        self._drawn = DrawnTokens(limits.max_samples)

    def draft(
        self,
        step: SchedulerOutput,
        asking: Sequence[ScheduledRequest],
        said: Mapping[RequestId, Sequence[int]],
        last: LastStates,
    ) -> DrafterOutput:
        """Draft for the requests of a step that ask for it.

        Args:
            said: the tokens that the step has sampled.
            last: not used.
        """
        begun, num_passes = time.perf_counter(), 0
        rows = [self._begin(s, said[s.request_id]) for s in asking if s.request_id in said]
        active = [row for row in rows if self._catch_up(step, row, self._max_rows // len(rows))]
        while active:
            num_passes += 1
            active = self._pass(step, active)
        for row in rows:
            self._cached[row.scheduled.request_id] = _Cached(
                row.token_ids[: row.num_computed], row.scheduled.page_table
            )
        self._drawn.remember(rows)
        drafts = {row.scheduled.request_id: row.draft for row in rows}
        return DrafterOutput(drafts, time.perf_counter() - begun, num_passes)

    def drawn_from(self, scheduled: ScheduledRequest, depth: int) -> Probabilities | None:
        """Return the distribution that a draft token was drawn from, as `DrawnTokens.find` does."""
        return self._drawn.find(scheduled, depth)

    def _begin(self, scheduled: ScheduledRequest, said: Sequence[int]) -> _Row:
        row = _Row.of(scheduled, said)
        row.num_computed = self._num_cached(scheduled, row.token_ids)
        return row

    def _num_cached(self, scheduled: ScheduledRequest, tokens: Sequence[int]) -> int:
        """Return how many tokens the model need not compute again: with the served model's cache, all but the last."""
        if not self._has_own_cache:
            return len(tokens) - 1
        cached = self._cached.get(scheduled.request_id, _NOTHING)
        same_pages = _num_common(cached.pages, scheduled.page_table) * self._decoder.page_size
        return min(_num_common(cached.token_ids, tokens), same_pages, len(tokens) - 1)

    def _catch_up(self, step: SchedulerOutput, row: _Row, room: int) -> bool:
        """Compute the tokens that the model has not seen, except the last `room`, which the first pass computes; return
        whether the row is ready."""
        if row.num_known - row.num_computed > room:
            scheduled = self._next_scheduled(row)
            count = min(MAX_CATCH_UP, self._max_rows, len(scheduled.token_ids) - 1)
            self._forward(step, [replace(scheduled, token_ids=scheduled.token_ids[:count], samples=False)])
            row.num_computed += count
        return row.num_known - row.num_computed <= room

    def _pass(self, step: SchedulerOutput, rows: Sequence[_Row]) -> list[_Row]:
        """Draw one token for each row; return the rows that continue."""
        logits, sampled = self._forward(step, [self._next_scheduled(row) for row in rows])
        by_id = {row.scheduled.request_id: row for row in rows}
        ordered = [by_id[s.request_id] for s in sampled]
        lengths = [len(row.token_ids) for row in ordered]
        going = draw(ordered, logits)
        for row, length in zip(ordered, lengths, strict=True):
            if len(row.token_ids) > length:
                row.num_computed = length
        return [row for row in ordered if row in going]

    def _forward(
        self, step: SchedulerOutput, requests: Sequence[ScheduledRequest]
    ) -> tuple[Tensor, tuple[ScheduledRequest, ...]]:
        batch = self._build_batch(step.only(requests))
        return self._decoder.forward(batch), batch.sampled

    def _next_scheduled(self, row: _Row) -> ScheduledRequest:
        """Return the scheduled request with the tokens of an answer that the model computes next."""
        return replace(
            row.next_scheduled(),
            token_ids=tuple(row.token_ids[row.num_computed :]),
            start=row.num_computed,
            adapter_key=None if self._has_own_cache else row.scheduled.adapter_key,
            summed=() if self._has_own_cache else row.scheduled.summed,
        )


def _num_common(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(some), len(others)))
