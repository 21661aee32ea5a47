"""Paged attention in plain torch: single-token queries in padded products, longer chunks one by one."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.backend import AttentionPlan
from sgmv_kernels.formats.kv_pages import KvPages

MAX_PADDING = 2
"""Largest ratio between the numbers of pages of sequences that share one padded product."""


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """Sequences of similar length with one query row each: `rows` [B], `tables` [B, pages], `lens` [B], all int64."""

    rows: Tensor
    tables: Tensor
    lens: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence with several query rows, the last of `length` positions; `table` [1, pages] int64."""

    rows: slice
    table: Tensor
    length: int


@dataclass(frozen=True, slots=True)
class TorchSequences:
    """Sequences of a step by how they are computed."""

    singles: tuple[SingleQueries, ...]
    chunks: tuple[Chunk, ...]


def prepare(plan: AttentionPlan, device: torch.device) -> TorchSequences:
    """Group the sequences: single-token ones by length, longer chunks each alone."""
    starts, lens = plan.query_starts.tolist(), plan.kv_lens.tolist()
    query_lens = np.diff(plan.query_starts).tolist()
    pages = [-(-length // plan.page_size) for length in lens]
    groups: list[list[int]] = []
    for i in sorted((i for i, n in enumerate(query_lens) if n == 1), key=lambda i: pages[i]):
        if groups and pages[i] <= MAX_PADDING * pages[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    tables = torch.from_numpy(plan.page_tables).to(device, torch.int64)
    singles = tuple(
        SingleQueries(
            rows=torch.tensor([starts[i] for i in group], device=device),
            tables=tables[group, : pages[group[-1]]],
            lens=torch.tensor([lens[i] for i in group], device=device),
        )
        for group in groups
    )
    chunks = tuple(
        Chunk(slice(starts[i], starts[i] + n), tables[i : i + 1, : pages[i]], lens[i])
        for i, n in enumerate(query_lens)
        if n > 1
    )
    return TorchSequences(singles, chunks)


def attention_torch(
    q: Tensor,
    kv: KvPages,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """See `ops.Ops.paged_attention`."""
    out = torch.empty_like(q)
    sequences: TorchSequences = plan.prepared
    for group in sequences.singles:
        single = _single_queries(q[group.rows].float(), kv, group, scale, window, softcap)
        out[group.rows] = single.to(q.dtype)
    for chunk in sequences.chunks:
        out[chunk.rows] = _chunk(q[chunk.rows].float(), kv, chunk, scale, window, softcap).to(q.dtype)
    return out


def _gather(kv: KvPages, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys [B, kv_heads, D, pages * page] and values [B, kv_heads, pages * page, D] of B sequences, fp32."""
    keys, values = kv.read(tables)
    return keys.permute(0, 2, 3, 1, 4).flatten(3), values.permute(0, 2, 1, 3, 4).flatten(2, 3)


def _single_queries(
    q: Tensor,
    kv: KvPages,
    group: SingleQueries,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend with q [B, heads, D]; returns [B, heads, D]. Heads that share a key head take the place of query
    positions.
    """
    b, heads, d = q.shape
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
        scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.masked_fill_(~visible[:, None, None], float("-inf"))
    out: Tensor = scores.softmax(-1) @ values
    return out.reshape(b, heads, d)


def _chunk(
    q: Tensor,
    kv: KvPages,
    chunk: Chunk,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend with the rows of one sequence, q [n, heads, D]; returns [n, heads, D]."""
    n, length = q.shape[0], chunk.length
    keys, values = _gather(kv, chunk.table)
    k, v = keys[..., :length].transpose(2, 3), values[:, :, :length]
    query = q.transpose(0, 1)[None]
    if n == length and window is None and softcap is None:
        out = F.scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        positions = torch.arange(length - n, length, device=q.device)[:, None]
        keys_at = torch.arange(length, device=q.device)[None]
        visible = keys_at <= positions if window is None else (keys_at <= positions) & (keys_at > positions - window)
        bias = torch.zeros((n, length), device=q.device).masked_fill_(~visible, float("-inf"))
        if softcap is None:
            out = F.scaled_dot_product_attention(query, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
        else:
            out = _capped(query, k, v, bias, scale, softcap)
    return out[0].transpose(0, 1)


def _capped(query: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float) -> Tensor:
    """Attend with a softcap on the scores before the mask, which torch's own attention does not offer."""
    group = query.shape[1] // k.shape[1]
    scores = (query @ k.repeat_interleave(group, 1).transpose(2, 3)).mul_(scale / softcap).tanh_().mul_(softcap)
    return scores.add_(bias).softmax(-1) @ v.repeat_interleave(group, 1)
