"""Choose the next token of each row from its logits. A GPU copies back only token ids, for all rows at once.

A random choice depends only on the request's seed and its number of tokens, so a request gives the same text in any
batch, and after a preemption. CPU and GPU may give different texts, because their sums round differently.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorasrv.sampling.logits_processors import SamplingMetadata, adjusted_rows, typical
from lorasrv.sampling.race import race, race_keys, race_together
from lorasrv.sampling_params import SamplingParams
from sgmv_kernels.backend import NO_TOKEN
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.torch_ops.pointwise import likeliest_torch

CANDIDATES = 256
"""Number of likeliest tokens searched for when that is nearly always enough; far cheaper than sorting all tokens."""
DRAWN_TOGETHER = 64
"""Most rows that a GPU draws together."""
DRAW_BYTES = 80
"""Approximate memory that a GPU takes for each token of each of these rows: 48 bytes of tensors, and what its sort
takes."""


def sample(logits: Tensor, rows: Sequence[SamplingMetadata]) -> list[int]:
    """Choose a token for each row.

    Args:
        logits: [B, V] fp32, finite.
        rows: B rows; `seed` must be set unless greedy.
    """
    chosen: list[int] = _tokens(logits, rows, likeliest_torch(logits)).tolist()
    return chosen


def launch_sampling(logits: Tensor, rows: Sequence[SamplingMetadata]) -> Tensor:
    """Choose a token for each row on a GPU, without waiting for it.

    Returns: [B] int64 on the device; `NO_TOKEN` for a row with logits that are not finite.
    """
    return _launched(logits, rows, likeliest_torch(logits))


def _launched(logits: Tensor, rows: Sequence[SamplingMetadata], best: Tensor) -> Tensor:
    # A draw from a row with NaN gives an arbitrary token, which is replaced here.
    return torch.where(best == NO_TOKEN, best, _tokens(logits, rows, best))


def sample_finite(
    logits: Tensor, rows: Sequence[SamplingMetadata], likeliest: Tensor | None = None
) -> list[int | None]:
    """Choose a token for each row as `sample` does; None for a row with logits that are not finite.

    Args:
        likeliest: [B] int64, the likeliest token of each row as `Ops.likeliest` finds it; None: computed here.
    """
    best = likeliest_torch(logits) if likeliest is None else likeliest
    if logits.device.type != "cpu":
        return or_none(_launched(logits, rows, best))
    chosen = or_none(best)
    left = [at for at, row in enumerate(rows) if chosen[at] is not None and not row.takes_likeliest]
    if left:
        of_left = slice(None) if len(left) == len(rows) else left
        drawn = _tokens(logits[of_left], [rows[at] for at in left], best[of_left]).tolist()
        for at, token in zip(left, drawn, strict=True):
            chosen[at] = token
    return chosen


def likeliest_finite(logits: Tensor) -> list[int | None]:
    """Return the token with the highest logit in each row of [B, V] fp32; None for a row with logits that are not
    finite."""
    return or_none(likeliest_torch(logits))


def or_none(tokens: Tensor) -> list[int | None]:
    """Return tokens [B] as ints, with None for `NO_TOKEN`."""
    return [None if token == NO_TOKEN else token for token in tokens.tolist()]


def _tokens(logits: Tensor, rows: Sequence[SamplingMetadata], best: Tensor) -> Tensor:
    """Return [B] int64 tokens; `best` are those with the highest logits. Only rows whose logits change are copied."""
    asking = [number for number, row in enumerate(rows) if row.changes_logits]
    if not asking:
        return _chosen(logits, rows, range(len(rows)), best)
    if len(asking) == len(rows):
        changed = adjusted_rows(logits.clone(), rows)
        return _chosen(changed, rows, range(len(rows)), _argmax(changed))
    (numbers,) = upload([np.array(asking)], logits.device)
    those = [rows[number] for number in asking]
    tokens = _chosen(logits, rows, [number for number, row in enumerate(rows) if not row.changes_logits], best)
    changed = adjusted_rows(logits.index_select(0, numbers), those)
    tokens[numbers] = _chosen(changed, those, range(len(those)), _argmax(changed))
    return tokens


def _chosen(logits: Tensor, rows: Sequence[SamplingMetadata], of: Iterable[int], best: Tensor) -> Tensor:
    """Return [B] int64: `best`, replaced by a draw in the random rows among `of`."""
    random = [number for number in of if not rows[number].params.is_greedy]
    tokens = best.clone()
    if logits.device.type != "cpu":
        draw_together_(tokens, logits, rows, random)
        return tokens
    for number in random:
        tokens[number] = _draw(logits[number], rows[number])
    return tokens


def _argmax(logits: Tensor) -> Tensor:
    """Return [B] int64. On a CPU by numpy: torch would wake all threads for a few microseconds of work."""
    return logits.argmax(dim=-1) if logits.device.type != "cpu" else torch.from_numpy(logits.numpy().argmax(axis=-1))


def draw_together_(tokens: Tensor, logits: Tensor, rows: Sequence[SamplingMetadata], of: Iterable[int]) -> None:
    """Draw tokens for the rows `of` as `_draw` does, without copying anything to the host.

    Rows that need the same number of likeliest tokens are drawn together: all tokens in their own order if no option
    needs the likeliest, the first few for a small top-k, otherwise all, sorted. `DRAWN_TOGETHER` bounds their memory.
    """
    together: dict[int, list[int]] = {}
    for number in of:
        together.setdefault(_likeliest_of(rows[number].params, logits.shape[1]), []).append(number)
    for likeliest, numbers in together.items():
        for first in range(0, len(numbers), DRAWN_TOGETHER):
            few = numbers[first : first + DRAWN_TOGETHER]
            (at,) = upload([np.array(few)], logits.device)
            tokens[at] = _drawn(logits[at], [rows[number] for number in few], likeliest)


def _likeliest_of(p: SamplingParams, vocab: int) -> int:
    """Return how many of the likeliest tokens a draw needs; 0 if it needs no order."""
    if 0 < p.top_k < vocab:
        return CANDIDATES if p.top_k <= CANDIDATES < vocab else vocab
    return vocab if p.top_p < 1.0 else 0


def _drawn(logits: Tensor, rows: Sequence[SamplingMetadata], likeliest: int) -> Tensor:
    """Return [B] int64, a draw for each row from its `likeliest` likeliest tokens; 0: from all, in their own order."""
    params = [row.params for row in rows]
    facts = [[p.temperature, p.top_k or math.inf, p.top_p, p.min_p, p.typical_p] for p in params]
    host, keys = torch.tensor(facts, dtype=torch.float32), torch.from_numpy(race_keys([_draw_of(row) for row in rows]))
    if logits.device.type == "cuda":
        host, keys = host.pin_memory(), keys.pin_memory()
    temperature, top_k, top_p, min_p, typical_p = host.to(logits.device, non_blocking=True).T[:, :, None]
    probs, order = torch.softmax(logits / temperature, dim=-1), None
    if likeliest:
        probs, order = _sorted(probs, likeliest)
        probs = torch.where(torch.arange(likeliest, device=probs.device) < top_k, probs, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
        probs = torch.where(probs.cumsum(dim=-1) - probs < top_p, probs, 0.0)
    if any(p.min_p > 0.0 for p in params):
        probs = torch.where(probs >= min_p * probs.amax(dim=-1, keepdim=True), probs, 0.0)
    if any(p.typical_p < 1.0 for p in params):
        probs = torch.where(typical(probs, typical_p) | (typical_p == 1.0), probs, 0.0)
    at = race_together(probs, keys.to(logits.device, non_blocking=True), order)
    return at if order is None else order.gather(1, at[:, None])[:, 0]


def _sorted(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest probabilities of each row and their tokens, the highest first; among equal ones, the
    lower token first."""
    vocab = probs.shape[1]
    if count == vocab:
        return probs.sort(dim=-1, descending=True, stable=True)
    # The token in the low bits makes equal ones distinct; non-negative floats sort like their bits.
    tokens = torch.arange(vocab, device=probs.device)
    keys = (probs.view(torch.int32).long() << 32) + (vocab - 1 - tokens)
    top = keys.topk(count, dim=-1).values
    return (top >> 32).int().view(torch.float32), vocab - 1 - (top & 0xFFFFFFFF)


def distribution(logits: Tensor, row: SamplingMetadata) -> npt.NDArray[np.float64]:
    """Return the probabilities [V] that a row's token is drawn from, after all adjustments.

    Args:
        logits: [V] fp32 on the host, finite.
    """
    if row.changes_logits:
        logits = adjusted_rows(logits[None].clone(), [row])[0]
    probs, candidates = _filtered(logits, row)
    dense = np.zeros(logits.numel(), dtype=np.float64)
    dense[slice(None) if candidates is None else candidates.numpy()] = probs.numpy()
    dense /= dense.sum()
    return dense


def _draw(logits: Tensor, row: SamplingMetadata) -> int:
    """Draw a token of one row."""
    probs, candidates = _filtered(logits, row)
    tokens = None if candidates is None else candidates.numpy()
    at = race(probs.numpy(), race_keys([_draw_of(row)]), tokens)
    return at if tokens is None else int(tokens[at])


def _filtered(logits: Tensor, row: SamplingMetadata) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities of one row, and their tokens if not all are left. In order: temperature, top-k, top-p
    over the rest, min-p relative to the likeliest, typical.
    """
    p = row.params
    probs = torch.softmax(logits / p.temperature, dim=-1)
    candidates: Tensor | None = None
    if 0 < p.top_k < probs.numel():
        probs, candidates = probs.topk(p.top_k)
        probs = probs / probs.sum()
    if p.top_p < 1.0:
        probs, candidates = _nucleus(probs, candidates, p.top_p)
    if p.min_p > 0.0:
        probs = torch.where(probs >= p.min_p * probs.max(), probs, 0.0)
    if p.typical_p < 1.0:
        probs = torch.where(typical(probs, p.typical_p), probs, 0.0)
    return probs, candidates


def _nucleus(probs: Tensor, candidates: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the fewest likeliest tokens whose probabilities reach `top_p`, likeliest first."""
    top, order = probs.topk(min(CANDIDATES, probs.numel()))
    if float(top.sum()) < top_p:
        top, order = probs.sort(descending=True, stable=True)
    kept = int((top.cumsum(0) - top < top_p).sum())
    order = order[:kept]
    return top[:kept], order if candidates is None else candidates[order]


def _draw_of(row: SamplingMetadata) -> tuple[int, int]:
    """Return the inputs of a row's draw: its seed and its number of tokens."""
    assert row.params.seed is not None, "a random request gets a seed at admission"
    return row.params.seed, row.num_generated
