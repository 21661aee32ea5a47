"""Paged attention in plain torch: single-token queries in padded products, longer chunks one by one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PADDING = 2
"""Sequences share a product if the longest has at most so many times the pages of the shortest."""


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
class AttentionPlan:
    """A step's sequences as `paged_attention` takes them, the same for every layer. See `ops.plan_attention`."""

    num_rows: int
    singles: tuple[SingleQueries, ...]
    chunks: tuple[Chunk, ...]


def plan_attention_torch(
    page_tables: npt.NDArray[np.int32], query_lens: Sequence[int], kv_lens: Sequence[int], page_size: int
) -> AttentionPlan:
    """See `ops.plan_attention`; arguments are checked there."""
    starts = (np.cumsum(query_lens) - np.asarray(query_lens)).tolist()
    pages = [-(-length // page_size) for length in kv_lens]
    groups: list[list[int]] = []
    for i in sorted((i for i, n in enumerate(query_lens) if n == 1), key=lambda i: pages[i]):
        if groups and pages[i] <= MAX_PADDING * pages[groups[-1][0]]:
            groups[-1].append(i)
        else:
            groups.append([i])
    singles = tuple(
        SingleQueries(
            rows=torch.tensor([starts[i] for i in group]),
            tables=torch.from_numpy(page_tables[group, : pages[group[-1]]].astype(np.int64)),
            lens=torch.tensor([kv_lens[i] for i in group]),
        )
        for group in groups
    )
    chunks = tuple(
        Chunk(
            rows=slice(starts[i], starts[i] + n),
            table=torch.from_numpy(page_tables[i : i + 1, : pages[i]].astype(np.int64)),
            length=kv_lens[i],
        )
        for i, n in enumerate(query_lens)
        if n > 1
    )
    return AttentionPlan(sum(query_lens), singles, chunks)


def paged_attention_torch(q: Tensor, kv_pages: Tensor, plan: AttentionPlan, scale: float, window: int | None) -> Tensor:
    """See `ops.paged_attention`."""
    out = torch.empty_like(q)
    for group in plan.singles:
        out[group.rows] = _single_queries(q[group.rows], kv_pages, group, scale, window)
    for chunk in plan.chunks:
        out[chunk.rows] = _chunk(q[chunk.rows], kv_pages, chunk, scale, window)
    return out


def _gather(kv_pages: Tensor, tables: Tensor) -> Tensor:
    """Pages of B sequences as fp32 [2, B, kv_heads, pages * page, D]."""
    b, n = tables.shape
    _, _, heads, page, d = kv_pages.shape
    gathered: Tensor = kv_pages[tables].permute(2, 0, 3, 1, 4, 5).to(torch.float32)
    return gathered.reshape(2, b, heads, n * page, d)


def _single_queries(q: Tensor, kv_pages: Tensor, group: SingleQueries, scale: float, window: int | None) -> Tensor:
    """q [B, heads, D] -> [B, heads, D]. The heads that share a key head stand where query positions would."""
    b, heads, d = q.shape
    kv_heads, lens = kv_pages.shape[2], group.lens[:, None]
    k, v = _gather(kv_pages, group.tables)
    position = torch.arange(k.shape[2])[None]
    visible = position < lens
    if window is not None:
        visible &= position >= lens - window
    # A page's unwritten slots may hold any bit pattern, NaN too, and 0 * NaN is NaN.
    v.masked_fill_(~visible[:, None, :, None], 0.0)
    grouped = q.view(b, kv_heads, heads // kv_heads, d)
    scores = (grouped @ k.transpose(2, 3)).mul_(scale).masked_fill_(~visible[:, None, None], float("-inf"))
    out: Tensor = scores.softmax(-1) @ v
    return out.reshape(b, heads, d)


def _chunk(q: Tensor, kv_pages: Tensor, chunk: Chunk, scale: float, window: int | None) -> Tensor:
    """q [n, heads, D] -> [n, heads, D]."""
    n, length = q.shape[0], chunk.length
    k, v = (t[:, :, :length] for t in _gather(kv_pages, chunk.table))
    query = q.transpose(0, 1)[None]
    if n == length and window is None:
        out = F.scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        positions = torch.arange(length - n, length)[:, None]
        keys = torch.arange(length)[None]
        visible = keys <= positions if window is None else (keys <= positions) & (keys > positions - window)
        out = F.scaled_dot_product_attention(query, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
