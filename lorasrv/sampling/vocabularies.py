"""Split a step's logits by the size of the rows' vocabularies.

Adapters with their own tokens have more columns than the base. A row is processed only within its own columns, and
separately from rows of other widths: a sum over more columns may add in another order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from lorasrv.scheduler_output import ScheduledRequest
from sgmv_kernels.metadata.h2d import take


class SameVocabulary(NamedTuple):
    """Hold the logits [S, V] of requests with the same vocabulary size V: their `num_logit_rows`, then their
    `prompt_rows`."""

    logits: Tensor
    # [S] int64, the likeliest token of each row, as far as they are known.
    likeliest: Tensor | None
    sampled: tuple[ScheduledRequest, ...]
    asked: tuple[ScheduledRequest, ...]

    @property
    def num_sampled_rows(self) -> int:
        """Return the number of rows of `sampled`; those of `asked` follow them."""
        return sum(s.num_logit_rows for s in self.sampled)


def by_vocabulary(
    logits: Tensor,
    likeliest: Tensor | None,
    sampled: tuple[ScheduledRequest, ...],
    asked: tuple[ScheduledRequest, ...],
    vocab_size: int,
) -> Iterator[SameVocabulary]:
    """Yield the parts of a step; if all requests have the base's tokens, yield the whole step.

    Args:
        logits: [S, at least V] fp32.
        likeliest: as in `SameVocabulary`, over all these columns.
        vocab_size: V of requests without a size of their own.
    """
    sizes = {s.vocab_size for s in (*sampled, *asked)}
    if sizes <= {0}:
        yield SameVocabulary(logits, likeliest, sampled, asked)
        return
    for size in sorted(sizes):
        of_answers, rows, first = _of(size, sampled, [s.num_logit_rows for s in sampled], 0)
        of_prompts, more, _ = _of(size, asked, [len(s.prompt_rows) for s in asked], first)
        yield SameVocabulary(take(logits[:, : size or vocab_size], rows + more), None, of_answers, of_prompts)


def _of(
    size: int, requests: Sequence[ScheduledRequest], counts: Sequence[int], first: int
) -> tuple[tuple[ScheduledRequest, ...], list[int], int]:
    """Return the requests of this size, their rows, and the row after those of all requests."""
    rows = list[int]()
    for scheduled, count in zip(requests, counts, strict=True):
        rows += range(first, first + count) if scheduled.vocab_size == size else ()
        first += count
    return tuple(s for s in requests if s.vocab_size == size), rows, first
