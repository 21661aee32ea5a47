"""Pages of codes on a GPU: rotation by a Hadamard matrix, and writes of keys and values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgmv_kernels.formats.kv_format import (
    KEY_SCALES,
    LEAST,
    LEVELS,
    MOST,
    NIBBLE_LEVELS,
    VALUE_MINIMA,
    VALUE_SCALES,
    padded_pairs,
    rotated_block,
)
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.triton_ops.common import MOST_REGISTERS, cast, dot, kernel, power_of_two

ROWS = 16
"""Token rows of a program, the fewest that `tl.dot` supports."""
_LEVELS, _NIBBLE_LEVELS = tl.constexpr(LEVELS), tl.constexpr(NIBBLE_LEVELS)
_LEAST, _MOST = tl.constexpr(LEAST), tl.constexpr(MOST)
_ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2^23: its sum with a small number is rounded to an integer, to nearest even."""


def words_of(codes: Tensor) -> Tensor:
    """Return codes [..., 4] as words [...], four in an int32."""
    return codes.view(torch.int32)[..., 0]


def rope_write_codes(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, pages: Tensor, slots: Tensor, kv_heads: int
) -> Tensor:
    """For pages of codes: see `ops.Ops.rope_write_kv`, or `rope_queries` if there are no key heads."""
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
            kv.parts.get(VALUE_MINIMA, kv.parts[VALUE_SCALES]),
            pages,
            slots,
            q,
            rows,
            *kv.keys.stride()[:3],
            *kv.values.stride()[:3],
            *kv.parts[KEY_SCALES].stride()[:2],
            *kv.parts[VALUE_SCALES].stride()[:2],
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=cos.shape[1],
            DIM=dim,
            DIM_PAD=power_of_two(dim),
            PAIRED=VALUE_MINIMA in kv.parts,
            PAIRS=padded_pairs(dim),
            PAIRS_PAD=power_of_two(padded_pairs(dim)),
            ROTATED=rotated_block(dim),
            BLOCK_T=ROWS,
            num_warps=4,
            maxnreg=MOST_REGISTERS,
        )
    return q


def rotate_heads(x: Tensor, out: Tensor) -> Tensor:
    """Write heads x [T, heads, D], rotated, into `out`, which may be x; see `kv_format.hadamard`."""
    count, dim = x.shape[0] * x.shape[1], x.shape[2]
    if count:
        grid = (triton.cdiv(count, ROWS),)
        options = {"DIM": dim, "DIM_PAD": power_of_two(dim), "ROTATED": rotated_block(dim), "BLOCK_T": ROWS}
        _rotate_heads_kernel[grid](x, out, count, **options, num_warps=4)
    return out


@kernel()
def spread_bytes(words, N: tl.constexpr, M: tl.constexpr, COMPUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the four signed bytes of each word [N, M], the lowest first, as numbers [4 N, M]."""
    low = tl.join(((words << 24) >> 24).to(COMPUTE), ((words << 16) >> 24).to(COMPUTE))
    high = tl.join(((words << 8) >> 24).to(COMPUTE), (words >> 24).to(COMPUTE))
    return tl.reshape(tl.permute(tl.join(low, high), (0, 3, 2, 1)), (4 * N, M))


@kernel()
def spread_nibbles(words, N: tl.constexpr, M: tl.constexpr, COMPUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the lower halves of the four bytes of each word [N, M], followed by the upper halves: [4 N, 2 M]."""
    first = tl.join(_nibble(words, 0, COMPUTE), _nibble(words, 8, COMPUTE))
    third = tl.join(_nibble(words, 16, COMPUTE), _nibble(words, 24, COMPUTE))
    first_upper = tl.join(_nibble(words, 4, COMPUTE), _nibble(words, 12, COMPUTE))
    third_upper = tl.join(_nibble(words, 20, COMPUTE), _nibble(words, 28, COMPUTE))
    bytes_ = tl.join(tl.join(first, third), tl.join(first_upper, third_upper))
    return tl.reshape(tl.permute(bytes_, (0, 3, 2, 4, 1)), (4 * N, 2 * M))


@kernel()
def _nibble(words, PLACE: tl.constexpr, COMPUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    return ((words >> PLACE) & 15).to(COMPUTE)


@kernel()
def half_of(words, at):  # type: ignore[no-untyped-def]
    """Return one of the two bf16 of each word as fp32: the lower one if `at` is even, else the upper one."""
    return ((words >> (at % 2 * 16)) << 16).to(tl.float32, bitcast=True)


@kernel()
def hadamard_matrix(SIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the matrix [SIDE, SIDE] of Hadamard matrices of BLOCK numbers, 1 or -1, along its diagonal; else 0."""
    i, j = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    bits = i & j & (BLOCK - 1)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return tl.where(i // BLOCK == j // BLOCK, 1.0 - 2.0 * (bits & 1), 0.0)


@kernel()
def _rotated(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return heads x [ROWS, WIDTH] fp32 with every block of ROTATED numbers rotated.

    A matrix for all numbers would not fit into registers: first SIDE neighbours are rotated, then numbers SIDE apart.
    """
    side: tl.constexpr = 16 if WIDTH <= 256 else 32
    apart: tl.constexpr = WIDTH // side
    nothing = tl.full((ROWS * apart, side), 0.0, dtype=tl.float32)
    near = hadamard_matrix(side, min(side, ROTATED))
    x = dot(tl.reshape(x, (ROWS * apart, side)), near, nothing, "tf32x3")
    if side < ROTATED:
        turned = tl.reshape(tl.permute(tl.reshape(x, (ROWS, apart, side)), (0, 2, 1)), (ROWS * apart, side))
        turned = dot(turned, hadamard_matrix(side, ROTATED // side), nothing, "tf32x3")
        x = tl.permute(tl.reshape(turned, (ROWS, side, apart)), (0, 2, 1))
    return tl.reshape(x, (ROWS, WIDTH)) / tl.sqrt(ROTATED * 1.0)


@kernel("count")
def _rotate_heads_kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    count,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = tl.arange(0, DIM_PAD)
    ok = (t < count)[:, None] & (d < DIM)[None, :]
    at = t[:, None] * DIM + d[None, :]
    heads = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, cast(_rotated(heads, BLOCK_T, DIM_PAD, ROTATED), out.dtype.element_ty), mask=ok)


@kernel()
def _symmetric(x, ok):  # type: ignore[no-untyped-def]
    """Return the int8 codes and scales of heads; see `kv_format.round_symmetric`."""
    sizes = tl.where(ok, tl.abs(x), 0.0)
    is_finite = tl.sum(sizes, 1) < float("inf")
    largest = tl.max(tl.where(is_finite[:, None], sizes, 0.0), 1)
    is_some = largest > _LEAST
    factor = tl.where(is_finite & is_some, _LEVELS / tl.where(is_some, largest, 1.0), 0.0)
    scale = tl.where(is_some, largest * (1 / _LEVELS), 0.0)
    whole = (x * factor[:, None] + _ROUNDING) - _ROUNDING
    codes = tl.where(whole == whole, whole, 0.0).to(tl.int32).to(tl.int8)
    return codes, tl.where(is_finite, scale, float("nan"))


@kernel()
def _least(x, ok):  # type: ignore[no-untyped-def]
    """Return the smallest number of each row."""
    return tl.min(tl.where(ok, x, float("inf")), 1)


@kernel()
def _nibbles(x, least, factor, ok):  # type: ignore[no-untyped-def]
    """Return 4-bit codes as fp32, 0 where not `ok`; see `kv_format.round_range`."""
    whole = ((x - least[:, None]) * factor[:, None] + _ROUNDING) - _ROUNDING
    bound = tl.minimum(tl.maximum(whole, 0.0), _NIBBLE_LEVELS * 1.0)
    return tl.where(ok & (whole == whole), bound, 0.0)


@kernel("rows", unaligned=("pages", "slots"))
def _rope_write_codes_kernel(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    keys,
    values,
    key_scales,
    value_scales,
    value_minima,
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
    range_page,
    range_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAIRED: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
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
    elif head < HEADS + KV_HEADS:
        numbers = tl.load(row + KV_HEADS * DIM + d[None, :], mask=ok, other=0.0)
        is_held = tl.min((tl.abs(numbers.to(tl.float32)) < _MOST).to(tl.int32), 1) > 0  # see `kv_format.held`
        x = tl.where(is_held[:, None] & (tl.abs(x) < _MOST), x, float("nan"))
        codes, scale = _symmetric(_rotated(x, BLOCK_T, DIM_PAD, ROTATED), ok)
        own = page * key_page + (head - HEADS) * key_head + slot * 4
        tl.store(keys + own[:, None] + ((d // 4) * key_quad + d % 4)[None, :], codes, mask=ok)
        tl.store(key_scales + page * scale_page + (head - HEADS) * scale_head + slot, scale, mask=t < rows)
    else:
        own_head = head - HEADS - KV_HEADS
        x = tl.where(tl.abs(x) < _MOST, x, 0.0)
        own = page * value_page + own_head * value_head + slot // 4 * value_quad + slot % 4
        place = page * range_page + own_head * range_head + slot
        if PAIRED:
            in_head = (d < DIM)[None, :]
            x = _rotated(x, BLOCK_T, DIM_PAD, ROTATED)
            minimum = cast(_least(x, in_head), tl.bfloat16)
            least, most = minimum.to(tl.float32), -_least(-x, in_head)
            unit = cast((most - least) * (1 / _NIBBLE_LEVELS), tl.bfloat16).to(tl.float32)
            is_some = unit > _LEAST
            factor = tl.where(is_some, 1.0 / tl.where(is_some, unit, 1.0), 0.0)
            unit = tl.where(is_some, unit, 0.0)
            # The two codes of a byte are far apart in a head, so a matrix product combines them.
            pair = tl.arange(0, PAIRS_PAD)
            lower, upper = d[:, None] == pair[None, :], (d[:, None] == pair[None, :] + PAIRS) & (pair < PAIRS)[None, :]
            weights = tl.where(lower & (pair < PAIRS)[None, :], 1.0, tl.where(upper, 16.0, 0.0)).to(tl.bfloat16)
            nothing = tl.full((BLOCK_T, PAIRS_PAD), 0.0, dtype=tl.float32)
            bytes_ = dot(_nibbles(x, least, factor, ok).to(tl.bfloat16), weights, nothing, "ieee").to(tl.int32)
            target = values + own[:, None] + (4 * pair)[None, :]
            tl.store(target, bytes_.to(tl.uint8), mask=(t < rows)[:, None] & (pair < PAIRS)[None, :])
            tl.store(value_scales + place, cast(unit, tl.bfloat16), mask=t < rows)
            tl.store(value_minima + place, minimum, mask=t < rows)
        else:
            codes, scale = _symmetric(x, ok)
            tl.store(values + own[:, None] + (4 * d)[None, :], codes, mask=ok)
            tl.store(value_scales + place, scale, mask=t < rows)
