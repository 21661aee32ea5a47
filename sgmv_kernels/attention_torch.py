"""Paged attention in plain torch: single-token queries in one padded product, longer chunks one by one."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor


def paged_attention_torch(
    q: Tensor,
    kv_pages: Tensor,
    page_tables: npt.NDArray[np.int32],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """See `sgmv_kernels.ops.paged_attention`."""
    out = torch.empty_like(q)
    starts = np.cumsum(query_lens) - np.asarray(query_lens)
    single = [i for i, n in enumerate(query_lens) if n == 1]
    if single:
        rows = torch.from_numpy(starts[single]).to(q.device)
        lens = torch.tensor([kv_lens[i] for i in single], device=q.device)
        out[rows] = _single_queries(q[rows], kv_pages, page_tables[single], lens, scale, window)
    for i, n in enumerate(query_lens):
        if n > 1:
            rows_i = slice(int(starts[i]), int(starts[i]) + n)
            out[rows_i] = _chunk(q[rows_i], kv_pages, page_tables[i], kv_lens[i], scale, window)
    return out


def _gather(kv_pages: Tensor, tables: Tensor, page_count: int) -> Tensor:
    """Pages of B sequences as fp32 [2, B, kv_heads, page_count * page, D]."""
    pages = kv_pages[tables[:, :page_count].long()]
    b, n, _, heads, page, d = pages.shape
    gathered: Tensor = pages.permute(2, 0, 3, 1, 4, 5).to(torch.float32)
    return gathered.reshape(2, b, heads, n * page, d)


def _single_queries(
    q: Tensor, kv_pages: Tensor, tables: npt.NDArray[np.int32], lens: Tensor, scale: float, window: int | None
) -> Tensor:
    """q [B, heads, D] -> [B, heads, D]. The heads that share a key head stand where SDPA expects query positions."""
    b, heads, d = q.shape
    kv_heads, page = kv_pages.shape[2], kv_pages.shape[3]
    k, v = _gather(kv_pages, torch.from_numpy(tables).to(q.device), -(-int(lens.max()) // page))
    position = torch.arange(k.shape[2], device=q.device)[None]
    visible = position < lens[:, None]
    if window is not None:
        visible &= position >= lens[:, None] - window
    # A page's unwritten slots may hold any bit pattern, NaN too, and 0 * NaN is NaN.
    v.masked_fill_(~visible[:, None, :, None], 0.0)
    grouped = q.view(b, kv_heads, heads // kv_heads, d)
    scores = (grouped @ k.transpose(2, 3)).mul_(scale).masked_fill_(~visible[:, None, None], float("-inf"))
    out: Tensor = scores.softmax(-1) @ v
    return out.reshape(b, heads, d)


def _chunk(
    q: Tensor, kv_pages: Tensor, table: npt.NDArray[np.int32], length: int, scale: float, window: int | None
) -> Tensor:
    """q [n, heads, D] at the last n of `length` positions -> [n, heads, D]."""
    n, page = q.shape[0], kv_pages.shape[3]
    tables = torch.from_numpy(table[None]).to(q.device)
    k, v = (t[:, :, :length] for t in _gather(kv_pages, tables, -(-length // page)))
    query = q.transpose(0, 1)[None]
    if n == length and window is None:
        out = F.scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        positions = torch.arange(length - n, length, device=q.device)[:, None]
        keys = torch.arange(length, device=q.device)[None]
        visible = keys <= positions if window is None else (keys <= positions) & (keys > positions - window)
        out = F.scaled_dot_product_attention(query, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
