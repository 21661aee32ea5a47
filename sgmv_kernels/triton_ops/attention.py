"""Paged attention on a GPU: prefill chunks and decodes in one call, over keys that are transposed in their pages.

A program computes a tile of one sequence's query rows for one key head; the query heads that share the key head are
adjacent rows of the tile, so that a decode row fills the tensor core with its group. Keys and values of a tile of
tokens are read page by page through the page table, with int64 addresses. Slots that no row may see may hold NaN: their
values are not read, and their scores are masked. Long contexts of few rows are cut into parts, whose results a second
kernel adds (`triton_ops.attention_metadata`).

The bits of a row's result do not depend on the batch, the order of sequences, or the places of pages. The number of
rows of a sequence in a step may change the last bits.

Source: tiles and online softmax, FlashAttention-2 (Dao 2023); pages, vLLM (Kwon et al. 2023), whose unified Triton
kernel also lets the group fill the rows; parts and reduce, Flash-Decoding (Dao et al. 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgmv_kernels.backend import Scoring
from sgmv_kernels.formats.kv_format import KEY_SCALES, VALUE_MINIMA, VALUE_SCALES, CodesKV, padded_pairs
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.plans import AttentionPlan
from sgmv_kernels.triton_ops.attention_metadata import FEW_ROWS, AttentionTables, Shape
from sgmv_kernels.triton_ops.block_sizes import AttentionConfig, attention_config, device_name
from sgmv_kernels.triton_ops.common import (
    MOST_REGISTERS,
    as_bound,
    cast,
    dot,
    finished,
    kernel,
    power_of_two,
    product_dtype,
    softened,
)
from sgmv_kernels.triton_ops.kv_codes import half_of, rotate_heads, spread_bytes, spread_nibbles, words_of

_ITEM = tl.constexpr(5)
_REDUCE = tl.constexpr(4)
_SUMS = tl.constexpr(2)
_TREE = tl.constexpr(3)
_MAX_SLOTS = tl.constexpr(64)
SUMS = 2
DECODE_M = 16
REDUCED_PARTS = 16
"""Partial results that are read at the same time: as many as a warp holds in registers."""
KV_FORMATS = ("bfloat16", "float16", "float32", "int8", "k8v4")
"""KV formats that the kernels read."""
new_partials = torch.empty
"""Allocator of the partial results; tests replace it with one that fills them with NaN."""


def prepare(plan: AttentionPlan, device: torch.device) -> AttentionTables:
    """Return the tables of a step's sequences; work is cut at the first layer, when the heads are known."""
    return AttentionTables(plan, device)


def config_for(itemsize: int, kv: KvPages) -> AttentionConfig:
    """Return the block sizes for activations of `itemsize` bytes and these pages."""
    widest, is_coded = max(itemsize, kv.keys.itemsize), isinstance(kv.format, CodesKV)
    return attention_config(device_name(kv.slab.device), kv.head_dim, widest, codes=is_coded)


def shape_for(config: AttentionConfig, group: int) -> Shape:
    """Return the sizes by which work is cut for groups of `group` query heads."""
    decode_m, prefill_m = _rows(config, group)
    return Shape(decode_m // group, prefill_m // group, config.split_tokens, FEW_ROWS)


def attention(q: Tensor, kv: KvPages, plan: AttentionPlan, scoring: Scoring) -> Tensor:
    """See `ops.Ops.paged_attention`."""
    tables: AttentionTables = plan.prepared
    heads, dim, group = q.shape[1], q.shape[2], q.shape[1] // kv.num_heads
    config = config_for(q.itemsize, kv)
    work = tables.buffer(shape_for(config, group), group)
    out = torch.empty_like(q)
    decode_m, prefill_m = _rows(config, group)
    most = work.capacity
    is_coded, is_paired = isinstance(kv.format, CodesKV), VALUE_MINIMA in kv.parts
    padded = power_of_two(2 * padded_pairs(dim) if is_paired else dim)
    slots = (max(1, most.max_slots), kv.num_heads, decode_m)
    partial = new_partials((*slots, padded), dtype=torch.float32, device=q.device)
    sums = new_partials((*slots, SUMS), dtype=torch.float32, device=q.device)
    compute, precision = product_dtype(q.dtype) if is_coded else product_dtype(q.dtype, kv.keys.dtype)
    keys, values = kv.keys, kv.values
    if is_coded:
        # Rotate queries once for all parts of the keys: the matrix in each program would take too many registers.
        q, keys, values = rotate_heads(q, torch.empty_like(q)), words_of(keys), words_of(values)
    # Pages of floats have no scales: any address can be passed.
    key_scales, value_scales, value_minima = (
        kv.parts.get(name, keys) for name in (KEY_SCALES, VALUE_SCALES, VALUE_MINIMA)
    )
    if is_paired:
        # Read for two tokens at once: copies into shared memory have at least four bytes.
        value_scales, value_minima = value_scales.view(torch.int32), value_minima.view(torch.int32)
    has_trees = most.tree_rows > 0
    decode = (decode_m, config.decode_n, config.decode_warps, config.decode_stages, has_trees)
    prefill = (prefill_m, config.prefill_n, config.prefill_warps, config.prefill_stages, False)
    for items, items_at, (block_m, block_n, warps, stages, trees) in (
        (most.max_decode, work.decode_at, decode),
        (most.max_prefill, work.prefill_at, prefill),
    ):
        if items:
            _attention_kernel[(items, kv.num_heads)](
                q,
                keys,
                values,
                key_scales,
                value_scales,
                value_minima,
                out,
                partial,
                sums,
                work.ints,
                items_at,
                work.starts_at,
                work.lens_at,
                work.pages_at,
                work.trees_at,
                work.tree_rows_at,
                most.max_pages,
                scoring.scale,
                scoring.softcap or 0.0,
                scoring.window or 0,
                q if scoring.slopes is None else scoring.slopes,
                *keys.stride(),
                *values.stride(),
                *key_scales.stride()[:2],
                *value_scales.stride()[:2],
                HEADS=heads,
                GROUP=group,
                D=dim,
                D_PAD=padded,
                PAGE=kv.page_size,
                WINDOW=scoring.window is not None,
                SOFTCAP=scoring.softcap is not None,
                SLOPES=scoring.slopes is not None,
                TREES=trees,
                CODES=is_coded,
                PAIRED=is_paired,
                PAIRS=padded_pairs(dim),
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                COMPUTE=compute,
                PRECISION=precision,
                num_warps=warps,
                num_stages=stages,
                maxnreg=MOST_REGISTERS,
            )
    if most.max_reduce:
        _reduce_kernel[(most.max_reduce, heads)](
            out,
            partial,
            sums,
            work.ints,
            work.reduce_at,
            work.starts_at,
            HEADS=heads,
            GROUP=group,
            D=dim,
            D_PAD=padded,
            BLOCK_M=decode_m,
            PARTS=REDUCED_PARTS,
            num_warps=1,
        )
    if is_paired:
        rotate_heads(out, out)
    return out


def _rows(config: AttentionConfig, group: int) -> tuple[int, int]:
    """Return the rows of a small and of a long tile; each holds at least one query row with its group."""
    return power_of_two(group, DECODE_M), power_of_two(group, config.prefill_m)


@triton.jit
def _ones(bits):  # type: ignore[no-untyped-def]
    """Return the number of ones in int64 numbers that are not negative."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits = bits + (bits >> 8)
    bits = bits + (bits >> 16)
    return (bits + (bits >> 32)) & 0x7F


@kernel("items_at", "starts_at", "lens_at", "pages_at", "trees_at", "tree_rows_at", "max_pages", "window")
def _attention_kernel(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    key_scales,
    value_scales,
    value_minima,
    out,
    partial,
    sums,
    ints,
    items_at,
    starts_at,
    lens_at,
    pages_at,
    trees_at,
    tree_rows_at,
    max_pages,
    scale,
    softcap,
    window,
    slopes,
    key_page,
    key_head,
    key_dim,
    key_slot,
    value_page,
    value_head,
    value_slot,
    value_dim,
    scale_page,
    scale_head,
    range_page,
    range_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    TREES: tl.constexpr,
    CODES: tl.constexpr,
    PAIRED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute attention of one tile of query rows (row m: query m // GROUP, head m % GROUP) to one part of the keys."""
    item = ints + items_at + tl.program_id(0) * _ITEM
    part_begin, part_end = tl.load(item + 2), tl.load(item + 3)
    if part_begin >= part_end:
        return
    sequence, first_query, slot = tl.load(item), tl.load(item + 1), tl.load(item + 4)
    kv_head = tl.program_id(1)
    start = tl.load(ints + starts_at + sequence)
    query_len = tl.load(ints + starts_at + sequence + 1) - start
    kv_len = tl.load(ints + lens_at + sequence)
    block_q: tl.constexpr = BLOCK_M // GROUP

    m, d, n = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD), tl.arange(0, BLOCK_N)
    query = first_query + m // GROUP
    head = kv_head * GROUP + m % GROUP
    row_ok = (m < block_q * GROUP) & (query < query_len)
    dim_ok = d < D
    last = kv_len - query_len + query
    position = last
    row = (start + query).to(tl.int64) * HEADS + head
    q_tile = tl.load(q + row[:, None] * D + d[None, :], mask=row_ok[:, None] & dim_ok[None, :], other=0.0).to(COMPUTE)

    # The keys of this part that some row of the tile sees.
    first_last = kv_len - query_len + first_query
    end = tl.minimum(part_end, tl.minimum(kv_len, first_last + block_q))
    begin, first_position = part_begin, first_last
    tree, word = kv_len, tl.full((BLOCK_M,), 0, dtype=tl.int64)
    ancestors, slope = word, tl.full((BLOCK_M,), 0.0, dtype=tl.float32)
    if SLOPES:
        slope = tl.load(slopes + head, mask=row_ok, other=0.0)
    if TREES:
        tree = tl.load(ints + trees_at + sequence)
        first_position = tl.minimum(first_position, tree)
        about = ints + tree_rows_at + (start + query) * _TREE
        position = tl.load(about, mask=row_ok, other=0)
        word = tl.load(about + 1, mask=row_ok, other=0).to(tl.int64) & 0xFFFFFFFF
        word = word | tl.load(about + 2, mask=row_ok, other=0).to(tl.int64) << 32
        ancestors = word
        if WINDOW:
            # Drop the first ancestors, which are before the window.
            outside = position - window + 1 - tree
            for forgotten in range(as_bound(-window + _MAX_SLOTS)):
                word = tl.where(forgotten < outside, word & (word - 1), word)
    if WINDOW:
        begin = tl.maximum(begin, first_position - window + 1)
    last_page = (end + PAGE - 1) // PAGE
    highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.full((BLOCK_M,), 0.0, dtype=tl.float32)
    acc = tl.full((BLOCK_M, D_PAD), 0.0, dtype=tl.float32)
    nothing = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    table = ints + pages_at + sequence.to(tl.int64) * max_pages
    # A word has four numbers of a key, four tokens of a value, or eight values, where two in a byte are PAIRS apart.
    k_rows: tl.constexpr = D_PAD // 4 if CODES else D_PAD
    v_step: tl.constexpr = 4 if CODES else 1
    v_rows: tl.constexpr = BLOCK_N // v_step
    v_columns: tl.constexpr = D_PAD // 2 if PAIRED else D_PAD
    range_step: tl.constexpr = 2 if PAIRED else 1
    k_row, v_column = tl.arange(0, k_rows), tl.arange(0, v_columns)
    k_ok = k_row < ((D + 3) // 4 if CODES else D)
    v_ok = v_column < (PAIRS if PAIRED else D)
    number, number_ok = d, dim_ok
    if PAIRED:
        number = d // v_columns * PAIRS + d % v_columns
        number_ok = (d % v_columns < PAIRS) & (number < D)
    k_base = keys + kv_head.to(tl.int64) * key_head + k_row.to(tl.int64)[:, None] * key_dim
    v_base = values + kv_head.to(tl.int64) * value_head + v_column.to(tl.int64)[None, :] * value_dim
    # Without a mask, so that the compiler treats slots of a page as contiguous; the table is padded.
    next_page = tl.load(table + (begin // BLOCK_N * BLOCK_N + n) // PAGE)
    fours, next_fours, least = v_step * tl.arange(0, v_rows), next_page, total
    if CODES:
        next_fours = tl.load(table + (begin // BLOCK_N * BLOCK_N + fours) // PAGE)
    # Tiles begin at multiples of BLOCK_N, wherever the window begins.
    for tile in range(as_bound(begin // BLOCK_N), as_bound((end + BLOCK_N - 1) // BLOCK_N)):
        at = n + tile * BLOCK_N
        key_ok = (at >= begin) & (at < end)
        # Page ids were read one tile ahead, so that the addresses of keys do not wait for a load.
        page = next_page.to(tl.int64)
        next_page = tl.load(table + (at + BLOCK_N) // PAGE)
        # A masked key may be NaN: it affects only its own column of scores, which `visible` masks below.
        page_ok = (at // PAGE >= begin // PAGE) & (at // PAGE < last_page)
        k_tile = tl.load(
            k_base + (page * key_page + (at % PAGE) * key_slot)[None, :],
            mask=k_ok[:, None] & page_ok[None, :],
            other=0,
        )
        value_scale, value_least = total, total
        if CODES:
            # All scales are read before the first product, which hides the wait for them.
            key_places = page * scale_page + kv_head.to(tl.int64) * scale_head + at % PAGE
            value_places = page * range_page + kv_head.to(tl.int64) * range_head + at % PAGE // range_step
            value_scale = tl.load(value_scales + value_places, mask=key_ok, other=0)
            if PAIRED:
                value_scale = half_of(value_scale, at)
                value_least = half_of(tl.load(value_minima + value_places, mask=key_ok, other=0), at)
            key_scale = tl.load(key_scales + key_places, mask=page_ok, other=0.0) * scale
            scores = dot(q_tile, spread_bytes(k_tile, k_rows, BLOCK_N, COMPUTE), nothing, PRECISION)
            scores = scores * key_scale[None, :]
        else:
            scores = dot(q_tile, k_tile.to(COMPUTE), nothing, PRECISION) * scale
        if SOFTCAP:
            scores = softened(scores, softcap)
        visible = key_ok[None, :] & (at[None, :] <= last[:, None])
        slot_in_tree = tl.minimum(tl.maximum(at - tree, 0), _MAX_SLOTS - 1).to(tl.int64)
        if SLOPES:
            key_position = at[None, :]
            if TREES:
                # An ancestor's depth is its rank among the ancestors.
                depth = _ones(ancestors[:, None] & ((tl.full((BLOCK_N,), 1, tl.int64) << slot_in_tree) - 1)[None, :])
                key_position = tl.where((at < tree)[None, :], key_position, tree + depth.to(tl.int32))
            scores += slope[:, None] * (key_position - position[:, None]).to(tl.float32)
        if TREES:
            is_ancestor = (word[:, None] >> slot_in_tree[None, :]) & 1
            visible = visible & ((at < tree)[None, :] | (is_ancestor > 0))
        if WINDOW:
            visible = visible & (at[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # For a row without a visible key so far, -inf - -inf would be NaN.
        known = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(scores - known[:, None])
        fade = tl.exp(highest - known)
        highest = new_highest
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        if CODES:
            scaled = tl.where(visible, weights * value_scale[None, :], 0.0).to(COMPUTE)
            if PAIRED:
                least = least * fade + tl.sum(tl.where(visible, weights * value_least[None, :], 0.0), 1)
            first, first_page = tile * BLOCK_N + fours, next_fours.to(tl.int64)
            next_fours = tl.load(table + (first + BLOCK_N) // PAGE)
            v_tile = tl.load(
                v_base + (first_page * value_page + (first % PAGE) // 4 * value_slot)[:, None],
                mask=((first + 3 >= begin) & (first < end))[:, None] & v_ok[None, :],
                other=0,
            )
            if PAIRED:
                acc = dot(scaled, spread_nibbles(v_tile, v_rows, v_columns, COMPUTE), acc, PRECISION)
            else:
                acc = dot(scaled, spread_bytes(v_tile, v_rows, v_columns, COMPUTE), acc, PRECISION)
        else:
            v_tile = tl.load(
                v_base + (page * value_page + (at % PAGE) * value_slot)[:, None],
                mask=key_ok[:, None] & v_ok[None, :],
                other=0.0,
            )
            acc = finished(dot(weights.to(COMPUTE), v_tile.to(COMPUTE), acc, PRECISION))

    if PAIRED:
        acc += least[:, None]
    if slot < 0:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + row[:, None] * D + number[None, :]
        tl.store(target, cast(result, out.dtype.element_ty), mask=row_ok[:, None] & number_ok[None, :])
    else:
        kv_heads: tl.constexpr = HEADS // GROUP
        place = (slot.to(tl.int64) * kv_heads + kv_head) * BLOCK_M + m
        tl.store(partial + place[:, None] * D_PAD + number[None, :], acc, mask=row_ok[:, None] & number_ok[None, :])
        tl.store(sums + place * _SUMS, highest, mask=row_ok)
        tl.store(sums + place * _SUMS + 1, total, mask=row_ok)


@kernel("reduce_at", "starts_at")
def _reduce_kernel(  # type: ignore[no-untyped-def]
    out,
    partial,
    sums,
    ints,
    reduce_at,
    starts_at,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add the partial results of one head of one tile's query rows, in order."""
    item = ints + reduce_at + tl.program_id(0) * _REDUCE
    parts = tl.load(item + 3)
    if parts == 0:
        return
    sequence, first_query, first_slot = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    head = tl.program_id(1)
    kv_heads: tl.constexpr = HEADS // GROUP
    start = tl.load(ints + starts_at + sequence)
    queries = tl.minimum(tl.load(ints + starts_at + sequence + 1) - start - first_query, BLOCK_M // GROUP)
    p, d = tl.arange(0, PARTS), tl.arange(0, D_PAD)
    for query in range(as_bound(queries)):
        first_place = first_slot.to(tl.int64) * kv_heads + head // GROUP
        row = query * GROUP + head % GROUP
        highest = tl.full((1,), float("-inf"), dtype=tl.float32)
        total = tl.full((1,), 0.0, dtype=tl.float32)
        acc = tl.full((D_PAD,), 0.0, dtype=tl.float32)
        for block in range(as_bound((parts + PARTS - 1) // PARTS)):
            part = block * PARTS + p
            place = (first_place + part * kv_heads) * BLOCK_M + row
            part_highest = tl.load(sums + place * _SUMS, mask=part < parts, other=float("-inf"))
            part_total = tl.load(sums + place * _SUMS + 1, mask=part < parts, other=0.0)
            part_acc = tl.load(partial + place[:, None] * D_PAD + d[None, :], mask=(part < parts)[:, None], other=0.0)
            new_highest = tl.maximum(highest, tl.max(part_highest, 0))
            known = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            fade, part_fade = tl.exp(highest - known), tl.exp(part_highest - known)
            total = total * fade + tl.sum(part_total * part_fade, 0)
            acc = acc * fade + tl.sum(part_acc * part_fade[:, None], 0)
            highest = new_highest
        result = acc / tl.where(total == 0.0, 1.0, total)
        target = out + ((start + first_query + query).to(tl.int64) * HEADS + head) * D + d
        tl.store(target, cast(result, out.dtype.element_ty), mask=d < D)
