"""Logits -> the next token of each row. Greedy rows cost one device-to-host copy together.

A random choice depends on the request's seed and on how many tokens it has, on nothing else: the same request gives the
same text whatever shares its batch, and after a preemption.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lorasrv.request import SamplingParams

TOP_P_CANDIDATES = 256


def sample(logits: Tensor, params: Sequence[SamplingParams], num_generated: Sequence[int]) -> list[int]:
    """Choose a token for each row.

    Args:
        logits: [B, V] fp32, finite.
        params: how to choose, one a row; `seed` must be set unless greedy.
        num_generated: tokens that each row's request has so far: its position in the seed's random stream.
    """
    tokens = logits.argmax(dim=-1)
    for row, (p, count) in enumerate(zip(params, num_generated, strict=True)):
        if not p.is_greedy:
            tokens[row] = _draw(logits[row], p, count)
    chosen: list[int] = tokens.tolist()
    return chosen


def _draw(logits: Tensor, p: SamplingParams, count: int) -> Tensor:
    """One token from a row: temperature, then top-k, top-p over what is left, min-p against the likeliest."""
    probs = torch.softmax(logits / p.temperature, dim=-1)
    candidates: Tensor | None = None
    if 0 < p.top_k < probs.numel():
        probs, candidates = probs.topk(p.top_k)
        probs = probs / probs.sum()
    if p.top_p < 1.0:
        probs, candidates = _nucleus(probs, candidates, p.top_p)
    if p.min_p > 0.0:
        probs = torch.where(probs >= p.min_p * probs.max(), probs, 0.0)
    cumulative = probs.double().cumsum(0)
    at = torch.searchsorted(cumulative, _uniform(p.seed, count) * cumulative[-1], right=True)
    if int(at) == probs.numel():  # the draw was rounded up to the whole
        at = probs.nonzero()[-1, 0]
    return at if candidates is None else candidates[at]


def _nucleus(probs: Tensor, candidates: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest likeliest tokens whose probabilities reach `top_p`, likeliest first.

    A few hundred nearly always do, and finding them is far cheaper than sorting the vocabulary.
    """
    top, order = probs.topk(min(TOP_P_CANDIDATES, probs.numel()))
    if float(top.sum()) < top_p:
        top, order = probs.sort(descending=True, stable=True)
    kept = int((top.cumsum(0) - top < top_p).sum())
    order = order[:kept]
    return top[:kept], order if candidates is None else candidates[order]


def _uniform(seed: int | None, count: int) -> float:
    assert seed is not None, "a random request is given a seed when it is admitted"
    key = np.array([seed % 2**64, count], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())
