"""Logits -> the next token of each row. Of a GPU's logits only token ids come back, all rows' in one copy.

A random choice depends on the request's seed and on how many tokens it has, on nothing else: the same request gives the
same text whatever shares its batch, and after a preemption. (On a CPU and on a GPU it may be another text: filters sort
likely tokens in the one, all of them in the other.)
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lorasrv.request import SamplingParams
from sgmv_kernels.upload import upload

TOP_P_CANDIDATES = 256
_NO_TOKEN = -1


def sample(logits: Tensor, params: Sequence[SamplingParams], num_generated: Sequence[int]) -> list[int]:
    """Choose a token for each row.

    Args:
        logits: [B, V] fp32, finite.
        params: how to choose, one a row; `seed` must be set unless greedy.
        num_generated: tokens that each row's request has so far: its position in the seed's random stream.
    """
    chosen: list[int] = _tokens(logits, params, num_generated).tolist()
    return chosen


def sample_finite(logits: Tensor, params: Sequence[SamplingParams], num_generated: Sequence[int]) -> list[int | None]:
    """As `sample`, for any logits; None for a row whose logits are no numbers."""
    finite = torch.isfinite(logits.sum(dim=-1))
    if logits.device.type != "cuda" and not bool(finite.all()):
        good = finite.nonzero()[:, 0].tolist()
        tokens = iter(sample(logits[finite], [params[i] for i in good], [num_generated[i] for i in good]))
        return [next(tokens) if is_good else None for is_good in finite.tolist()]
    # On a GPU a draw from a row that is no numbers gives some token, and nothing has been waited for.
    marked = torch.where(finite, _tokens(logits, params, num_generated), _NO_TOKEN)
    return [None if token == _NO_TOKEN else token for token in marked.tolist()]


def _tokens(logits: Tensor, params: Sequence[SamplingParams], num_generated: Sequence[int]) -> Tensor:
    """[B] int64."""
    tokens = logits.argmax(dim=-1)
    random = [row for row, p in enumerate(params) if not p.is_greedy]
    if random and logits.device.type == "cuda":
        (rows,) = upload([np.array(random)], logits.device)
        tokens[rows] = draw_together(logits[rows], [params[i] for i in random], [num_generated[i] for i in random])
        return tokens
    for row in random:
        tokens[row] = _draw(logits[row], params[row], num_generated[row])
    return tokens


def draw_together(logits: Tensor, params: Sequence[SamplingParams], num_generated: Sequence[int]) -> Tensor:
    """What `_draw` does, for all rows at once, over sorted logits: nothing on the way is known to the host.

    Returns: [B] int64.
    """
    facts = [[p.temperature, p.top_k or math.inf, p.top_p, p.min_p] for p in params]
    draws = [_uniform(p.seed, count) for p, count in zip(params, num_generated, strict=True)]
    host = torch.tensor([[*row, draw] for row, draw in zip(facts, draws, strict=True)], dtype=torch.float64)
    if logits.device.type == "cuda":
        host = host.pin_memory()
    temperature, top_k, top_p, min_p, draw = host.to(logits.device, non_blocking=True).T[:, :, None]
    probs, order = torch.softmax(logits / temperature.float(), dim=-1).sort(dim=-1, descending=True, stable=True)
    probs = torch.where(torch.arange(probs.shape[1], device=probs.device) < top_k, probs, 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    # The likeliest is always kept.
    kept = (probs.cumsum(dim=-1) - probs < top_p) & (probs >= min_p * probs[:, :1])
    cumulative = torch.where(kept, probs, 0.0).double().cumsum(dim=-1)
    at = torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)
    last = (kept & (probs > 0)).sum(dim=-1, keepdim=True) - 1
    return order.gather(1, torch.minimum(at, last.clamp_min(0)))[:, 0]


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
