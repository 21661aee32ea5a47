"""Pages of codes on a GPU: rotation by a Hadamard matrix, the write of keys and values. Speed is NOT MEASURED yet."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgmv_kernels.formats.kv_format import KEY_SCALES, LEAST, LEVELS, VALUE_SCALES, rotated_block
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.triton_ops.common import cast, dot, kernel, power_of_two

ROWS = 16
"""Token rows of a program, the fewest that `tl.dot` takes."""
_LEVELS, _LEAST = tl.constexpr(LEVELS), tl.constexpr(LEAST)
_ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2^23: its sum with a small number is rounded to a whole one, to nearest even."""


def words_of(codes: Tensor) -> Tensor:
    """Return codes [..., 4] as words [...], four to an int32."""
    return codes.view(torch.int32)[..., 0]


def rope_write_codes(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, pages: Tensor, slots: Tensor, kv_heads: int
) -> Tensor:
    """See `ops.Ops.rope_write_kv`, and `rope_queries` for no key heads; for pages of codes."""
    rows, dim = len(qkv), kv.head_dim
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if rows:
        _rope_write_codes_kernel[(triton.cdiv(rows, ROWS), heads + 2 * kv_heads)](
            qkv,
            cos,
            sin,
            kv.keys,
            kv.values,
            kv.parts[KEY_SCALES],
            kv.parts[VALUE_SCALES],
            pages,
            slots,
            q,
            rows,
            *kv.keys.stride()[:3],
            *kv.values.stride()[:3],
            *kv.parts[KEY_SCALES].stride()[:2],
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=cos.shape[1],
            DIM=dim,
            DIM_PAD=power_of_two(dim),
            ROTATED=rotated_block(dim),
            BLOCK_T=ROWS,
            num_warps=4,
        )
    return q


@kernel()
def hadamard_matrix(i, j, ROTATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return entries [i, j] of the Hadamard matrices of blocks of ROTATED numbers, 1 or -1, and 0 outside of blocks."""
    bits = i & j & (ROTATED - 1)
    bits = bits ^ (bits >> 8)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return tl.where(i // ROTATED == j // ROTATED, 1.0 - 2.0 * (bits & 1), 0.0)


@kernel("rows", unaligned=("pages", "slots"))
def _rope_write_codes_kernel(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    keys,
    values,
    key_scales,
    value_scales,
    pages,
    slots,
    q,
    rows,
    key_page,
    key_head,
    key_quad,
    value_page,
    value_head,
    value_quad,
    scale_page,
    scale_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Rotate or store one head, of q, k or v, of BLOCK_T token rows."""
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = tl.arange(0, DIM_PAD)
    head = tl.program_id(1)
    ok = (t < rows)[:, None] & (d < DIM)[None, :]
    row = qkv + (t * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM
    x = tl.load(row + d[None, :], mask=ok, other=0.0).to(tl.float32)
    page = tl.load(pages + t, mask=t < rows, other=0)
    slot = tl.load(slots + t, mask=t < rows, other=0)
    if (head < HEADS + KV_HEADS) & (HALF > 0):
        is_turned = ok & (d < 2 * HALF)[None, :]
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        other = tl.load(row + partner[None, :], mask=is_turned, other=0.0).to(tl.float32)
        angle = t[:, None] * HALF + (d % max(HALF, 1))[None, :]
        c = tl.load(cos + angle, mask=is_turned, other=1.0)
        s = tl.load(sin + angle, mask=is_turned, other=0.0)
        x = tl.where((d < HALF)[None, :], x * c - other * s, x * c + other * s)
    if head < HEADS:
        tl.store(q + ((t * HEADS + head) * DIM)[:, None] + d[None, :], cast(x, q.dtype.element_ty), mask=ok)
    else:
        if head < HEADS + KV_HEADS:
            matrix = hadamard_matrix(d[:, None], d[None, :], ROTATED)
            nothing = tl.full((BLOCK_T, DIM_PAD), 0.0, dtype=tl.float32)
            x = dot(x, matrix, nothing, "tf32x3") / tl.sqrt(ROTATED * 1.0)
        sizes = tl.where(ok, tl.abs(x), 0.0)
        is_finite = tl.sum(sizes, 1) < float("inf")
        largest = tl.max(tl.where(is_finite[:, None], sizes, 0.0), 1)
        is_some = largest > _LEAST
        factor = tl.where(is_finite & is_some, _LEVELS / tl.where(is_some, largest, 1.0), 0.0)
        scale = tl.where(is_some, largest * (1 / _LEVELS), 0.0)
        scale = tl.where(is_finite, scale, float("nan"))
        whole = (x * factor[:, None] + _ROUNDING) - _ROUNDING
        codes = tl.where(whole == whole, whole, 0.0).to(tl.int32).to(tl.int8)
        if head < HEADS + KV_HEADS:
            own = page * key_page + (head - HEADS) * key_head + slot * 4
            tl.store(keys + own[:, None] + ((d // 4) * key_quad + d % 4)[None, :], codes, mask=ok)
            tl.store(key_scales + page * scale_page + (head - HEADS) * scale_head + slot, scale, mask=t < rows)
        else:
            own = page * value_page + (head - HEADS - KV_HEADS) * value_head + slot // 4 * value_quad + slot % 4
            tl.store(values + own[:, None] + (4 * d)[None, :], codes, mask=ok)
            place = page * scale_page + (head - HEADS - KV_HEADS) * scale_head + slot
            tl.store(value_scales + place, scale, mask=t < rows)
