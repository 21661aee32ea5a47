"""Sums of the attention to each page on a GPU.

A program computes one observed row for one key head and a part of its keys; the query heads that share the key head are
the rows of its tile. The kernel runs twice: first every part writes the largest score and the sum of its heads, then
scores are computed again, and each page gets its weights. No two programs add to the same number, and a row's bits
depend only on its own length.

Speed on a GPU is NOT MEASURED yet.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from sgmv_kernels.backend import Scoring
from sgmv_kernels.formats.kv_format import KEY_SCALES, CodesKV
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.plans import AttentionPlan, PageMasses
from sgmv_kernels.triton_ops import attention
from sgmv_kernels.triton_ops.attention import SUMS, config_for, shape_for
from sgmv_kernels.triton_ops.attention_metadata import MAX_SPLITS, AttentionTables, split_of
from sgmv_kernels.triton_ops.common import as_bound, dot, host_ints, kernel, power_of_two, product_dtype, softened
from sgmv_kernels.triton_ops.kv_codes import rotate_heads, spread_bytes, words_of

ITEM_INTS = 7
LEAST_N = 64
"""Fewest keys of a tile, which has whole pages."""
_ITEM, _SUMS = tl.constexpr(ITEM_INTS), tl.constexpr(SUMS)


@dataclass(frozen=True, slots=True)
class ObservedParts:
    """Hold the parts of observed rows: items [I, 7] int32, and memory for the sums of each part [I, heads, 2] fp32.

    An item is: sequence, row of the step, index among the observed rows, first key, end of keys, first part of the row,
    number of its parts.
    """

    items: Tensor
    sums: Tensor


def add_page_mass_(masses: PageMasses, q: Tensor, kv: KvPages, plan: AttentionPlan, scoring: Scoring) -> None:
    """See `ops.Ops.paged_attention`."""
    tables: AttentionTables = plan.prepared
    heads, dim, group = q.shape[1], q.shape[2], q.shape[1] // kv.num_heads
    config = config_for(q.itemsize, kv)
    work = tables.buffer(shape_for(config, group), group)
    if heads not in masses.prepared:
        masses.prepared[heads] = _parts(masses, plan, config.split_tokens, heads, q.device)
    parts: ObservedParts = masses.prepared[heads]
    is_coded = isinstance(kv.format, CodesKV)
    compute, precision = product_dtype(q.dtype) if is_coded else product_dtype(q.dtype, kv.keys.dtype)
    keys = kv.keys
    if is_coded:
        q, keys = rotate_heads(q, torch.empty_like(q)), words_of(keys)
    # Pages of floats have no scales: any address can be passed.
    key_scales = kv.parts.get(KEY_SCALES, keys)
    for is_first in (True, False):
        _page_mass_kernel[(len(parts.items), kv.num_heads)](
            q,
            keys,
            key_scales,
            parts.sums,
            masses.sums,
            parts.items,
            work.ints,
            work.pages_at,
            work.capacity.max_pages,
            *masses.sums.shape[1:],
            scoring.scale,
            scoring.softcap or 0.0,
            *keys.stride(),
            *key_scales.stride()[:2],
            FIRST=is_first,
            HEADS=heads,
            GROUP=group,
            D=dim,
            D_PAD=power_of_two(dim),
            PAGE=kv.page_size,
            SOFTCAP=scoring.softcap is not None,
            CODES=is_coded,
            BLOCK_M=power_of_two(group),
            BLOCK_N=max(config.decode_n, LEAST_N),
            PARTS=MAX_SPLITS,
            COMPUTE=compute,
            PRECISION=precision,
            num_warps=config.decode_warps,
            num_stages=config.decode_stages,
        )


def _parts(
    masses: PageMasses, plan: AttentionPlan, split_tokens: int, heads: int, device: torch.device
) -> ObservedParts:
    """Cut the keys of every observed row into parts, depending only on their number."""
    sequence = np.repeat(np.arange(len(masses.counts)), masses.counts)
    place = np.arange(len(sequence))
    behind = np.cumsum(masses.counts)[sequence] - place
    row, length = plan.query_starts[sequence + 1] - behind, plan.kv_lens[sequence] - behind + 1
    size = split_of(length, split_tokens)
    count = -(-length // size)
    first = np.cumsum(count) - count
    of = np.repeat(place, count)
    begin = (np.arange(len(of)) - first[of]) * size[of]
    end = np.minimum(begin + size[of], length[of])
    items = np.stack((sequence[of], row[of], of, begin, end, first[of], count[of]), axis=-1)
    ints = host_ints(items.size, device)
    ints.numpy()[:] = items.reshape(-1)
    sums = attention.new_partials((len(of), heads, SUMS), dtype=torch.float32, device=device)
    return ObservedParts(ints.to(device, non_blocking=True).view(-1, ITEM_INTS), sums)


@kernel("pages_at", "max_pages", "num_observed", "width")
def _page_mass_kernel(  # type: ignore[no-untyped-def]
    q,
    keys,
    key_scales,
    part_sums,
    masses,
    items,
    ints,
    pages_at,
    max_pages,
    num_observed,
    width,
    scale,
    softcap,
    key_page,
    key_head,
    key_dim,
    key_slot,
    scale_page,
    scale_head,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Score one part of the keys of a row (row m of the tile: head m of the group); see the module."""
    part = tl.program_id(0)
    item = items + part * _ITEM
    sequence, row, place = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    begin, end = tl.load(item + 3), tl.load(item + 4)
    kv_head = tl.program_id(1)
    m, d, n = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD), tl.arange(0, BLOCK_N)
    head, row_ok, dim_ok = kv_head * GROUP + m, m < GROUP, d < D
    own = q + (row.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    q_tile = tl.load(own, mask=row_ok[:, None] & dim_ok[None, :], other=0.0).to(COMPUTE)
    k_rows: tl.constexpr = D_PAD // 4 if CODES else D_PAD
    k_row = tl.arange(0, k_rows)
    k_ok = k_row < ((D + 3) // 4 if CODES else D)
    k_base = keys + kv_head.to(tl.int64) * key_head + k_row.to(tl.int64)[:, None] * key_dim
    highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.full((BLOCK_M,), 0.0, dtype=tl.float32)
    if not FIRST:
        p, first = tl.arange(0, PARTS), tl.load(item + 5)
        of_part = part_sums + ((first + p)[:, None] * HEADS + head[None, :]) * _SUMS
        is_part = (p < tl.load(item + 6))[:, None] & row_ok[None, :]
        largest = tl.load(of_part, mask=is_part, other=float("-inf"))
        highest = tl.max(largest, 0)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(tl.load(of_part + 1, mask=is_part, other=0.0) * tl.exp(largest - highest[None, :]), 0)
        total = tl.where(row_ok, total, 1.0)
    nothing = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    table = ints + pages_at + sequence.to(tl.int64) * max_pages
    num_pages = (end + PAGE - 1) // PAGE
    next_page = tl.load(table + (begin // BLOCK_N * BLOCK_N + n) // PAGE)
    for tile in range(as_bound(begin // BLOCK_N), as_bound((end + BLOCK_N - 1) // BLOCK_N)):
        at = n + tile * BLOCK_N
        key_ok = (at >= begin) & (at < end)
        # Page ids are read one tile ahead, without a mask, and keys by whole pages: see `attention`.
        page = next_page.to(tl.int64)
        next_page = tl.load(table + (at + BLOCK_N) // PAGE)
        page_ok = (at // PAGE >= begin // PAGE) & (at // PAGE < num_pages)
        places = page * scale_page + kv_head.to(tl.int64) * scale_head + at % PAGE
        k_tile = tl.load(
            k_base + (page * key_page + (at % PAGE) * key_slot)[None, :],
            mask=k_ok[:, None] & page_ok[None, :],
            other=0,
        )
        if CODES:
            scores = dot(q_tile, spread_bytes(k_tile, k_rows, BLOCK_N, COMPUTE), nothing, PRECISION)
            scores = scores * (tl.load(key_scales + places, mask=page_ok, other=0.0) * scale)[None, :]
        else:
            scores = dot(q_tile, k_tile.to(COMPUTE), nothing, PRECISION) * scale
        if SOFTCAP:
            scores = softened(scores, softcap)
        scores = tl.where(key_ok[None, :], scores, float("-inf"))
        if FIRST:
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            known = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            total = total * tl.exp(highest - known) + tl.sum(tl.exp(scores - known[:, None]), 1)
            highest = new_highest
        else:
            weights = tl.exp(scores - highest[:, None]) / total[:, None]
            of_keys = tl.sum(tl.where(row_ok[:, None], weights, 0.0), 0)
            added = tl.sum(tl.reshape(of_keys, (BLOCK_N // PAGE, PAGE)), 1)
            at_page = tile * (BLOCK_N // PAGE) + tl.arange(0, BLOCK_N // PAGE)
            target = masses + (kv_head * num_observed + place).to(tl.int64) * width + at_page
            is_own = (at_page >= begin // PAGE) & (at_page < num_pages)
            tl.store(target, tl.load(target, mask=is_own, other=0.0) + added, mask=is_own)
    if FIRST:
        of_head = part_sums + (part * HEADS + head) * _SUMS
        tl.store(of_head, highest, mask=row_ok)
        tl.store(of_head + 1, total, mask=row_ok)
