"""Logits -> how likely tokens are, for the rows that ask. Nothing here looks at other rows: the same row gives the same
floats whatever shares its batch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lorasrv.outputs import RequestId, TokenLogprobs
from lorasrv.scheduler_output import ScheduledRequest

ROWS_AT_ONCE = 16
"""Rows whose vocabulary is ranked at a time: 8 bytes a token beside the logits."""


def chosen_logprobs(
    logits: Tensor, shares: Sequence[ScheduledRequest], chosen: Mapping[RequestId, Sequence[int]]
) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
    """Of the tokens that were chosen, for the requests that ask.

    Args:
        logits: [at least S, V], the `num_logit_rows` of each share first.
        chosen: tokens of the first of these rows.
    """
    rows: list[int] = []
    tokens: list[int] = []
    tops: list[int] = []
    first = 0
    for share in shares:
        if share.sampling.logprobs is not None and (said := chosen.get(share.request_id)):
            rows += range(first, first + len(said))
            tokens += said
            tops += [share.sampling.logprobs] * len(said)
        first += share.num_logit_rows
    if not rows:
        return {}
    found = token_logprobs(logits[rows], tokens, tops)
    answers: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
    for share in shares:
        if share.sampling.logprobs is not None and (said := chosen.get(share.request_id)):
            known = tuple(one for one in found[: len(said)] if one is not None)
            found = found[len(said) :]
            if len(known) == len(said):
                answers[share.request_id] = known
    return answers


def prompt_logprobs(logits: Tensor, shares: Sequence[ScheduledRequest]) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
    """Of the prompt's tokens behind the `prompt_rows` of each share, whose logits [R, V] stand in that order. A request
    with a row of no numbers has none."""
    answers, first = {}, 0
    for share in shares:
        targets = share.prompt_targets
        rows = logits[first : first + len(targets)]
        first += len(targets)
        found = token_logprobs(rows, targets, [share.sampling.prompt_logprobs or 0] * len(targets))
        known = tuple(one for one in found if one is not None)
        if len(known) == len(targets):
            answers[share.request_id] = known
    return answers


def token_logprobs(logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs | None]:
    """The logarithm of each row's softmax at its token, and at its likeliest tokens; None for a row of no numbers.

    Args:
        logits: [R, V] fp32, as the model gave them.
        token_ids: R tokens.
        tops: how many of the likeliest each row asks for; of equal ones the smaller id comes first.
    """
    answers: list[TokenLogprobs | None] = []
    for first in range(0, len(logits), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        answers += _of_few(logits[part], token_ids[part], tops[part])
    return answers


def _of_few(logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs | None]:
    # Row by row: a reduction over many rows at once may add up in another order than over one.
    whole = torch.stack([torch.logsumexp(row, dim=0) for row in logits])[:, None]
    own = torch.tensor(token_ids, device=logits.device)[:, None]
    ids = torch.cat([own, likeliest(logits, min(max(tops), logits.shape[1]))], dim=1)
    found = logits.gather(1, ids)
    is_number = (torch.isfinite(found[:, :1]) & torch.isfinite(whole))[:, 0].tolist()
    # Two finite logits may lie further apart than a float reaches.
    values = (found - whole).clamp_min(torch.finfo(torch.float32).min)
    answers: list[TokenLogprobs | None] = []
    for good, row_ids, row, top in zip(is_number, ids.tolist(), values.double().tolist(), tops, strict=True):
        if not good:
            answers.append(None)
            continue
        ranked = tuple(zip(row_ids[1 : 1 + top], row[1 : 1 + top], strict=True))
        answers.append(TokenLogprobs(row_ids[0], row[0], ranked))
    return answers


def likeliest(logits: Tensor, count: int) -> Tensor:
    """[R, count] int64: ids of the largest logits, the smaller id first of equals, which `topk` does not promise."""
    width = logits.shape[1]
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    # As whole numbers in the order of the floats (-0.0 made 0.0 first), each with its id behind it: no two are equal.
    bits = (logits + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = order * 2**32 + torch.arange(width - 1, -1, -1, device=logits.device)
    return width - 1 - (keys.topk(count).values & 0xFFFFFFFF)
