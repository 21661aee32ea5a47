"""Compute log-probabilities of tokens for the rows that request them.

A row gives the same floats in any batch and with any number of threads.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lorasrv.outputs import RequestId, TokenLogprobs
from lorasrv.scheduler_output import ScheduledRequest, path_along

ROWS_AT_ONCE = 16
"""Rows ranked at a time; ranking takes 8 bytes per token in addition to the logits."""
_BLOCK = 1024
"""Number of logits whose exponentials one thread adds up; torch would divide a whole row among its threads."""


def chosen_logprobs(
    logits: Tensor, requests: Sequence[ScheduledRequest], chosen: Mapping[RequestId, Sequence[int]]
) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
    """Return the log-probabilities of the chosen tokens, for the requests that ask for them.

    Args:
        logits: [at least S, V], the `num_logit_rows` of each request first.
        chosen: tokens of each request's first row, and of the rows of its accepted draft tokens.
    """
    rows: list[int] = []
    tokens: list[int] = []
    tops: list[int] = []
    first = 0
    for scheduled in requests:
        if scheduled.sampling.logprobs is not None and (said := chosen.get(scheduled.request_id)):
            path = path_along(scheduled.draft_token_ids, scheduled.draft_parents, said[:-1])
            rows += [first, *(first + 1 + at for at in path)]
            tokens += said
            tops += [scheduled.sampling.logprobs] * len(said)
        first += scheduled.num_logit_rows
    if not rows:
        return {}
    found = token_logprobs(logits[rows], tokens, tops)
    answers: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
    for scheduled in requests:
        if scheduled.sampling.logprobs is not None and (said := chosen.get(scheduled.request_id)):
            known = tuple(one for one in found[: len(said)] if one is not None)
            found = found[len(said) :]
            if len(known) == len(said):
                answers[scheduled.request_id] = known
    return answers


def prompt_logprobs(logits: Tensor, requests: Sequence[ScheduledRequest]) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
    """Compute log-probabilities of prompt tokens, for the requests that want them.

    A request with a row that is not finite is left out.

    Args:
        logits: [R, V], the `prompt_rows` of the requests one after another.
    """
    answers, first = {}, 0
    for scheduled in requests:
        targets = scheduled.prompt_targets
        rows = logits[first : first + len(targets)]
        first += len(targets)
        found = token_logprobs(rows, targets, [scheduled.sampling.prompt_logprobs or 0] * len(targets))
        known = tuple(one for one in found if one is not None)
        if len(known) == len(targets):
            answers[scheduled.request_id] = known
    return answers


def token_logprobs(logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs | None]:
    """Compute each row's log-softmax at its token and at its likeliest tokens; None for a row that is not finite.

    Args:
        logits: [R, V] fp32, as the model gave them.
        token_ids: R tokens.
        tops: number of likeliest tokens that each row wants; among equal logits the smaller id comes first.
    """
    answers: list[TokenLogprobs | None] = []
    for first in range(0, len(logits), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        answers += _of_few(logits[part], token_ids[part], tops[part])
    return answers


def _of_few(logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs | None]:
    whole = _log_sums(logits)[:, None]
    own = torch.tensor(token_ids, device=logits.device)[:, None]
    ids = torch.cat([own, likeliest(logits, min(max(tops), logits.shape[1]))], dim=1)
    found = logits.gather(1, ids)
    is_number = (torch.isfinite(found[:, :1]) & torch.isfinite(whole))[:, 0].tolist()
    # The difference of two finite logits may exceed the range of a float.
    values = (found - whole).clamp_min(torch.finfo(torch.float32).min)
    answers: list[TokenLogprobs | None] = []
    for good, row_ids, row, top in zip(is_number, ids.tolist(), values.double().tolist(), tops, strict=True):
        if not good:
            answers.append(None)
            continue
        ranked = tuple(zip(row_ids[1 : 1 + top], row[1 : 1 + top], strict=True))
        answers.append(TokenLogprobs(row_ids[0], row[0], ranked))
    return answers


def _log_sums(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials of each row [R, V], as [R] fp32."""
    blocks = F.pad(logits, (0, -logits.shape[1] % _BLOCK), value=-math.inf).view(len(logits), -1, _BLOCK)
    return blocks.logsumexp(dim=2).logsumexp(dim=1)


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Return the [R, count] int64 ids of the largest logits, the smaller id first among equals, which `topk` does
    not promise.
    """
    width = logits.shape[1]
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    # Map floats to integers in the same order (-0.0 becomes 0.0 first) and append the id, so that all keys differ.
    bits = (logits + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = order * 2**32 + torch.arange(width - 1, -1, -1, device=logits.device)
    return width - 1 - (keys.topk(count).values & 0xFFFFFFFF)
