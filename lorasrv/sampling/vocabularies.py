"""Split a step's logits by the number of tokens that a row may say.

Adapters with tokens of their own have more columns than the base. A row is looked at within its own columns only, and
apart from rows of other widths: a sum over more columns may add in another order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from lorasrv.scheduler_output import ScheduledRequest


class SameVocabulary(NamedTuple):
    """Hold the logits [S, V] of shares that have as many tokens, V: their `num_logit_rows`, then their
    `prompt_rows`."""

    logits: Tensor
    # [S] int64, the likeliest token of each row, as far as they are known.
    likeliest: Tensor | None
    sampled: tuple[ScheduledRequest, ...]
    asked: tuple[ScheduledRequest, ...]

    @property
    def num_sampled_rows(self) -> int:
        """Return the rows of `sampled`; those of `asked` are behind them."""
        return sum(share.num_logit_rows for share in self.sampled)


def by_vocabulary(
    logits: Tensor,
    likeliest: Tensor | None,
    sampled: tuple[ScheduledRequest, ...],
    asked: tuple[ScheduledRequest, ...],
    vocab_size: int,
) -> Iterator[SameVocabulary]:
    """Yield the parts of a step; the step as it is where all have the base's tokens.

    Args:
        logits: [S, at least V] fp32.
        likeliest: as of `SameVocabulary`, of all these columns.
        vocab_size: V of shares that do not say another.
    """
    sizes = {share.vocab_size for share in (*sampled, *asked)}
    if sizes <= {0}:
        yield SameVocabulary(logits, likeliest, sampled, asked)
        return
    for size in sorted(sizes):
        of_answers, rows, first = _of(size, sampled, [share.num_logit_rows for share in sampled], 0)
        of_prompts, more, _ = _of(size, asked, [len(share.prompt_rows) for share in asked], first)
        yield SameVocabulary(logits[:, : size or vocab_size][rows + more], None, of_answers, of_prompts)


def _of(
    size: int, shares: Sequence[ScheduledRequest], counts: Sequence[int], first: int
) -> tuple[tuple[ScheduledRequest, ...], list[int], int]:
    """Return the shares of this size, their rows, and the row behind those of all shares."""
    rows = list[int]()
    for share, count in zip(shares, counts, strict=True):
        rows += range(first, first + count) if share.vocab_size == size else ()
        first += count
    return tuple(share for share in shares if share.vocab_size == size), rows, first
