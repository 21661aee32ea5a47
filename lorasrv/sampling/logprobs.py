"""Compute log-probabilities of tokens for the rows that request them.

A row gives the same floats in any batch and with any number of threads. The device is waited for once, for all rows.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lorasrv.outputs import RequestId, TokenLogprobs
from lorasrv.scheduler_output import ScheduledRequest, path_along
from sgmv_kernels.metadata.h2d import take, upload

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
    found = token_logprobs(take(logits, rows), tokens, tops)
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
    tokens = [token for scheduled in requests for token in scheduled.prompt_targets]
    tops = [scheduled.sampling.prompt_logprobs or 0 for scheduled in requests for _ in scheduled.prompt_targets]
    found, answers, first = token_logprobs(logits[: len(tokens)], tokens, tops), {}, 0
    for scheduled in requests:
        targets = scheduled.prompt_targets
        own = found[first : first + len(targets)]
        first += len(targets)
        known = tuple(one for one in own if one is not None)
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
    if not len(logits):
        return []
    (own,) = upload([np.array(token_ids, dtype=np.int64)], logits.device)
    parts = [slice(first, first + ROWS_AT_ONCE) for first in range(0, len(logits), ROWS_AT_ONCE)]
    ranked = [_ranked(logits[part], own[part], min(max(tops[part]), logits.shape[1])) for part in parts]
    flat = torch.cat([table.flatten() for table in ranked]).cpu()
    tables = torch.split(flat, [table.numel() for table in ranked])
    rows = [row for table, numbers in zip(ranked, tables, strict=True) for row in numbers.view(table.shape).tolist()]
    return [_answer(ids, values, top) for (ids, values), top in zip(rows, tops, strict=True)]


def _answer(ids: Sequence[float], values: Sequence[float], top: int) -> TokenLogprobs | None:
    if math.isnan(values[0]):
        return None
    token, *others = map(int, ids)
    return TokenLogprobs(token, values[0], tuple(zip(others[:top], values[1 : 1 + top], strict=True)))


def _ranked(logits: Tensor, token_ids: Tensor, count: int) -> Tensor:
    """Return [R, 2, 1 + count] fp64: each row's token and its `count` likeliest tokens, then their log-softmax, NaN for
    a row that is not finite.

    Args:
        token_ids: [R] int64.
    """
    whole = _log_sums(logits)[:, None]
    ids = torch.cat([token_ids[:, None], likeliest(logits, count)], dim=1)
    found = logits.gather(1, ids)
    is_number = torch.isfinite(found[:, :1]) & torch.isfinite(whole)
    # The difference of two finite logits may exceed the range of a float.
    values = (found - whole).clamp_min(torch.finfo(torch.float32).min)
    return torch.stack([ids.double(), torch.where(is_number, values, math.nan).double()], dim=1)


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
