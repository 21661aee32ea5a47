"""Paged attention in plain torch: single-token queries in padded products, longer chunks one by one."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.backend import Scoring
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.draft_trees import MAX_SLOTS
from sgmv_kernels.metadata.plans import AttentionPlan
from sgmv_kernels.torch_ops.pointwise import softcap_torch_

MAX_PADDING = 2
"""Largest ratio between the numbers of pages of sequences that share one padded product."""


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """Hold sequences of similar length with one query row each: int64 `rows` [B], `tables` [B, pages], `lens` [B]."""

    rows: Tensor
    tables: Tensor
    lens: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Hold a sequence of `length` tokens with several query rows, the last ones, or a draft tree; `table` [1, pages]
    int64.
    """

    rows: slice
    table: Tensor
    length: int
    tree: "TreeRows | None" = None


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Hold a chunk's draft tree, from slot `start` on; `words` and `positions` [n] int64 (`metadata.draft_trees`)."""

    start: int
    words: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class TorchSequences:
    """Hold the sequences of a step by the way in which they are computed."""

    singles: tuple[SingleQueries, ...]
    chunks: tuple[Chunk, ...]


def prepare(plan: AttentionPlan, device: torch.device) -> TorchSequences:
    """Group single-token sequences by length; longer chunks and draft trees stay separate."""
    starts, lens = plan.query_starts.tolist(), plan.kv_lens.tolist()
    query_lens = np.diff(plan.query_starts).tolist()
    pages = [-(-length // plan.page_size) for length in lens]
    trees = _trees(plan, device)
    groups: list[list[int]] = []
    for i in sorted((i for i, n in enumerate(query_lens) if n == 1 and not trees[i]), key=lambda i: pages[i]):
        if groups and pages[i] <= MAX_PADDING * pages[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    # In a padded product, every sequence has as many pages as the longest.
    owned = np.arange(plan.page_tables.shape[1]) < np.array(pages)[:, None]
    tables = torch.from_numpy(np.where(owned, plan.page_tables, 0)).to(device, torch.int64)
    singles = tuple(
        SingleQueries(
            rows=torch.tensor([starts[i] for i in group], device=device),
            tables=tables[group, : pages[group[-1]]],
            lens=torch.tensor([lens[i] for i in group], device=device),
        )
        for group in groups
    )
    chunks = tuple(
        Chunk(slice(starts[i], starts[i] + n), tables[i : i + 1, : pages[i]], lens[i], trees[i])
        for i, n in enumerate(query_lens)
        if n > 1 or trees[i]
    )
    return TorchSequences(singles, chunks)


def _trees(plan: AttentionPlan, device: torch.device) -> list[TreeRows | None]:
    """Return the draft tree of each sequence."""
    if plan.trees is None:
        return [None] * len(plan.kv_lens)
    words, positions = (torch.from_numpy(rows).to(device).long() for rows in (plan.trees.words, plan.trees.positions))
    bounds = plan.query_starts.tolist()
    return [
        TreeRows(start, words[begin:end], positions[begin:end]) if start < length else None
        for start, length, begin, end in zip(
            plan.trees.starts.tolist(), plan.kv_lens.tolist(), bounds, bounds[1:], strict=False
        )
    ]


def attention_torch(q: Tensor, kv: KvPages, plan: AttentionPlan, scoring: Scoring) -> Tensor:
    """See `ops.Ops.paged_attention`."""
    out = torch.empty_like(q)
    sequences: TorchSequences = plan.prepared
    for group in sequences.singles:
        single = _single_queries(q[group.rows].float(), kv, group, scoring)
        out[group.rows] = single.to(q.dtype)
    for chunk in sequences.chunks:
        out[chunk.rows] = _chunk(q[chunk.rows].float(), kv, chunk, scoring).to(q.dtype)
    return out


def _gather(kv: KvPages, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys [B, kv_heads, D, pages * page] and values [B, kv_heads, pages * page, D] of B sequences, fp32."""
    keys, values = kv.read(tables)
    return keys.permute(0, 2, 3, 1, 4).flatten(3), values.permute(0, 2, 1, 3, 4).flatten(2, 3)


def _single_queries(q: Tensor, kv: KvPages, group: SingleQueries, scoring: Scoring) -> Tensor:
    """Compute attention of q [B, heads, D]; return [B, heads, D]. Heads that share a key head are passed as query
    positions.
    """
    b, heads, d = q.shape
    scale, window, softcap, slopes = scoring
    lens = group.lens[:, None]
    keys, values = _gather(kv, group.tables)
    position = torch.arange(keys.shape[3], device=q.device)[None]
    visible = position < lens
    if window is not None:
        visible &= position >= lens - window
    # Unwritten slots of a page may contain NaN, and 0 * NaN is NaN.
    values.masked_fill_(~visible[:, None, :, None], 0.0)
    grouped = q.view(b, kv.num_heads, heads // kv.num_heads, d)
    scores = (grouped @ keys).mul_(scale)
    if softcap is not None:
        softcap_torch_(scores, softcap)
    if slopes is not None:
        distance = (position - (lens - 1))[:, None, None]
        scores.add_(slopes.view(kv.num_heads, -1, 1) * distance)
    scores = scores.masked_fill_(~visible[:, None, None], float("-inf"))
    out: Tensor = scores.softmax(-1) @ values
    return out.reshape(b, heads, d)


def _chunk(q: Tensor, kv: KvPages, chunk: Chunk, scoring: Scoring) -> Tensor:
    """Compute attention of the rows of one sequence, q [n, heads, D]; return [n, heads, D]."""
    n, length = q.shape[0], chunk.length
    scale, window, softcap, slopes = scoring
    keys, values = _gather(kv, chunk.table)
    k, v = keys[..., :length].transpose(2, 3), values[:, :, :length]
    query = q.transpose(0, 1)[None]
    # torch's attention adds the mask to scores, which does not remove NaN.
    is_own = softcap is None and bool(k.isfinite().all())
    if is_own and n == length and window is None and slopes is None and chunk.tree is None:
        out = F.scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        visible, distance = _visible(chunk, n, window, q.device)
        bias = torch.zeros((n, length), device=q.device) if slopes is None else slopes[:, None, None] * distance
        if is_own:
            bias.masked_fill_(~visible, float("-inf"))
            out = F.scaled_dot_product_attention(query, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
        else:
            out = _by_hand(query, k, v, bias, visible, scale, softcap)
    return out[0].transpose(0, 1)


def _visible(chunk: Chunk, n: int, window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which keys the last n rows of a sequence see, bool [n, length], and for these the positions of keys minus
    those of rows.
    """
    last = torch.arange(chunk.length - n, chunk.length, device=device)[:, None]
    at = torch.arange(chunk.length, device=device)[None]
    visible, position, key_position = at <= last, last, at
    if chunk.tree is not None:
        slot = at - chunk.tree.start
        is_ancestor = (chunk.tree.words[:, None] >> slot.clamp(0, MAX_SLOTS - 1)) & 1
        visible = visible & ((slot < 0) | (is_ancestor > 0))
        position = chunk.tree.positions[:, None]
        # An ancestor's depth is its rank among the ancestors.
        key_position = torch.where(slot < 0, at, visible.cumsum(-1) - 1)
    distance = key_position - position
    return (visible if window is None else visible & (distance > -window)), distance


def _by_hand(
    query: Tensor, k: Tensor, v: Tensor, bias: Tensor, visible: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Compute attention with a softcap before the mask, or over NaN keys, which torch's attention cannot do."""
    group = query.shape[1] // k.shape[1]
    scores = (query @ k.repeat_interleave(group, 1).transpose(2, 3)).mul_(scale)
    if softcap is not None:
        softcap_torch_(scores, softcap)
    return scores.add_(bias).masked_fill_(~visible, float("-inf")).softmax(-1) @ v.repeat_interleave(group, 1)
